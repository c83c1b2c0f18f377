"""A router process that knows only first blocks: it sends a prompt to the holder of its first block.

    python first_block_router.py http://127.0.0.1:8000=tcp://127.0.0.1:5557 http://127.0.0.1:8001=tcp://127.0.0.1:5558

It takes the URL of each engine and the endpoint of its events, and prints the port that it listens on.
"""

import http.client
import http.server
import json
import sys
import threading

import msgspec
import zmq

BLOCK = 16  # tokens, each a byte
workers = dict(each.split("=") for each in sys.argv[1:])  # the endpoint of the events, by URL
holders = {}  # by the tokens of a first block: the worker that holds it


def follow(url, endpoint):
    socket = zmq.Context.instance().socket(zmq.SUB)
    socket.subscribe(b"")
    socket.connect(endpoint)
    while True:
        for event in msgspec.msgpack.decode(socket.recv_multipart()[-1])[1]:
            if event["type"] == "BlockStored" and event["parent_block_hash"] is None:
                holders[tuple(event["token_ids"][:BLOCK])] = url


class Router(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        holder = holders.get(tuple(json.loads(body)["prompt"].encode()[:BLOCK]))
        if self.path == "/blocks":  # its known blocks of a prompt, for the test
            rows = [{"worker": list(workers).index(holder), "rank": 0, "blocks": 1}] if holder else []
            self.answer(200, json.dumps(rows).encode())
            return
        client = http.client.HTTPConnection((holder or next(iter(workers))).removeprefix("http://"))
        client.request("POST", self.path, body, {"Content-Type": "application/json"})
        answer = client.getresponse()
        self.answer(answer.status, answer.read())

    def answer(self, status, body):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


for each in workers.items():
    threading.Thread(target=follow, args=each, daemon=True).start()
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Router)
print(server.server_port, flush=True)
server.serve_forever()
