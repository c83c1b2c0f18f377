"""A served engine in one network namespace, and a router with its clients in another, like two containers.

Run as `unshare --user --map-root-user --net python two_networks.py`: that namespace is the engine's. It prints as JSON
what the other namespace observed.
"""

import json
import socket
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

from served import call, complete

ROUTER = Path(__file__).parents[3] / "examples" / "router_process" / "plain_router.py"
ENGINE, CLIENT = "10.77.0.1", "10.77.0.2"
TRIES = 200


def say(line):
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def ip(*words):
    subprocess.run(["ip", *words], check=True)


def configure(device, address):
    ip("link", "set", "lo", "up")
    ip("address", "add", f"{address}/24", "dev", device)
    ip("link", "set", device, "up")


def engines():
    """Serve in this namespace; run the client in its own."""
    client = subprocess.Popen(
        ["unshare", "--net", sys.executable, __file__, "client"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    client.stdout.readline()  # the client has started in its namespace
    ip("link", "add", "kvmock0", "type", "veth", "peer", "name", "kvmock1", "netns", str(client.pid))
    configure("kvmock0", ENGINE)
    serve = ["serve", "--host", "0.0.0.0", "--advertise-host", ENGINE, "--workers", "2", "--topic", "kv@{host}:{port}"]
    server = subprocess.Popen(
        [sys.executable, "-m", "pytest_kvmock", *serve], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    ready = server.stdout.readline()
    seen, _ = client.communicate(ready, timeout=60)
    server.stdin.close()
    say(json.dumps({**json.loads(seen), "exit_code": server.wait(20)}))


def clients():
    """Run the router and its clients, for which the engines are on another machine."""
    say("here")
    ready = json.loads(sys.stdin.readline())
    configure("kvmock1", CLIENT)
    control, token = ready["control"], {"Authorization": f"Bearer {ready['token']}"}
    workers = [f"{each['http']}={each['events'][0]}" for each in ready["workers"]]
    router = subprocess.Popen([sys.executable, ROUTER, "16", *workers], stdout=subprocess.PIPE, text=True)
    try:
        url = f"http://127.0.0.1:{int(router.stdout.readline())}"
        subscribed = call(control, "/wait_subscribed", {"timeout": 20}, headers=token)
        for number in range(TRIES):
            text = f"{number:a<64}"  # each attempt has another prefix
            complete(
                ready["workers"][1]["http"], text
            )  # a router without events sends every request to the first worker
            complete(url, text)
            last = call(control, "/requests", headers=token)[1][-1]
            if last["worker"] == 1:
                break
        seen = {
            "control": urlsplit(control).hostname,
            "subscribed": subscribed[0],
            "without": [call(control, path, body)[0] for path, body in (("/verdict", None), ("/hold", {}))],
            "foreign": call(control, "/verdict", headers={**token, "Host": "evil.example"})[0],
            "right": call(control, "/verdict", headers=token)[1]["right"],
            "topics": [each["topic"] == f"kv@{urlsplit(each['http']).netloc}" for each in ready["workers"]],
            "sent_to": last["worker"],
            "overlap": last["overlap"],
            "loopback": socket.socket().connect_ex(("127.0.0.1", urlsplit(control).port)) != 0,
        }
    finally:
        router.terminate()
        router.wait()
    say(json.dumps(seen))


if __name__ == "__main__":
    clients() if sys.argv[1:] else engines()
