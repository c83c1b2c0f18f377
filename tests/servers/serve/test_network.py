"""Served engines beyond 127.0.0.1: which addresses are bound and named, and who may use them."""

import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from depth import worth_its_time
from served import call, complete
from test_kv_server import harness as harness_of
from test_serve_command import SERVE, Process, ended

from pytest_kvmock.servers import KvServer
from pytest_kvmock.servers.serve.network import Guard, Network, shows
from pytest_kvmock.wire.sockets import KvPublisher, KvSubscriber
from pytest_kvmock.wire.sockets.endpoints import EndpointError

TOKEN = "a-token-of-a-test"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
KEY = {"Authorization": "Bearer sk-1"}
IS_LINUX = sys.platform == "linux"  # it has all of 127.0.0.0/8
needs_127 = pytest.mark.skipif(not IS_LINUX, reason="only where all of 127.0.0.0/8 is the loopback")


def has_ipv6():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no loopback of IPv6")


def hosts_of(ready):
    """Return all hosts that a ready line names."""
    named = [ready["control"]]
    for worker in ready["workers"]:
        named += [worker["http"], *worker["events"], *worker["replay"]]
    return {urlsplit(each).hostname for each in named}


def refuses(host, port):
    """Return whether the port refuses connections."""
    with socket.socket() as client:
        return client.connect_ex((host, port)) != 0


@needs_127
@pytest.mark.parametrize("dialect", ["vllm-0.33", "sglang-0.5.23"])
def test_all_ports_are_bound_at_the_given_host_only(dialect):
    with (
        harness_of(2, dialect, dp_size=2) as kv,
        KvServer(kv, dialect, network={"host": "127.0.0.2"}, ports={"control": 0}, topic="kv@{host}:{port}") as server,
    ):
        ready = server.inside.ready_line()
        assert hosts_of(ready) == {"127.0.0.2"}
        for worker in ready["workers"]:
            assert worker["topic"] == f"kv@{urlsplit(worker['http']).netloc}"
            for each in (worker["http"], *worker["events"], *worker["replay"]):
                assert refuses("127.0.0.1", urlsplit(each).port)
        assert refuses("127.0.0.1", urlsplit(server.control_url).port)
        events, text = [], server.text(4)
        given = ready["workers"][0]
        with KvSubscriber(given["events"], events.append, dialect=dialect, replay=given["replay"]) as subscriber:
            server.publisher(0).wait_subscribed()
            complete(given["http"], text)
            subscriber.receive(1)
        assert [len(each.event.data.block_hashes) for each in events] == [4]
        assert call(server.control_url, "/verdict")[1]["right"]  # no token on the loopback
        if dialect.startswith("vllm"):
            sources = call(given["http"], "/kv_event_sources")[1]
            assert [each["endpoint"] for each in sources.values()] == given["events"]
            assert [each["replay_endpoint"] for each in sources.values()] == given["replay"]
        else:
            info = call(given["http"], "/server_info")[1]["kv_events"]
            assert info["endpoint_host"] == "127.0.0.2"
            assert [f"tcp://127.0.0.2:{info['endpoint_port_base'] + rank}" for rank in (0, 1)] == given["events"]
        server.stop(0)
        assert refuses("127.0.0.2", urlsplit(given["http"]).port)
        server.start(0)
        assert complete(given["http"], text)
        assert refuses("127.0.0.1", urlsplit(given["http"]).port)


@needs_ipv6
def test_an_ipv6_address_is_written_in_brackets():
    with harness_of(1) as kv, KvServer(kv, network={"host": "::1"}, ports={"control": 0}, topic="kv@{host}") as server:
        ready = server.inside.ready_line()
        assert hosts_of(ready) == {"::1"}
        assert ready["workers"][0]["topic"] == "kv@::1"
        assert complete(server.url(0), "abc")
        assert call(server.control_url, "/ready")[1] == ready
        with KvSubscriber(ready["workers"][0]["events"], lambda _: None, dialect=server.dialect):
            server.wait_subscribed()


