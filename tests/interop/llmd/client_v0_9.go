//go:build v0_9

package main

import (
	"github.com/llm-d/llm-d-kv-cache/pkg/kvcache/kvblock"
	"github.com/llm-d/llm-d-kv-cache/pkg/kvevents"
	"github.com/llm-d/llm-d-kv-cache/pkg/kvevents/engineadapter"
)

type client struct {
	index     kvblock.Index
	processor kvblock.TokenProcessor
	pool      *kvevents.Pool
}

func newClient(index kvblock.Index, blockSize int, engine string) (*client, error) {
	processor, err := kvblock.NewChunkedTokenDatabase(&kvblock.TokenProcessorConfig{BlockSizeTokens: blockSize})
	if err != nil {
		return nil, err
	}
	adapter, err := engineadapter.NewAdapter(engine)
	if err != nil {
		return nil, err
	}
	pool := kvevents.NewPool(&kvevents.Config{Concurrency: 2}, index, processor, adapter)
	return &client{index, processor, pool}, nil
}

func (c *client) keys(model string, tokens []uint32) ([]kvblock.BlockHash, error) {
	return c.processor.TokensToKVBlockKeys(kvblock.EmptyBlockHash, tokens, model, nil)
}
