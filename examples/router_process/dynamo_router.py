"""Dynamo's router as a process: its `SelectionService` receives the events and selects; this program forwards requests.

    python dynamo_router.py 16 http://127.0.0.1:8000=tcp://127.0.0.1:5557 http://127.0.0.1:8001=tcp://127.0.0.1:5558

It needs `ai-dynamo-runtime` 1.6.
"""

import asyncio
import sys

from aiohttp import ClientSession, web
from dynamo import _core

MODEL = "mock-model"


class Router:
    def __init__(self, workers):
        self.service = _core.SelectionService(indexer_threads=1)
        self.workers = list(workers)

    async def know(self, number, endpoint, block_size):
        record = {"worker_id": number, "model_name": MODEL, "block_size": block_size, "max_num_batched_tokens": 8192}
        record |= {"endpoint": self.workers[number], "kv_events_endpoint": endpoint}
        await self.service.upsert_worker(record)

    async def complete(self, request):
        body = await request.json()
        chosen = await self.service.select({"model_name": MODEL, "token_ids": list(body["prompt"].encode())})
        worker = self.workers[chosen["worker_id"]]
        async with request.app["client"].post(f"{worker}/v1/completions", json=body) as answer:
            return web.Response(body=await answer.read(), status=answer.status, content_type="application/json")


async def main(block_size, *workers):
    sources = dict(each.split("=") for each in workers)
    router = Router(sources)
    for number, endpoint in enumerate(sources.values()):
        await router.know(number, endpoint, int(block_size))
    app = web.Application()
    app.router.add_post("/v1/completions", router.complete)
    async with ClientSession() as app["client"]:
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        print(runner.addresses[0][1], flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