def test_clients_are_given_the_advertised_host():
    with (
        harness_of(1) as kv,
        KvServer(kv, network={"advertise_host": "localhost"}, ports={"control": 0}, topic="{host}") as server,
    ):
        ready = server.inside.ready_line()
        assert hosts_of(ready) == {"localhost"}
        assert [server.url(0)] == server.urls == [ready["workers"][0]["http"]]
        assert ready["workers"][0]["topic"] == "localhost"
        assert complete(server.url(0), "abc")
        assert call(server.control_url, "/ready")[1] == ready
    with (
        harness_of(1) as kv,
        KvServer(kv, network={"advertise_host": "Kv_Engines.test"}, ports={"control": 0}) as server,
    ):
        port = urlsplit(server.control_url).port
        assert server.control_url == f"http://Kv_Engines.test:{port}"
        assert call(f"http://127.0.0.1:{port}", "/ready", headers={"Host": f"kv_engines.test:{port}"})[0] == 200


def test_binding_all_addresses_requires_a_token_and_an_advertised_host():
    with (
        harness_of(1) as kv,
        KvServer(kv, network={"host": "0.0.0.0", "advertise_host": "127.0.0.1"}, ports={"control": 0}) as server,
    ):
        ready = server.inside.ready_line()
        assert hosts_of(ready) == {"127.0.0.1"}
        assert ready["token"] == server.token
        assert len(server.token) >= 40
        control = server.control_url
        text = "the control API needs its token: send 'Authorization: Bearer TOKEN'"
        for headers in ({}, {"Authorization": "Bearer x"}, {"Authorization": server.token}, {"Authorization": ""}):
            for path, body in (("/ready", None), ("/hold", {}), ("/nothing", None)):
                assert call(control, path, body, headers=headers) == (401, {"error": text})
        assert call(control, "/ready", headers={"Authorization": f"Bearer {server.token}"}) == (200, ready)
        assert call(control, "/ready", headers={"Host": "evil.example"})[0] == 403
        if IS_LINUX:  # each address by which the machine was reached is a valid host name
            port = urlsplit(control).port
            by = {"Authorization": f"bearer {server.token}"}
            assert call(f"http://127.0.0.3:{port}", "/ready", headers=by)[0] == 200
            assert call(f"http://127.0.0.3:{port}", "/ready", headers={**by, "Host": "127.0.0.4"})[0] == 403
        assert complete(server.url(0), "abc")  # engines require no token
    with harness_of(1) as kv, KvServer(kv, network={"host": "0.0.0.0", "advertise_host": "127.0.0.1"}) as server:
        assert server.token is None  # no port requires one


def test_a_given_token_is_required_on_the_loopback_too():
    with (
        harness_of(1) as kv,
        KvServer(kv, network={"token": TOKEN, "allowed_hosts": ["kv.test"]}, ports={"control": 0}) as server,
    ):
        assert server.inside.ready_line()["token"] is None  # a given token is not printed
        assert call(server.control_url, "/ready")[0] == 401
        assert call(server.control_url, "/ready", headers=BEARER)[0] == 200
        assert call(server.control_url, "/ready", headers={**BEARER, "Host": "KV.test:99"})[0] == 200
        assert call(server.control_url, "/ready", headers={**BEARER, "Host": "kv.test.evil"})[0] == 403
        assert call(server.control_url, "/ready", headers={"Authorization": b"Bearer \xff"})[0] == 401


def test_secrets_are_compared_in_constant_time(monkeypatch):
    compared = []
    monkeypatch.setattr(
        "pytest_kvmock.servers.serve.network.secrets.compare_digest", lambda a, b: compared.append((a, b)) or a == b
    )
    assert shows("Bearer abc", "abc")
    assert shows("bEARER abc", "abc")
    assert not shows("Basic abc", "abc")
    assert not shows("Bearer ab", "abc")
    assert not shows("", "abc")
    assert [a for a, _ in compared] == [b"abc", b"abc", b"abc", b"ab", b""]
    assert {b for _, b in compared} == {b"abc"}


