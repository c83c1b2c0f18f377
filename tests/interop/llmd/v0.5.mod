module llmd

go 1.24.1

require github.com/llm-d/llm-d-kv-cache v0.5.0

// The module was renamed; v0.5.0 is published under the old name.
replace github.com/llm-d/llm-d-kv-cache => github.com/llm-d/llm-d-kv-cache-manager v0.5.0
