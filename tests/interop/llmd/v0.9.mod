module llmd

go 1.25.0

require github.com/llm-d/llm-d-kv-cache v0.9.0
