"""A small router of P/D pairs as a process, right or with one bug: `wrong_pair_router.py BUG WAY P... -- D...`.

Each P is a URL and the port of its bootstrap server, as `http://127.0.0.1:8000,8998`. It prints its port.
"""

import asyncio
import json
import sys
import uuid
from urllib.parse import urlsplit

import aiohttp
from aiohttp import web

BUGS = {
    "right": "",
    "right_falls_back": "",
    "sends_all_to_decode": "vllm",  # row 1
    "decodes_alone_in_silence": "vllm",  # row 2
    "sends_both_without_parameters": "vllm",  # row 3
    "adds_usage_of_both_legs": "vllm",  # row 4
    "says_decode_cached": "vllm",  # row 4
    "holds_load_of_prefill": "vllm",  # row 6
    "skips_short_prompts": "vllm",  # row 7
    "leaves_legs_of_clients_that_left": "sglang",  # row 8
    "sends_without_a_room_while_prefill_is_down": "sglang",  # row 9
    "makes_one_room": "sglang",  # row 13
    "passes_n_on": "vllm",  # row 14
    "passes_n_on_in_rooms": "sglang",  # row 14
    "leaves_the_limit_of_prefill": "vllm",  # row 18
    "leaves_the_stream_of_the_client": "vllm",  # row 18
    "makes_no_max_tokens_none_at_decode": "vllm",  # row 18
    "waits_for_the_other_leg": "sglang",  # row 19
    "makes_rooms_of_each_leg": "sglang",  # row 20
    "replaces_the_host": "vllm",  # row 21
    "waits_for_decode_though_refused": "sglang",  # row 24
}

NONE = {"remote_engine_id": None, "remote_block_ids": None, "remote_host": None, "remote_port": None}
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False, **NONE}


class Refused(Exception):  # noqa: N818 - what happened
    """An engine answered with an error."""

    def __init__(self, status, body):
        super().__init__(status)
        self.status, self.body = status, body


