"""Served engines: how soon they are there, what a completion and a stream cost, how fast they are gone. Two workers, time scale 0, with verdict."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from statistics import median

from benchmarks.measure import Figure, needs
from pytest_kvmock import EngineProfile, RouterHarness

ROUNDS = 5
COMPLETIONS, STREAMS, TOKENS = 300, 200, 100
COMMAND = [sys.executable, "-m", "pytest_kvmock", "serve", "--workers", "2", "--num-blocks", "8192"]


def ready():
    """From the start of the process, and of a thread, until it listens."""
    needs("aiohttp", "msgspec", "zmq")
    processes, threads = [], []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        with subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            process.stdout.readline()
            processes.append(time.perf_counter() - start)
            process.stdin.close()
            process.wait()
    from pytest_kvmock.serve import KvServer

    for _ in range(ROUNDS + 1):
        with RouterHarness(EngineProfile(workers=2), "vllm") as kv:
            start = time.perf_counter()
            with KvServer(kv):
                threads.append(time.perf_counter() - start)
    taken = median(processes)
    yield Figure("the command `serve` listens after", "0.6 s", f"{taken:.2f} s", taken <= 0.6)
    taken = 1000 * median(threads[1:])
    yield Figure("a KvServer listens after, once a session has had one", "10 ms", f"{taken:.1f} ms", taken <= 10)


def traffic():
    """Completions, streams and the end, of the command, by a client of aiohttp; and a handler that answers a constant."""
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
        peer = f"a handler of aiohttp that answers a constant: {other * 1000:.2f} ms"
        text = "a completion, 240 tokens in, 1 out"
        yield Figure(text, "1 ms", f"{own * 1000:.2f} ms", own <= 0.001)
        yield Figure(f"{text}: requests a second", "0.1 x the peer", f"{other / own:.2f} x", other / own >= 0.1, peer)

        async def stream(number):
            async with client.post(
                url, json={"prompt": f"{number:05d}" * 10, "max_tokens": TOKENS, "stream": True}
            ) as answer:
                return sum([row.startswith(b"data: {") async for row in answer.content])

        start = time.perf_counter()
        chunks = sum(await asyncio.gather(*map(stream, range(STREAMS))))
        rate = chunks / (time.perf_counter() - start)
        yield Figure(
            f"{STREAMS} streams of {TOKENS} tokens", "10,000 chunks/s", f"{rate:,.0f} chunks/s", rate >= 10_000
        )
        control = line["control"]
        await post(control + "/hold", {})
        open_streams = [asyncio.create_task(stream(number)) for number in range(STREAMS)]
        await post(control + "/wait_requests", {"open": STREAMS})
        start = time.perf_counter()
        process.stdin.close()
        await asyncio.get_running_loop().run_in_executor(None, process.wait)
        taken = time.perf_counter() - start
        await asyncio.gather(*open_streams, return_exceptions=True)
        yield Figure(f"the command ends, with {STREAMS} open streams", "0.2 s", f"{taken:.2f} s", taken <= 0.2)
    await runner.cleanup()
