"""Served engines: their start-up time, and the cost of a completion and a stream. Two workers, time scale 0, with
verdict.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from statistics import median

from benchmarks.measure import Figure, needs

ROUNDS = 5
COMPLETIONS, STREAMS, TOKENS = 300, 200, 100
COMMAND = [sys.executable, "-m", "pytest_kvmock", "serve", "--workers", "2", "--num-blocks", "8192"]
IMPORTS = [sys.executable, "-c", "import aiohttp.web, msgspec, zmq.asyncio; print(flush=True)"]


def ready():
    """Measure the time from the start of the process until it listens, in turn with a process that imports its
    dependencies.
    """
    needs("aiohttp", "msgspec", "zmq")

    ours, theirs = [], []
    for _ in range(ROUNDS):
        for taken, command in ((ours, COMMAND), (theirs, IMPORTS)):
            start = time.perf_counter()
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
                process.stdout.readline()
                taken.append(time.perf_counter() - start)
                process.stdin.close()
                process.wait()
    peer = "a process that imports aiohttp, msgspec and zmq"
    yield Figure("the command `serve`, until it listens", median(theirs) / median(ours), None, peer)


def traffic():
    """Measure completions and streams of the command with an aiohttp client, against a handler with a constant
    answer.
    """
    needs("aiohttp", "msgspec", "zmq")

    process = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    async def all_figures():
        return [figure async for figure in _traffic(process)]

    try:
        yield from asyncio.run(all_figures())
    finally:
        process.terminate()
        process.wait()


async def _traffic(process):
    import aiohttp
    from aiohttp import web

    line = json.loads(process.stdout.readline())
    url = line["workers"][0]["http"] + "/v1/completions"

    async def constant(_request):
        return web.json_response({"choices": []})

    app = web.Application()
    app.router.add_post("/", constant)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    plain = f"http://127.0.0.1:{runner.addresses[0][1]}/"

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:

        async def post(to, body):
            async with client.post(to, json=body) as answer:
                return await answer.read()

        async def seconds(to, first):
            start = time.perf_counter()
            for number in range(first, first + COMPLETIONS):
                await post(to, {"prompt": f"{number:06d}" * 40, "max_tokens": 1})
            return (time.perf_counter() - start) / COMPLETIONS

        ours, theirs = [], []
        for number in range(ROUNDS):
            ours.append(await seconds(url, number * COMPLETIONS))
            theirs.append(await seconds(plain, 0))
        own, other = median(ours), median(theirs)
        peer = "a handler of aiohttp that answers a constant"
        why = "a request passes a scheduler, an engine and a verdict"
        yield Figure("completions a second, 240 tokens in, 1 out", other / own, 0.3, peer, why=why)

        async def stream(number):
            async with client.post(
                url, json={"prompt": f"{number:05d}" * 10, "max_tokens": TOKENS, "stream": True}
            ) as answer:
                return sum([row.startswith(b"data: {") async for row in answer.content])

        start = time.perf_counter()
        chunks = sum(await asyncio.gather(*map(stream, range(STREAMS))))
        rate = chunks / (time.perf_counter() - start)
        yield Figure(
            f"chunks a second of {STREAMS} streams of {TOKENS} tokens", rate * other, 3, f"{peer}: answers a second"
        )
    await runner.cleanup()
