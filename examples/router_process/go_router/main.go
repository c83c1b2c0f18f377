// A router in Go with only the standard library: it receives no events, and keeps a tree of sent prompts.
//
//	go run . PORT BLOCK_SIZE http://127.0.0.1:8000 http://127.0.0.1:8001
//
// A completion goes to the worker that got most of its prompt before; among equals, to the one with the fewest open requests,
// then in turn. One token is one byte.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"time"
)

// mostStop is how long a request may continue after SIGTERM.
const mostStop = 5 * time.Second

// hopByHop are the headers that are not forwarded (RFC 9110, section 7.6.1).
var hopByHop = []string{"Connection", "Content-Length", "Keep-Alive", "Te", "Trailer", "Transfer-Encoding", "Upgrade"}

// node is one block in the tree of sent prompts: its workers, and the blocks after it. The tree only grows; in production it needs a bound.
type node struct {
	sentTo   map[*worker]bool
	children map[string]*node
}

func newNode() *node { return &node{map[*worker]bool{}, map[string]*node{}} }

type worker struct {
	url    string
	open   int
	picked int // when it was picked last
}

type router struct {
	mutex     sync.Mutex
	blockSize int
	workers   []*worker
	roots     map[string]*node // by adapter and salt
	picks     int
	client    *http.Client
}

// asked has the fields of a request that the router reads.
type asked struct {
	Model  string          `json:"model"`
	Prompt json.RawMessage `json:"prompt"`
	Salt   string          `json:"cache_salt"`
}

// blocks returns the name of an empty prompt with the request's model and salt, and the whole blocks of a text prompt.
func (r *router) blocks(body []byte) (string, []string) {
	var request asked
	var prompt string
	if json.Unmarshal(body, &request) != nil || json.Unmarshal(request.Prompt, &prompt) != nil {
		return "", nil
	}
	var found []string
	for ; len(prompt) >= r.blockSize; prompt = prompt[r.blockSize:] {
		found = append(found, prompt[:r.blockSize])
	}
	return strconv.Quote(request.Model) + strconv.Quote(request.Salt), found
}

// overlap counts the leading blocks that were sent to each worker.
func (r *router) overlap(root string, blocks []string) map[*worker]int {
	found := map[*worker]int{}
	at := r.roots[root]
	for depth, block := range blocks {
		if at == nil || at.children[block] == nil {
			break
		}
		at = at.children[block]
		for each := range at.sentTo {
			if found[each] == depth {
				found[each] = depth + 1
			}
		}
	}
	return found
}

// pick returns the worker for a prompt, without those already tried, and counts the request as open there; nil if there is none.
func (r *router) pick(root string, blocks []string, tried map[*worker]bool) *worker {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	overlap := r.overlap(root, blocks)
	var best *worker
	for _, each := range r.workers {
		if !tried[each] && (best == nil || better(each, best, overlap)) {
			best = each
		}
	}
	if best != nil {
		r.picks++
		best.picked = r.picks
		best.open++
	}
	return best
}

func better(one, other *worker, overlap map[*worker]int) bool {
	if overlap[one] != overlap[other] {
		return overlap[one] > overlap[other]
	}
	if one.open != other.open {
		return one.open < other.open
	}
	return one.picked < other.picked
}

// done ends a request at a worker; if it was served, the worker holds its blocks from now on.
func (r *router) done(to *worker, root string, blocks []string, served bool) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	to.open--
	if !served || len(blocks) == 0 {
		return
	}
	if r.roots[root] == nil {
		r.roots[root] = newNode()
	}
	at := r.roots[root]
	for _, block := range blocks {
		if at.children[block] == nil {
			at.children[block] = newNode()
		}
		at = at.children[block]
		at.sentTo[to] = true
	}
}

// complete sends a request to a worker; if it cannot be reached, and has answered nothing, to another one.
func (r *router) complete(out http.ResponseWriter, in *http.Request) {
	body, err := io.ReadAll(in.Body)
	if err != nil {
		return // the client has gone
	}
	root, blocks := r.blocks(body)
	tried := map[*worker]bool{}
	for to := r.pick(root, blocks, tried); to != nil; to = r.pick(root, blocks, tried) {
		tried[to] = true
		answer, err := r.send(in, to, body)
		if err != nil {
			r.done(to, root, blocks, false)
			if in.Context().Err() != nil {
				return // the client has gone
			}
			continue // nothing was answered yet
		}
		defer answer.Body.Close()
		defer r.done(to, root, blocks, answer.StatusCode == http.StatusOK)
		passOn(out, answer)
		return
	}
	http.Error(out, `{"error": {"message": "no worker can be reached", "code": 503}}`, http.StatusServiceUnavailable)
}

