"""A client of a served engine, using only the standard library."""

import http.client
import json
from urllib.parse import urlsplit


def call(url, path, body=None, method=None, headers=()):
    """Return status and body of a request; a JSON body is parsed."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=20)
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    try:
        sent = {"Content-Type": "application/json", **dict(headers)}
        connection.request(method or ("GET" if data is None else "POST"), path, data, sent)
        answer = connection.getresponse()
        text = answer.read().decode()
    finally:
        connection.close()
    try:
        return answer.status, json.loads(text)
    except ValueError:
        return answer.status, text


def complete(url, prompt, max_tokens=1, **more):
    """Return the answer to a completion that succeeds."""
    status, answer = call(url, "/v1/completions", {"prompt": prompt, "max_tokens": max_tokens, **more})
    assert status == 200, answer
    return answer


def cached(answer):
    """Return the tokens of a prompt that were cached."""
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def chunks(text):
    """Return the values of a streamed answer, and whether it ends correctly."""
    events = text.strip().split("\n\n")
    assert all(event.startswith("data: ") for event in events)
    return [json.loads(event[6:]) for event in events[:-1]], events[-1] == "data: [DONE]"
