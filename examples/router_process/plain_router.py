"""A router process: it receives KV events over ZMQ, and sends each completion to the worker that holds most of its
prompt.

    python plain_router.py 16 http://127.0.0.1:8000=tcp://127.0.0.1:5557+tcp://127.0.0.1:6557
    http://127.0.0.1:8001=tcp://127.0.0.1:5558

It takes the URL of each worker and the endpoints of its ranks, separated by commas: the endpoint of events, and after a
"+" that of replays. It prints the port that it listens on. One token is one byte, as in the tokenizer of the served
engines.
"""

import asyncio
import json
import signal
import sys
from collections import Counter
from contextlib import suppress

import msgspec
import zmq
import zmq.asyncio
from aiohttp import ClientConnectionError, ClientError, ClientSession, ClientTimeout, TCPConnector, web

END = b"\xff" * 8  # the number of the message that ends an answer to a replay
REPLAY_S = 2.0  # timeout of a message of such an answer
REPLAYS = 3  # how often missing batches are requested: an answer may end early
GIVES_UP = 3  # after this number of errors in a row a worker's blocks do not count
STOP_S = 5.0  # how long a request may continue after SIGTERM
HOP_BY_HOP = {"connection", "content-length", "host", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"}
ATTENTION = (None, "full_attention", "mla_attention")
DEVICE = (None, "GPU")


class Cache:
    """The blocks on the device of one rank, by its events. A prefix has a name that a router can compute from a
    prompt.
    """

    def __init__(self, block_size):
        self.block_size = block_size
        self.clear()

    def clear(self):
        self.prefixes = {}  # by the engine's name of a block
        self.copies = Counter()  # by prefix; an engine may hold a block twice
        self.group = None  # the number of its attention group

    def apply(self, event):
        if event.get("medium") not in DEVICE:
            return  # on its host
        if event["type"] == "BlockStored":
            self.store(event)
        elif event["type"] == "BlockRemoved":
            if event.get("group_idx") == self.group:
                self.remove(event["block_hashes"])
        elif event["type"] == "AllBlocksCleared":
            self.clear()

    def store(self, event):
        if event.get("kv_cache_spec_kind") not in ATTENTION or event["block_size"] != self.block_size:
            return  # a window or a state, or the tail of a prompt
        self.group = event.get("group_idx")
        parent, tokens, size = event["parent_block_hash"], event["token_ids"], self.block_size
        prefix = self.root(event) if parent is None else self.prefixes.get(parent)
        if prefix is None:
            return  # its parent was lost
        for at, block in enumerate(event["block_hashes"]):
            prefix = hash((prefix, tuple(tokens[at * size : (at + 1) * size])))
            self.prefixes[block] = prefix
            self.copies[prefix] += 1

    def root(self, event):
        """Return the name of an empty prompt: the adapter and the salt. In vLLM the salt follows the adapter in the
        keys of the first block.
        """
        adapter = event.get("lora_name")
        keys = [each for each in (event.get("extra_keys") or [None])[0] or () if each != adapter]
        return hash((adapter, event.get("cache_salt", keys[0] if keys else None)))

    def remove(self, blocks):
        for block in blocks:
            prefix = self.prefixes.get(block)
            if prefix is None:
                continue
            self.copies[prefix] -= 1
            if self.copies[prefix] < 1:
                del self.copies[prefix], self.prefixes[block]

    def overlap(self, prefix, tokens):
        count = 0
        for at in range(0, len(tokens) - self.block_size + 1, self.block_size):
            prefix = hash((prefix, tuple(tokens[at : at + self.block_size])))
            if prefix not in self.copies:
                break
            count += 1
        return count


class Rank:
    """One rank of a worker: it applies the batches in order."""

    def __init__(self, cache, endpoints):
        self.cache = cache
        self.events, _, self.replays = endpoints.partition("+")
        self.next = 0
        self.time = -1.0

    async def follow(self):
        """Apply its events for ever."""
        socket = zmq.asyncio.Context.instance().socket(zmq.SUB)
        socket.subscribe(b"")
        socket.connect(self.events)
        await self.replay()  # earlier events
        while True:
            *_, number, payload = await socket.recv_multipart()
            await self.receive(int.from_bytes(number), payload)

    async def receive(self, number, payload):
        """Receive a batch: apply it in order, after missing batches before it."""
        batch = self.decoded(payload)
        if batch is None:  # a replay may have the original
            await self.replay()
            self.next = max(self.next, number + 1)
            return
        if number < self.next:
            if batch[0] <= self.time:
                return  # delivered twice, or already applied by a replay
            self.cache.clear()  # an old number at a later time: the rank was restarted, and is empty
            self.next = 0
        for _ in range(REPLAYS):
            if number > self.next:
                await self.replay()
        if number >= self.next:
            self.apply(number, batch)

    def decoded(self, payload):
        try:
            return msgspec.msgpack.decode(payload)
        except msgspec.DecodeError:
            return None

    def apply(self, number, batch):
        for event in batch[1]:
            self.cache.apply(event)
        self.next, self.time = number + 1, batch[0]

    async def replay(self):
        """Ask for the batches from the next one on, and apply them."""
        if not self.replays:
            return
        with zmq.asyncio.Context.instance().socket(zmq.DEALER) as socket:
            socket.set(zmq.LINGER, 0)
            socket.connect(self.replays)
            await socket.send_multipart([b"", self.next.to_bytes(8)])
            while await socket.poll(REPLAY_S * 1000):
                *_, number, payload = await socket.recv_multipart()
                if number == END:
                    return
                batch = self.decoded(payload)
                if batch is not None and int.from_bytes(number) >= self.next:
                    self.apply(int.from_bytes(number), batch)


class Worker:
    """The router's view of a worker."""

    def __init__(self, source, block_size):
        self.url, _, ranks = source.partition("=")
        self.ranks = [Rank(Cache(block_size), each) for each in ranks.split(",")]
        self.open = 0
        self.errors = 0  # in a row
        self.picked = 0  # when it was picked last

    def overlap(self, root, tokens):
        """Return the number of blocks of a prompt that its best rank holds, and this rank."""
        held = [rank.cache.overlap(root, tokens) for rank in self.ranks]
        return max(held), held.index(max(held))


def kept(headers):
    """Return the headers to forward."""
    return {name: value for name, value in headers.items() if name.lower() not in HOP_BY_HOP}


class Router:
    def __init__(self, block_size):
        self.block_size = block_size
        self.workers = {}  # by source
        self.following = {}  # the tasks that follow the ranks, by source
        self.picks = 0

    def use(self, sources):
        """Route to these workers from now on."""
        for source in [each for each in self.workers if each not in sources]:
            del self.workers[source]
            for task in self.following.pop(source):
                task.cancel()
        for source in [each for each in sources if each not in self.workers]:
            worker = self.workers[source] = Worker(source, self.block_size)
            self.following[source] = [asyncio.create_task(rank.follow()) for rank in worker.ranks]

    def asked(self, body):
        """Return the name of an empty prompt of this request, and its tokens; a chat has none here."""
        adapter = body.get("model") if body.get("model") != "mock-model" else None
        prompt = body.get("prompt")
        tokens = prompt.encode() if isinstance(prompt, str) else prompt or b""  # or ids
        return hash((adapter, body.get("cache_salt"))), tokens

    def pick(self, root, tokens, tried):
        """Return the worker that holds most of a prompt; among equals, the one with the fewest open requests, then in
        turn.
        """
        left = [each for each in self.workers.values() if each not in tried]
        if not left:
            return None
        worker = min(
            left, key=lambda each: (each.errors >= GIVES_UP, -each.overlap(root, tokens)[0], each.open, each.picked)
        )
        self.picks += 1
        worker.picked = self.picks
        return worker

    # ------------------------------------------------------------------------------------------------------ requests

    async def complete(self, request):
        """Send a request to a worker; if it cannot be reached, and has answered nothing, to another one."""
        data = await request.read()
        try:
            root, tokens = self.asked(json.loads(data) if data else {})
        except (ValueError, AttributeError):
            return web.json_response({"error": {"message": "the body is no object of JSON", "code": 400}}, status=400)
        tried = []
        while (worker := self.pick(root, tokens, tried)) is not None:
            tried.append(worker)
            headers = kept(request.headers)
            if len(worker.ranks) > 1:
                headers.setdefault("X-data-parallel-rank", str(worker.overlap(root, tokens)[1]))
            worker.open += 1
            try:
                upstream = await self.send(request, worker, headers, data)
            except ClientConnectionError:
                continue  # nothing was answered yet
            else:
                worker.errors = worker.errors + 1 if upstream.status >= 500 else 0
                async with upstream:
                    return await self.passed_on(request, upstream)
            finally:
                worker.open -= 1
        return web.json_response({"error": {"message": "no worker can be reached", "code": 503}}, status=503)

    async def send(self, request, worker, headers, data):
        """Send a request to a worker, and return its answer once the head is there."""
        send = request.app["client"].request
        return await send(request.method, worker.url + request.path_qs, data=data, headers=headers)

    async def passed_on(self, request, upstream):
        """Forward a worker's answer unchanged, part by part."""
        answer = web.StreamResponse(status=upstream.status, headers=kept(upstream.headers))
        answer.content_length = upstream.content_length
        try:
            await answer.prepare(request)
            async for part in upstream.content.iter_any():
                await answer.write(part)
        except ConnectionError:
            pass  # the client has gone
        except ClientError:
            self.cut(request)  # as the worker did: sent parts cannot be taken back
        return answer

    def cut(self, request):
        if request.transport is not None:
            request.transport.abort()

    # ------------------------------------------------------------------------------------------- what it is asked for

    async def health(self, request):
        """Answer 200 while a worker is healthy."""
        for worker in self.workers.values():
            with suppress(ClientError):
                async with request.app["client"].get(worker.url + "/health") as answer:
                    if answer.status == 200:
                        return web.Response()
        return web.Response(status=503)

    async def blocks(self, request):
        """Answer how many leading blocks of a prompt each rank of each worker holds."""
        root, tokens = self.asked(await request.json())
        rows = [
            {"url": worker.url, "rank": at, "blocks": rank.cache.overlap(root, tokens)}
            for worker in self.workers.values()
            for at, rank in enumerate(worker.ranks)
        ]
        return web.json_response(rows)

    async def open_requests(self, _):
        """Answer how many requests are open."""
        return web.json_response(sum(worker.open for worker in self.workers.values()))

    async def use_workers(self, request):
        """Replace the list of workers."""
        self.use(await request.json())
        return web.json_response(len(self.workers))


async def main(router, sources):
    app = web.Application(client_max_size=2**26)
    app.router.add_post("/blocks", router.blocks)
    app.router.add_get("/open", router.open_requests)
    app.router.add_put("/workers", router.use_workers)
    app.router.add_get("/health", router.health)
    app.router.add_route("*", "/{path:.*}", router.complete)
    router.use(sources)
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    # Each request has a new connection: a kept one may have been cut, and the result of a request on it is then
    # unknown.
    client = ClientSession(
        connector=TCPConnector(force_close=True, limit=0), timeout=ClientTimeout(None), auto_decompress=False
    )
    async with client as app["client"]:
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=STOP_S)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        print(runner.addresses[0][1], flush=True)
        await ended.wait()
        await runner.cleanup()  # open requests continue for a while


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        asyncio.run(main(Router(int(sys.argv[1])), sys.argv[2:]))
