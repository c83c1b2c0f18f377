//go:build v0_5

package main

import (
	"github.com/llm-d/llm-d-kv-cache/pkg/kvcache/kvblock"
	"github.com/llm-d/llm-d-kv-cache/pkg/kvevents"
)

type client struct {
	index     kvblock.Index
	processor kvblock.TokenProcessor
	pool      *kvevents.Pool
}

func newClient(index kvblock.Index, blockSize int, _ string) (*client, error) {
	processor := kvblock.NewChunkedTokenDatabase(&kvblock.TokenProcessorConfig{BlockSize: blockSize})
	pool := kvevents.NewPool(&kvevents.Config{Concurrency: 2}, index, processor)
	return &client{index, processor, pool}, nil
}

func (c *client) keys(model string, tokens []uint32) ([]kvblock.BlockHash, error) {
	return c.processor.TokensToKVBlockKeys(kvblock.EmptyBlockHash, tokens, model), nil
}
