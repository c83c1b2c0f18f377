"""A router as a process of its own: it hears KV events over ZMQ, and sends each completion to the worker that holds most of its prompt.

    python plain_router.py 16 http://127.0.0.1:8000=tcp://127.0.0.1:5557 http://127.0.0.1:8001=tcp://127.0.0.1:5558

It prints where it listens. One token is one byte, as the tokenizer of the served engines has it.
"""

import asyncio
import sys

import msgspec
import zmq
import zmq.asyncio
from aiohttp import ClientSession, web


class Router:
    def __init__(self, block_size, workers):
        self.block_size = block_size
        self.held = {worker: {} for worker in workers}  # of each, by parent and tokens: the block
        self.open = dict.fromkeys(workers, 0)

    async def hear(self, worker, endpoint):
        """Apply the events of a worker for ever."""
        socket = zmq.asyncio.Context.instance().socket(zmq.SUB)
        socket.subscribe(b"")
        socket.connect(endpoint)
        next_number = 0
        while True:
            *_, number, payload = await socket.recv_multipart()
            if int.from_bytes(number) < next_number:  # it began anew: it was restarted, and is empty
                self.held[worker].clear()
            next_number = int.from_bytes(number) + 1
            for event in msgspec.msgpack.decode(payload)[1]:
                self.apply(self.held[worker], event)

    def apply(self, held, event):
        if event["type"] == "BlockStored":
            parent, tokens, size = event["parent_block_hash"], event["token_ids"], self.block_size
            for at, block in enumerate(event["block_hashes"]):
                held[parent, tuple(tokens[at * size : (at + 1) * size])] = block
                parent = block
        elif event["type"] == "BlockRemoved":
            gone = set(event["block_hashes"])
            for key in [key for key, block in held.items() if block in gone]:
                del held[key]
        else:
            held.clear()

    def overlap(self, held, tokens):
        parent, count = None, 0
        for at in range(0, len(tokens) - self.block_size + 1, self.block_size):
            parent = held.get((parent, tuple(tokens[at : at + self.block_size])))
            if parent is None:
                break
            count += 1
        return count

    async def complete(self, request):
        body = await request.json()
        tokens = body["prompt"].encode()
        worker = max(self.held, key=lambda each: (self.overlap(self.held[each], tokens), -self.open[each]))
        self.open[worker] += 1
        try:
            async with request.app["client"].post(f"{worker}/v1/completions", json=body) as answer:
                return web.Response(body=await answer.read(), status=answer.status, content_type="application/json")
        finally:
            self.open[worker] -= 1


async def main(block_size, *workers):
    sources = dict(each.split("=") for each in workers)
    router = Router(int(block_size), sources)
    app = web.Application()
    app.router.add_post("/v1/completions", router.complete)
    async with ClientSession() as app["client"], asyncio.TaskGroup() as tasks:
        for worker, endpoint in sources.items():
            tasks.create_task(router.hear(worker, endpoint))
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        print(runner.addresses[0][1], flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
