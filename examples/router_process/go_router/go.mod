module router

go 1.22
