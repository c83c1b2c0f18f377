"""The plain router of the examples in front of P/D pairs, right or with one bug.

It is started as `pair_router.py BUG WAY SIZE SOURCE...` and prints its port.
A prefill engine is given as for the plain router, with the port of its bootstrap server: `URL=EVENTS+REPLAY@8998`; a
decode engine as `decode:URL`.
"""

import asyncio
import json
import random
import sys
import uuid
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "router_process"))

from aiohttp import ClientConnectionError, ClientError, web
from plain_router import Router, kept, main

BUGS = {
    "right": "",
    "drops_loads_as_another_role_changes": "vllm",  # row 5
    "drops_loads_in_rooms": "sglang",  # row 5
    "forgets_what_is_decoded": "vllm",  # row 5
    "never_uses_who_joined": "vllm",  # row 5
    "takes_the_port_of_the_first_rank": "vllm",  # row 12
    "takes_the_first_engine_id": "vllm-mooncake",  # row 12
    "keeps_the_rank_for_itself": "sglang",  # row 12
    "says_another_rank": "sglang",  # row 12
}

NONE = {"remote_engine_id": None, "remote_block_ids": None, "remote_host": None, "remote_port": None}
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
LIMITS = ("max_completion_tokens", "min_tokens")


class Decoder:
    """A decode engine as the router sees it."""

    def __init__(self, url):
        self.url = url
        self.open = self.picked = 0


