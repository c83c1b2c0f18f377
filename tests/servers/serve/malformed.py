"""Malformed requests for the ports of a served engine, drawn from a seed. To send 10,000 of them by hand:
`python tests/servers/serve/malformed.py 10000`.
"""

import gzip
import json
import random
import socket
import sys
import time
import zlib
from functools import partial
from urllib.parse import urlsplit

from served import call, complete

from pytest_kvmock import EngineProfile, RouterHarness
from pytest_kvmock.engines.backends import speaker_of
from pytest_kvmock.servers import KvServer
from pytest_kvmock.wire import find_dialect

CHAT = [{"role": "user", "content": "abc"}, {"role": "assistant", "content": [{"type": "text", "text": "d"}]}]
ENGINE = {
    "/v1/completions": {"prompt": "abcdef", "max_tokens": 3, "n": 1, "stream": False, "model": "mock-model"},
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 3, "stream_options": {"include_usage": True}, "stream": True},  # noqa: E501
    "/tokenize": {"prompt": "abc", "return_token_strs": True},
    "/detokenize": {"tokens": [1, 2, 300]},
    "/v1/completions/render": {"prompt": [1, 2, 3]},
    "/v1/chat/completions/render": {"messages": CHAT},
    "/generate": {"text": "abc", "sampling_params": {"max_new_tokens": 3, "n": 1}, "rid": "r", "stream": True},
    "/v1/models": None,
    "/metrics": None,
    "/v1/loads": None,
    "/server_info": None,
    "/reset_prefix_cache": {},
    "/flush_cache": {},
}  # fmt: skip
CONTROL = {
    "/ready": {},
    "/expect": {"prompt": [1, 2, 3]},
    "/check": {"prompt": "abc", "blocks": [{"worker": 0, "rank": 0, "blocks": 1}], "last_batch": [{"worker": 0, "rank": 0, "number": 1}]},  # noqa: E501
    "/hold": {"worker": 0},
    "/release": {"worker": 0},
    "/step": {"n": 1, "worker": 0},
    "/fault": {"worker": 0, "rank": 0, "name": "lose", "batches": 1},
    "/restart": {"worker": 0},
    "/stop": {"worker": 1},
    "/start": {"worker": 1},
    "/reset": {"worker": 0},
    "/text": {"blocks": 2, "after": "x"},
    "/requests": {},
    "/routing": {},
    "/replays": {},
    "/verdict": {},
    "/wait_requests": {"open": 0},
    "/wait_subscribed": {"subscribers": 1},
}  # fmt: skip
ODD = (
    *(None, True, False, 0, -1, 1, 2, 2.5, 1e308, float("nan"), float("inf"), 10**9, 2**31, 2**32, 2**63, 2**64, 10**400),  # noqa: E501
    *("", "a", "5", "\ud800", "\0", "true", "é" * 50, "x" * 5000, [], {}, [[]], [None] * 30, [True], ["a", 1], [2**33], [-1]),  # noqa: E501
    *([[1], "a"], [[1, 2], [True]], [["a"]], {"a": {"b": [None]}}, [{"role": 5}], [{}], [{"role": "user"}], {"worker": 0}, [0.5]),  # noqa: E501
)  # fmt: skip
UNDONE = ("/hold", "/stop")
METHODS = ("GET", "POST", "HEAD", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "get", "\u00e4")
PATHS = (
    "/",
    "//",
    "/..",
    "/%",
    "/%ff",
    "/%00",
    "*",
    "/v1",
    "/" + "a" * 9000,
    "/?\x80",
    "http://[/x",
    "/hold?worker=9",
    "/v1/models/x",
)
HEADERS = (
    *("Content-Encoding: gzip", "Content-Encoding: deflate", "Content-Encoding: br", "Content-Encoding: zstd"),
    *("Content-Length: -1", "Content-Length: 5", "Content-Length: x", "Transfer-Encoding: chunked", "Transfer-Encoding: x"),  # noqa: E501
    *("Content-Type: text/plain", "Content-Type: ", ("Content-Type: application/json; "
    "charset=utf-16"), "Expect: 100-continue"),
    *("Expect: x", "Host: ", "Host: evil.example", "Origin: null", "Origin: x", "X-data-parallel-rank: -1"),
    *(("X-data-parallel-rank: "
    "\xff"), "X-Request-Id: \xff\xfe", "Upgrade: websocket", ("Authorization: Bearer "
    "\xff"), "a", ": b", "A: " + "b" * 9000),
)  # fmt: skip
RAW = (
    *(b"", b"\r\n", b"\0" * 40, b"GET\r\n\r\n", b"GET /health\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00" * 9, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),  # noqa: E501
    *(b"POST /v1/completions HTTP/1.1\r\nContent-Length: 100\r\n\r\n{", b"GET /health HTTP/9.9\r\n\r\n"),
    b"POST /hold HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
)  # fmt: skip


