// A client of KV events: the subscriber, event pool and in-memory index of llm-d, driven over standard input and output.
//
// Each line of input is a JSON request, and is answered by one line of JSON:
//
//	{"do": "subscribe", "pod": POD, "endpoint": ENDPOINT}    subscribes; answers {}
//	{"do": "unsubscribe", "pod": POD}                        ends a subscription; answers {}
//	{"do": "lookup", "model": MODEL, "tokens": [TOKEN, ...]} answers {"blocks": [[[POD, TIER], ...], ...]}, one list for
//	                                                         each block of the prompt
//
// What the client logs goes to standard error.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"runtime/debug"

	"github.com/llm-d/llm-d-kv-cache/pkg/kvcache/kvblock"
	"github.com/llm-d/llm-d-kv-cache/pkg/kvevents"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"k8s.io/apimachinery/pkg/util/sets"
	"sigs.k8s.io/controller-runtime/pkg/log"
	zaplog "sigs.k8s.io/controller-runtime/pkg/log/zap"
)

type request struct {
	Do       string   `json:"do"`
	Pod      string   `json:"pod"`
	Endpoint string   `json:"endpoint"`
	Model    string   `json:"model"`
	Tokens   []uint32 `json:"tokens"`
}

type answer struct {
	Blocks [][][2]string `json:"blocks,omitempty"`
	Error  string        `json:"error,omitempty"`
}

func main() {
	blockSize := flag.Int("block-size", 16, "tokens of a block")
	engine := flag.String("engine", "vllm", "vllm or sglang; v0.5 has one decoder for both")
	asked := flag.Bool("version", false, "print the version of llm-d's module")
	flag.Parse()
	if *asked {
		fmt.Println(version())
		return
	}
	level := zap.NewAtomicLevelAt(zapcore.Level(-4)) // with what is logged as DEBUG: what it drops, and why
	log.SetLogger(zaplog.New(zaplog.WriteTo(os.Stderr), zaplog.Level(&level)))
	if err := serve(*blockSize, *engine); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func serve(blockSize int, engine string) error {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	index, err := kvblock.NewInMemoryIndex(&kvblock.InMemoryIndexConfig{Size: 1_000_000, PodCacheSize: 10})
	if err != nil {
		return err
	}
	client, err := newClient(index, blockSize, engine)
	if err != nil {
		return err
	}
	client.pool.Start(ctx)
	subscribers := kvevents.NewSubscriberManager(client.pool)
	in, out := bufio.NewReader(os.Stdin), json.NewEncoder(os.Stdout)
	for {
		line, err := in.ReadBytes('\n')
		if err != nil {
			return nil // the end of the input is the end
		}
		var asked request
		reply := answer{}
		if err := json.Unmarshal(line, &asked); err != nil {
			return err
		}
		switch asked.Do {
		case "subscribe":
			err = subscribers.EnsureSubscriber(ctx, asked.Pod, asked.Endpoint, "kv@", true)
		case "unsubscribe":
			subscribers.RemoveSubscriber(ctx, asked.Pod)
		case "lookup":
			reply.Blocks, err = client.lookup(ctx, asked.Model, asked.Tokens)
		default:
			err = fmt.Errorf("unknown request %q", asked.Do)
		}
		if err != nil {
			reply.Error = err.Error()
		}
		if err := out.Encode(reply); err != nil {
			return err
		}
	}
}

func version() string {
	built, _ := debug.ReadBuildInfo()
	for _, module := range built.Deps {
		if module.Path == "github.com/llm-d/llm-d-kv-cache" {
			if module.Replace != nil {
				return module.Replace.Version
			}
			return module.Version
		}
	}
	return "unknown"
}

func (c *client) lookup(ctx context.Context, model string, tokens []uint32) ([][][2]string, error) {
	keys, err := c.keys(model, tokens)
	if err != nil || len(keys) == 0 {
		return nil, err
	}
	found, err := c.index.Lookup(ctx, keys, sets.New[string]())
	if err != nil {
		return nil, err
	}
	blocks := make([][][2]string, len(keys))
	for i, key := range keys {
		blocks[i] = [][2]string{}
		for _, entry := range found[key] {
			blocks[i] = append(blocks[i], [2]string{entry.PodIdentifier, entry.DeviceTier})
		}
	}
	return blocks, nil
}