class PairRouter(Router):
    def __init__(self, block_size, way, bug):
        super().__init__(block_size)
        self.way, self.bug = way, bug
        self.decoders = {}  # by URL
        self.bootstraps = {}  # bootstrap port of each source

    def use(self, sources):
        decode = [each.partition(":")[2] for each in sources if each.startswith("decode:")]
        prefill = dict(each.split("@") for each in sources if not each.startswith("decode:"))
        if self.bug == "never_uses_who_joined" and self.decoders:
            return
        if self.bug.startswith("drops_loads") and set(decode) != set(self.decoders):
            super().use([])
        if self.bug == "forgets_what_is_decoded" and set(prefill) != set(self.bootstraps):
            self.decoders = {}
        self.bootstraps = {source: int(port) for source, port in prefill.items()}
        super().use([*prefill])
        self.decoders = {url: self.decoders.get(url) or Decoder(url) for url in decode}

    # ------------------------------------------------------------------------------------------------------ requests

    async def complete(self, request):
        data = await request.read()
        try:
            body = json.loads(data) if data else {}
            root, tokens = self.asked(body)
        except (ValueError, AttributeError):
            return error(400, "the body is no object of JSON")
        if not data:
            return await super().complete(request)
        if body.get("n", 1) != 1:
            return error(400, "n must be 1")
        tried = []
        while (worker := self.pick(root, tokens, tried)) is not None:
            tried.append(worker)
            rank = worker.overlap(root, tokens)[1]
            serve = self.at_once if self.way == "sglang" else self.serial
            try:
                answer = await serve(request, body, worker, rank)
            except ClientError as why:
                return error(502, f"an engine broke off: {why}")
            if answer is not None:
                return answer
        return error(503, "no prefill engine can be reached")

    def at_rank(self, request, worker, rank):
        headers = kept(request.headers)
        if len(worker.ranks) > 1:
            headers["X-data-parallel-rank"] = str(rank)
        return headers

    async def prefilled(self, request, worker, headers, body):
        """Send a prefill leg; return status, headers and body of its answer, or None if it cannot be reached."""
        worker.open += 1
        try:
            async with await self.send(request, worker, headers, json.dumps(body).encode()) as answer:
                worker.errors = worker.errors + 1 if answer.status >= 500 else 0
                return answer.status, kept(answer.headers), await answer.read()
        except ClientConnectionError:
            return None
        finally:
            worker.open -= 1

    async def serial(self, request, body, worker, rank):
        """Send one leg after the other; return None if the prefill engine cannot be reached."""
        first = {**body, "stream": False, "max_tokens": 1, **{name: 1 for name in LIMITS if name in body}}
        first.pop("stream_options", None)
        transfer = {"transfer_id": f"xfer-{uuid.uuid4()}"}
        first["kv_transfer_params"] = {**PREFILL, **(NONE if self.way == "vllm" else transfer)}
        answered = await self.prefilled(request, worker, self.at_rank(request, worker, rank), first)
        if answered is None:
            return None
        status, headers, text = answered
        if status != 200:
            return web.Response(status=status, headers=headers, body=text)
        given = json.loads(text)["kv_transfer_params"] if self.way == "vllm" else await self.engine_of(worker, rank)
        if self.way == "vllm-mooncake":
            given |= {"do_remote_prefill": True, "do_remote_decode": False, **transfer}
        if self.bug == "takes_the_port_of_the_first_rank":
            given["remote_port"] = 5600
        tried = []
        while len(tried) < len(self.decoders):
            decoder = self.decoder(tried)
            tried.append(decoder)
            try:
                answer = await self.decoded(request, decoder, {**body, "kv_transfer_params": given})
            except ClientConnectionError:
                continue
            else:
                return answer
        return error(503, "no decode engine can be reached")

    async def engine_of(self, worker, rank):
        """Ask Mooncake's bootstrap server for the name of a rank."""
        source = next(source for source, each in self.workers.items() if each is worker)
        place = f"http://{urlsplit(worker.url).hostname}:{self.bootstraps[source]}"
        async with self.client.get(f"{place}/query") as answer:
            engines = await answer.json()
        name = "0" if self.bug == "takes_the_first_engine_id" else str(rank)
        return {"remote_engine_id": engines[name]["engine_id"], "remote_bootstrap_addr": place}

    def decoder(self, tried=()):
        left = [each for each in self.decoders.values() if each not in tried]
        decoder = min(left, key=lambda each: (each.open, each.picked))
        self.picks += 1
        decoder.picked = self.picks
        return decoder

    async def decoded(self, request, decoder, body, prefill=None):
        """Send a decode leg and pass on its answer. The head waits for the first part of the answer, or for the end of
        a prefill leg that is open at the same time, whose error the client gets.
        """
        decoder.open += 1
        data = json.dumps(body).encode()
        begun = asyncio.ensure_future(self.head(request, decoder, data))
        try:
            legs = [begun] if prefill is None else [begun, prefill]
            await asyncio.wait(legs, return_when=asyncio.FIRST_COMPLETED)
            if prefill is not None and prefill.done() and (prefill.result() is None or prefill.result()[0] != 200):
                return None
            upstream, part = await begun
            async with upstream:
                return await self.relayed(request, upstream, part)
        finally:
            decoder.open -= 1
            if begun.done() and not begun.cancelled() and begun.exception() is None:
                begun.result()[0].close()
            begun.cancel()

    async def head(self, request, decoder, data):
        upstream = await self.send(request, decoder, kept(request.headers), data)
        try:
            return upstream, await upstream.content.readany()
        except BaseException:
            upstream.close()
            raise

    async def relayed(self, request, upstream, part):
        answer = web.StreamResponse(status=upstream.status, headers=kept(upstream.headers))
        answer.content_length = upstream.content_length
        try:
            await answer.prepare(request)
            while part:
                await answer.write(part)
                part = await upstream.content.readany()
        except ConnectionError:
            pass  # the client has disconnected
        except ClientError:
            self.cut(request)
        return answer

    async def at_once(self, request, body, worker, rank):
        """Send both legs together; return None if the prefill engine cannot be reached."""
        source = next(source for source, each in self.workers.items() if each is worker)
        place = {"bootstrap_host": urlsplit(worker.url).hostname, "bootstrap_port": self.bootstraps[source]}
        both = {**body, **place, "bootstrap_room": random.getrandbits(62)}
        first, second = dict(both), dict(both)
        if len(worker.ranks) > 1:
            first["routed_dp_rank"] = rank
            if self.bug != "keeps_the_rank_for_itself":
                second["disagg_prefill_dp_rank"] = 1 - rank if self.bug == "says_another_rank" else rank
        prefill = asyncio.ensure_future(self.prefilled(request, worker, kept(request.headers), first))
        try:
            answer = await self.decoded(request, self.decoder(), second, prefill)
            if answer is not None:
                return answer
            if (answered := prefill.result()) is None:
                return None
            status, headers, text = answered
            return web.Response(status=status, headers=headers, body=text)
        except ClientConnectionError as why:
            return error(503, f"no decode engine: {why}")
        finally:
            prefill.cancel()
            with suppress(asyncio.CancelledError, ClientError):
                await prefill

    # ------------------------------------------------------------------------------------------- what it is asked for

    async def health(self, request):
        answer = await super().health(request)
        if answer.status == 200:
            for each in self.decoders.values():
                with suppress(ClientError):
                    async with request.app["client"].get(f"{each.url}/health") as found:
                        if found.status == 200:
                            return web.Response()
        return web.Response(status=503)

    async def open_requests(self, _):
        legs = [*self.workers.values(), *self.decoders.values()]
        return web.json_response(sum(each.open for each in legs))

    async def send(self, request, worker, headers, data):
        self.client = request.app["client"]
        return await super().send(request, worker, headers, data)


def error(status, why):
    return web.json_response({"error": {"message": why, "type": "error", "param": None, "code": status}}, status=status)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        asyncio.run(main(PairRouter(int(sys.argv[3]), sys.argv[2], sys.argv[1]), sys.argv[4:]))