// send sends a request to a worker, and returns its answer once the head is there; it ends with the client's request.
func (r *router) send(in *http.Request, to *worker, body []byte) (*http.Response, error) {
	request, err := http.NewRequestWithContext(in.Context(), in.Method, to.url+in.URL.RequestURI(), bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	request.Header = in.Header.Clone()
	for _, name := range hopByHop {
		request.Header.Del(name)
	}
	return r.client.Do(request)
}

// passOn forwards an answer unchanged, part by part. If the answer is cut, it cuts the client's connection, too.
func passOn(out http.ResponseWriter, answer *http.Response) {
	for name, values := range answer.Header {
		out.Header()[name] = values
	}
	for _, name := range hopByHop {
		out.Header().Del(name)
	}
	out.WriteHeader(answer.StatusCode)
	part := make([]byte, 32*1024)
	for {
		count, err := answer.Body.Read(part)
		if _, gone := out.Write(part[:count]); gone != nil {
			return
		}
		out.(http.Flusher).Flush()
		if err == io.EOF {
			return
		}
		if err != nil {
			panic(http.ErrAbortHandler)
		}
	}
}

// health answers 200 while any worker does, otherwise 503.
func (r *router) health(out http.ResponseWriter, in *http.Request) {
	r.mutex.Lock()
	workers := slices.Clone(r.workers)
	r.mutex.Unlock()
	for _, each := range workers {
		request, err := http.NewRequestWithContext(in.Context(), http.MethodGet, each.url+"/health", nil)
		if err != nil {
			continue
		}
		if answer, err := r.client.Do(request); err == nil {
			answer.Body.Close()
			if answer.StatusCode == http.StatusOK {
				return
			}
		}
	}
	out.WriteHeader(http.StatusServiceUnavailable)
}

// open answers the number of open requests.
func (r *router) open(out http.ResponseWriter, _ *http.Request) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	count := 0
	for _, each := range r.workers {
		count += each.open
	}
	fmt.Fprintln(out, count)
}

// use replaces the list of workers; workers that stay keep their state.
func (r *router) use(urls []string) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	known := map[string]*worker{}
	for _, each := range r.workers {
		known[each.url] = each
	}
	r.workers = nil
	for _, url := range urls {
		if known[url] == nil {
			known[url] = &worker{url: url}
		}
		r.workers = append(r.workers, known[url])
	}
}

func (r *router) useWorkers(out http.ResponseWriter, in *http.Request) {
	var urls []string
	if json.NewDecoder(in.Body).Decode(&urls) != nil {
		http.Error(out, "a list of URLs is expected", http.StatusBadRequest)
		return
	}
	r.use(urls)
	fmt.Fprintln(out, len(urls))
}

func main() {
	log.SetFlags(0)
	if len(os.Args) < 4 {
		log.Fatal("usage: router PORT BLOCK_SIZE URL...")
	}
	blockSize, err := strconv.Atoi(os.Args[2])
	if err != nil || blockSize < 1 {
		log.Fatalf("BLOCK_SIZE must be an integer of at least 1, got %q", os.Args[2])
	}
	// Each request has a new connection: a kept one may have been cut, and the result of a request on it is then unknown.
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DisableCompression: true}}
	router := &router{blockSize: blockSize, roots: map[string]*node{}, client: client}
	router.use(os.Args[3:])
	paths := http.NewServeMux()
	paths.HandleFunc("GET /health", router.health)
	paths.HandleFunc("GET /open", router.open)
	paths.HandleFunc("PUT /workers", router.useWorkers)
	paths.HandleFunc("/", router.complete)
	server := &http.Server{Handler: paths}
	listening, err := net.Listen("tcp", "127.0.0.1:"+os.Args[1])
	if err != nil {
		log.Fatal(err)
	}
	asked, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	defer stop()
	go server.Serve(listening)
	<-asked.Done()
	limit, cancel := context.WithTimeout(context.Background(), mostStop)
	defer cancel()
	server.Shutdown(limit) // open requests continue for a while
}
