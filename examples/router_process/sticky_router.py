"""A router process that reads no events: it sends a prompt to the worker that got one with the same beginning.

    python sticky_router.py PORT http://127.0.0.1:8000 http://127.0.0.1:8001

It listens on the given port, and forwards requests to the engines at these URLs.
"""

import json
import sys
from contextlib import suppress

from aiohttp import ClientConnectionError, ClientError, ClientSession, ClientTimeout, TCPConnector, web

OWN = {"connection", "content-length", "host", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"}
port, *urls = sys.argv[1:]
sent = {}  # the URL it was sent to, by the first characters of a prompt
busy = dict.fromkeys(urls, 0)  # open requests
last = dict.fromkeys(urls, 0)  # when it was picked last


def kept(headers):
    return {name: value for name, value in headers.items() if name.lower() not in OWN}


async def complete(request):
    data = await request.read()
    start = str(json.loads(data or "{}").get("prompt"))[:64]
    for url in sorted(urls, key=lambda each: (sent.get(start) != each, busy[each], last[each])):
        busy[url] += 1
        last[url] = max(last.values()) + 1
        try:
            upstream = await client.request(
                request.method, url + request.path_qs, data=data, headers=kept(request.headers)
            )
        except ClientConnectionError:
            continue  # nothing was answered: try the next one
        else:
            async with upstream:
                sent[start] = url
                return await passed_on(request, upstream)
        finally:
            busy[url] -= 1
    return web.json_response({"error": "no engine can be reached"}, status=503)


async def passed_on(request, upstream):
    answer = web.StreamResponse(status=upstream.status, headers=kept(upstream.headers))
    with suppress(ConnectionError):  # the client went away
        await answer.prepare(request)
        try:
            async for part in upstream.content.iter_any():
                await answer.write(part)
        except ClientError:  # cut: cut the client's connection, too
            request.transport.abort()
    return answer


async def health(_):
    for url in urls:
        with suppress(ClientError):
            async with client.get(f"{url}/health") as answer:
                if answer.status == 200:
                    return web.Response()
    return web.Response(status=503)


async def app():
    global client  # noqa: PLW0603 - one program, one client
    connector = TCPConnector(force_close=True, limit=0)
    client = ClientSession(connector=connector, timeout=ClientTimeout(None), auto_decompress=False)
    app = web.Application(client_max_size=2**26)
    app.router.add_get("/health", health)
    app.router.add_route("*", "/{path:.*}", complete)
    app.on_cleanup.append(lambda _: client.close())
    return app


web.run_app(app(), host="127.0.0.1", port=int(port), print=None, shutdown_timeout=5, handler_cancellation=True)