def mutated(rng, value):
    """Return JSON with one odd part."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        out = dict(value)
        name = rng.choice(list(out))
        what = rng.random()
        if what < 0.15:
            del out[name]
        elif what < 0.25:
            out[
                rng.choice(
                    ("wroker", "\ud800", "", "n", "stream", "cache_salt", "priority", "echo", "data_parallel_rank")
                )
            ] = rng.choice(ODD)
        else:
            out[name] = mutated(rng, out[name])
        return out
    if isinstance(value, list) and value and rng.random() < 0.6:
        out = list(value)
        at = rng.randrange(len(out))
        out[at] = mutated(rng, out[at])
        return out
    return rng.choice(ODD)


def nested(rng):
    depth = rng.choice((2, 100, 499, 501, 940, 960, 970, 980, 985, 990, 1100, 20_000))
    begin, end = rng.choice(((b"[", b"]"), (b'{"a":', b"}")))
    name = rng.choice((b"prompt", b"messages", b"worker", b"blocks", b"x", b"tools", b"model"))
    return b'{"max_tokens": 1, "' + name + b'": ' + begin * depth + b"1" + end * depth + b"}"


def body_of(rng, path, template):
    """Return the bytes of a body."""
    kind = rng.random()
    if kind < 0.1:
        return nested(rng)
    if kind < 0.15:
        return bytes(rng.randrange(256) for _ in range(rng.randrange(60)))
    value = template
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        value = mutated(rng, value)
    if path.startswith("/wait") and isinstance(value, dict):
        value["timeout"] = rng.choice((0, 0.01, 0.01, -1, "x", None, [], 1e9, float("nan"), True))
    text = json.dumps(value).encode()
    if kind < 0.25:  # truncated, or with other bytes
        at = rng.randrange(len(text))
        return rng.choice(
            (text[:at], text[:at] + bytes([rng.randrange(256)]) + text[at + 1 :], text + text, b"\xef\xbb\xbf" + text)
        )
    return text.decode().encode(rng.choice(("utf-16", "utf-32"))) if kind < 0.28 else text


def request_of(rng, paths):
    """Return the path and the bytes of a request."""
    if rng.random() < 0.04:
        return "", rng.choice(RAW)
    path = rng.choice(list(paths))
    template = paths[path]
    body = b"" if template is None else body_of(rng, path, template)
    method = "GET" if template is None else "POST"
    if rng.random() < 0.1:
        method = rng.choice(METHODS)
    target = rng.choice(PATHS) if rng.random() < 0.05 else path
    headers = ["Host: localhost", "Connection: close", "Content-Type: application/json", f"Content-Length: {len(body)}"]
    if rng.random() < 0.15:
        headers += [rng.choice(HEADERS)]
    if rng.random() < 0.05:
        body = rng.choice((partial(gzip.compress, mtime=0), zlib.compress))(body)
        headers[3:] = [f"Content-Length: {len(body)}", rng.choice(HEADERS[:4])]
    head = "\r\n".join((f"{method} {target} HTTP/1.1", *headers, "", "")).encode("latin-1", "replace")
    return path, head + body


def answer_to(rng, url, sent, *, may_leave):
    """Return the status of the answer, or None if the connection was closed or left without one."""
    address = urlsplit(url)
    with socket.create_connection((address.hostname, address.port), timeout=30) as connection:
        connection.sendall(sent)
        if rng.random() < 0.1 and may_leave:
            return None  # the client does not wait
        connection.shutdown(socket.SHUT_WR) if not sent.startswith(
            (b"POST", b"GET")
        ) or b"Content-Length: 5" in sent else None
        if any(each in sent for each in (b"Content-Length: 100\r\n\r\n{", b"chunked", b"\0" * 40)):
            return None  # the server expects more
        answer = b""
        try:
            while part := connection.recv(65_536):
                answer = (answer + part)[:200]
        except ConnectionError:
            return None
    words = answer.split()
    return int(words[1]) if len(words) > 1 and words[0].startswith(b"HTTP/") else None


def fuzz(count, seed, dialect):
    """Send malformed requests to both ports of a server; return the number of answers by status, the errors, and the
    longest time of one request.
    """
    rng = random.Random(seed)
    statuses, wrong, longest = {}, [], 0.0
    profile = EngineProfile(block_size=16, num_blocks=64, workers=2)
    with (
        RouterHarness(profile, speaker_of(find_dialect(dialect))) as kv,
        KvServer(kv, dialect, ports={"control": 0}, adapters=["lora"]) as server,
    ):
        for number in range(count):
            is_control = rng.random() < 0.5
            path, sent = request_of(rng, CONTROL if is_control else ENGINE)
            begun = time.monotonic()
            url = server.control_url if is_control else server.url()
            status = answer_to(rng, url, sent, may_leave=path not in UNDONE)
            longest = max(longest, time.monotonic() - begun)
            statuses[status] = statuses.get(status, 0) + 1
            if status is not None and status >= 500:
                wrong.append((number, status, sent[:2000]))
            if path in UNDONE:
                call(server.control_url, "/release", {})
                for worker in server.workers:
                    call(server.control_url, "/start", {"worker": worker})
        server.wait_requests(0, timeout=60)
        wrong += [f"{url} does not serve" for url in server.urls if call(url, "/health")[0] != 200]
        for url in server.urls:
            complete(url, "abc")
        server.wait_requests(0, timeout=60)
        wrong += server.inside.broken
        wrong += [f"leaked: {request}" for each in (0, 1) for request in kv.engine(each).worker.requests]
        wrong += [f"open: {row}" for row in server.requests if row.status is None and not row.aborted]
    return statuses, wrong, longest


if __name__ == "__main__":
    for name in ("vllm-0.33", "sglang-0.5.23"):
        found, bad, longest_s = fuzz(int(sys.argv[1]) // 2, sys.argv[2] if sys.argv[2:] else 0, name)
        sys.stdout.write(f"{name}: {found}, {len(bad)} wrong, longest {longest_s:.2f} s\n")
        sys.stdout.writelines(f"{each}\n" for each in bad[:20])