@pytest.mark.parametrize(
    ("dialect", "guarded", "free"),
    [
        ("vllm-0.33", ["/v1/models", "/v1/nothing", "/v1/chat/completions"], ["/health", "/metrics", "/version", "/nothing"]),  # noqa: E501
        ("sglang-0.5.23", ["/v1/models", "/server_info", "/generate", "/nothing"], ["/health", "/health_generate", "/metrics"]),  # noqa: E501
    ],
)  # fmt: skip
def test_an_api_key_guards_the_same_paths_as_in_the_engine(dialect, guarded, free):
    with harness_of(1, dialect) as kv, KvServer(kv, dialect, api_key="sk-1", ports={"control": 0}) as server:
        url = server.url(0)
        for path in guarded:
            for headers in ({}, {"Authorization": "Bearer sk-2"}, {"Authorization": "sk-1"}):
                assert call(url, path, headers=headers) == (401, {"error": "Unauthorized"})
            assert call(url, path, headers=KEY)[0] in (200, 404, 405)
        assert all(call(url, path)[0] in (200, 404) for path in free)
        assert call(url, guarded[0], None, "OPTIONS")[0] == 405
        assert call(url, "/v1/completions", {"prompt": "abc", "max_tokens": 1}, headers=KEY)[0] == 200
        assert call(url, "/v1/completions", {"prompt": "abc", "max_tokens": 1})[0] == 401
        assert call(server.control_url, "/verdict")[1]["requests"] == 1
        assert "sk-1" not in repr(server._described)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"host": "engine.test"}, r"host must be an address of this machine \(127.0.0.1 or 'localhost'.*got 'engine.test'"),  # noqa: E501
        ({"host": ""}, "host must be an address of this machine"),
        ({"host": 5}, "host must be an address of this machine .* got 5"),
        ({"host": "fe80::1%lo"}, "host must be an address of this machine"),
        ({"host": "0.0.0.0"}, "host 0.0.0.0 is every address of this machine, so advertise_host must name the one"),
        ({"host": "::"}, "host :: is every address of this machine, so advertise_host must name"),
        ({"advertise_host": "0.0.0.0"}, "advertise_host must be a name or an address that clients use.* got '0.0.0.0'"),
        ({"advertise_host": "http://a"}, ("advertise_host must be a name or an address that clients use, without "
        "scheme")),
        ({"advertise_host": "a:80"}, "advertise_host must be a name or an address"),
        ({"advertise_host": "a b"}, "advertise_host must be a name or an address"),
        ({"advertise_host": "a\nb"}, "advertise_host must be a name or an address"),
        ({"advertise_host": ""}, "advertise_host must be a name or an address"),
        ({"allowed_hosts": ["*"]}, r"each of allowed_hosts must be a name or an address .* got '\*'"),
        ({"token": ""}, "token must be a text of ASCII characters that can be seen, without spaces$"),
        ({"token": "secret word"}, "token must be a text of ASCII characters that can be seen, without spaces$"),
        ({"hosts": "::1"}, r"unknown network 'hosts'.*host"),
        ({"host": "192.0.2.1"}, "a port of 192.0.2.1 cannot be bound: Can.* assign requested address"),
    ],
)  # fmt: skip
def test_an_impossible_network_is_refused_in_one_line(options, text):
    with harness_of(1) as kv:
        with pytest.raises(ValueError, match=text):
            KvServer(kv, ports={"control": 0}, network=options)
        assert kv.engine(0).driver is None


def test_an_invalid_api_key_is_refused_in_one_line():
    with harness_of(1) as kv, pytest.raises(ValueError, match=r"api_key must be a text of ASCII .* without spaces$"):
        KvServer(kv, api_key="hé")


def test_network_must_be_a_mapping():
    with harness_of(1) as kv, pytest.raises(TypeError, match=r"network must be a mapping .*, got '0.0.0.0'$"):
        KvServer(kv, network="0.0.0.0")


def test_allowed_hosts_must_be_a_list():
    with harness_of(1) as kv, pytest.raises(TypeError, match="allowed_hosts must be a list of names"):
        KvServer(kv, network={"allowed_hosts": "kv.test"})