class Router:
    def __init__(self, bug, way, prefill, decode):
        self.bug, self.way, self.decode = bug, way, decode
        self.prefill = [each.split(",") for each in prefill]
        self.turn = 0
        self.loads = dict.fromkeys((url for url, _ in self.prefill), 0)
        self.session = None

    def picked(self):
        self.turn += 1
        url, port = min(self.prefill, key=lambda each: self.loads[each[0]])
        self.prefill.sort(key=lambda each: each[0] == url)  # among equals, the others come first next time
        return url, int(port), self.decode[self.turn % len(self.decode)]

    async def handle(self, request):
        if request.path == "/health":
            return web.Response()
        body = await request.json()
        if body.get("n", 1) > 1 and not self.bug.startswith("passes_n_on"):
            return error(400, "n must be 1")
        try:
            serve = self.at_once if self.way == "sglang" else self.serial
            return await serve(request, body)
        except Refused as refused:
            return web.Response(status=refused.status, body=refused.body, content_type="application/json")
        except aiohttp.ClientError as why:
            return error(502, f"no engine: {why}")

    async def post(self, url, path, body):
        async with self.session.post(url + path, json=body) as answer:
            text = await answer.read()
            if answer.status != 200:
                raise Refused(answer.status, text)
            return text

    # ------------------------------------------------------------------------------------------- one after the other

    async def serial(self, request, body):
        url, port, decode = self.picked()
        first = {**body, "stream": False, "max_tokens": 1}
        first.pop("stream_options", None)
        for name in ("max_completion_tokens", "min_tokens"):
            if name in first:
                first[name] = 1
        second, params = dict(body), dict(PREFILL)
        if self.way == "vllm-mooncake":
            transfer = f"xfer-{uuid.uuid4()}"
            params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer}
        if self.bug == "leaves_the_limit_of_prefill":
            first.update({"max_tokens": body.get("max_tokens", 5)})
        if self.bug == "leaves_the_stream_of_the_client" and body.get("stream"):
            first["stream"] = True
        if self.bug == "makes_no_max_tokens_none_at_decode" and "max_tokens" not in body:
            second["max_tokens"] = 1
        given = None
        skips = self.bug == "sends_all_to_decode" or (
            self.bug == "skips_short_prompts" and len(str(body.get("prompt", "x" * 99))) < 16
        )
        answered = {}
        if not skips:
            self.loads[url] += 1
            try:
                without = self.bug == "sends_both_without_parameters"
                first["kv_transfer_params"] = None if without else params
                text = await self.post(url, request.path, first)
                answered = json.loads(text) if not first["stream"] else {}
                given = answered.get("kv_transfer_params")
            except aiohttp.ClientError:
                if self.bug not in ("decodes_alone_in_silence", "right_falls_back"):
                    raise
            finally:
                if self.bug != "holds_load_of_prefill":
                    self.loads[url] -= 1
        if self.way == "vllm-mooncake":
            place = f"http://{urlsplit(url).hostname}:{port}"
            async with self.session.get(f"{place}/query") as answer:
                engine = (await answer.json())["0"]["engine_id"]
            given = {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "transfer_id": transfer,
                "remote_engine_id": engine,
                "remote_bootstrap_addr": place,
            }
        if given is not None and self.bug == "replaces_the_host":
            given["remote_host"] = urlsplit(url).hostname
        if given is not None:
            second["kv_transfer_params"] = given
        if self.bug == "says_decode_cached" and given:
            del given["remote_prefill_cached_tokens"]
            second["kv_transfer_params"] = given
        try:
            return await self.passed_on(request, decode, second, answered)
        finally:
            if self.bug == "holds_load_of_prefill":
                self.loads[url] -= 1

    async def passed_on(self, request, decode, body, answered):
        async with self.session.post(decode + request.path, json=body) as answer:
            if body.get("stream") and answer.status == 200:
                response = web.StreamResponse(headers={"Content-Type": answer.headers["Content-Type"]})
                await response.prepare(request)
                async for part in answer.content.iter_any():
                    await response.write(part)
                await response.write_eof()
                return response
            text = await answer.read()
            if self.bug == "adds_usage_of_both_legs" and answered:
                whole = json.loads(text)
                whole["usage"]["completion_tokens"] += answered["usage"]["completion_tokens"]
                text = json.dumps(whole).encode()
            return web.Response(status=answer.status, body=text, content_type="application/json")

    # ------------------------------------------------------------------------------------------------------- at once

    def room(self):
        return 7 if self.bug == "makes_one_room" else uuid.uuid4().int >> 65

    async def at_once(self, request, body):
        url, port, decode = self.picked()
        place = {"bootstrap_host": urlsplit(url).hostname, "bootstrap_port": port}
        room = self.room()
        first = {**body, **place, "bootstrap_room": room}
        second = {**first, "bootstrap_room": self.room() if self.bug == "makes_rooms_of_each_leg" else room}
        if self.bug == "sends_without_a_room_while_prefill_is_down":
            try:
                async with self.session.get(f"{url}/health"):
                    pass
            except aiohttp.ClientError:
                return await self.passed_on(request, decode, body, {})
        prefill = asyncio.ensure_future(self.post(url, request.path, first))
        leaves = self.bug == "leaves_legs_of_clients_that_left"
        decoding = asyncio.ensure_future(self.passed_on(request, decode, second, {}))
        legs = (prefill, decoding)
        try:
            if self.bug == "waits_for_the_other_leg":
                await asyncio.wait([decoding])
            else:
                while not decoding.done():
                    await asyncio.wait([each for each in legs if not each.done()], return_when=asyncio.FIRST_COMPLETED)
                    failed = prefill.exception() if prefill.done() else None
                    if self.bug == "waits_for_decode_though_refused" and getattr(failed, "status", 0) == 400:
                        await asyncio.wait([decoding])
                    elif failed is not None:
                        raise failed
            return decoding.result()
        finally:
            if not leaves:
                for each in legs:
                    each.cancel()


def error(status, why):
    return web.json_response({"error": {"message": why, "type": "error", "param": None, "code": status}}, status=status)


async def main(bug, way, engines):
    at = engines.index("--")
    router = Router(bug, way, engines[:at], engines[at + 1 :])
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
        router.session = session
        runner = web.ServerRunner(web.Server(router.handle, handler_cancellation=True), shutdown_timeout=0.0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        print(site._server.sockets[0].getsockname()[1], flush=True)  # noqa: T201 - the test reads it
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