def test_a_publisher_of_a_test_stays_on_the_loopback_by_default():
    with pytest.raises(EndpointError, match="a test's publisher stays on the loopback"):
        KvPublisher(endpoint="tcp://0.0.0.0:*")
    with KvPublisher(endpoint="tcp://0.0.0.0:*", replay=False, loopback=False) as publisher:
        assert publisher.endpoint.startswith("tcp://0.0.0.0:")


def test_the_serve_command_reads_its_token_from_a_file(tmp_path):
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    process = Process(
        *("--host", "127.0.0.1", "--token-file", str(file), "--allowed-host", "kv.test", "--allowed-host", "b.test"),
        *("--advertise-host", "localhost", "--api-key", "sk-1"),
    )
    ready = process.ready
    assert hosts_of(ready) == {"localhost"}
    assert ready["token"] is None
    assert call(ready["control"], "/verdict", headers={**BEARER, "Host": "b.test"})[0] == 200
    assert call(ready["control"], "/verdict")[0] == 401
    url = ready["workers"][0]["http"]
    assert [call(url, "/v1/models", headers=each)[0] for each in ({}, KEY)] == [401, 200]
    process.popen.stdin.close()
    process.popen.stdin = None
    assert process.ended() == (0, "", "")


@worth_its_time
@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "it cannot be read: No such file or directory"),
        ("", "it must have one line, of ASCII characters without spaces"),
        ("two words", "it must have one line, of ASCII characters without spaces"),
        ("a\nb\n", "it must have one line, of ASCII characters without spaces"),
        ("h\u00e9", "it must have one line, of ASCII characters without spaces"),
    ],
)
def test_a_file_without_a_token_is_refused_in_one_line(content, text, tmp_path):
    file = tmp_path / "token"
    if content is not None:
        file.write_text(content, encoding="utf-8")
    assert ended([*SERVE, "--token-file", str(file)]) == (2, "", f"serve: --token-file {file}: {text}\n")


def test_a_guard_accepts_its_own_host_names_only():
    guard = Guard(Network("::", "Kv.test"), None, ["fd00::1"])
    for host in ("[::1]:80", "[::1]", "kv.test", "localhost:9", "[fd00::1]:3", "10.0.0.1:5"):
        assert guard.foreign_text([host], [], "::ffff:10.0.0.1" if host[0] == "1" else "::1") is None, host
    assert guard.foreign_text([], [], "10.0.0.1") is None
    text = "Host 'a' is not one of 10.0.0.1, ::, fd00::1, kv.test, localhost; allow more by --allowed-host NAME (network['allowed_hosts'] of KvServer)"  # noqa: E501
    assert guard.foreign_text(["localhost", "a"], [], "10.0.0.1") == text
    assert guard.foreign_text(["localhost"], [""], "10.0.0.1").startswith("Origin '' is of a page in a browser")


def in_a_namespace(*command, **options):
    wanted = ["unshare", "--user", "--map-root-user", "--net", *command]
    return subprocess.run(wanted, check=False, text=True, stdin=subprocess.DEVNULL, capture_output=True, **options)


@worth_its_time
def test_a_router_in_another_network_namespace_is_served():
    for program in ("unshare", "ip"):
        if shutil.which(program) is None:
            pytest.skip(f"it needs the program {program} to make network namespaces")
    pair = in_a_namespace("ip", "link", "add", "kvmock0", "type", "veth", "peer", "name", "kvmock1", timeout=20)
    if pair.returncode:
        pytest.skip(f"this machine makes no network namespaces: {pair.stderr.strip()}")
    done = in_a_namespace(sys.executable, str(Path(__file__).with_name("two_networks.py")), timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == {
        "control": "10.77.0.1",
        "subscribed": 200,
        "without": [401, 401],
        "foreign": 403,
        "right": True,
        "topics": [True, True],
        "sent_to": 1,
        "overlap": {"1": 4},
        "loopback": True,
        "exit_code": 0,
    }
