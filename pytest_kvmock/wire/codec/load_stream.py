"""SGLang's load stream: the messages of each rank's load, and their ports.

Source: `disaggregation/kv_events.py` of 0.5.23.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from pytest_kvmock.values.load_stat import LoadStat

LOAD_TOPIC: Final = b"load"
_ENDPOINT: Final = re.compile(r"tcp://(\*|\[[^\]]*\]|[^:\[\]]+):(\d+)")
_WILDCARDS: Final = ("*", "0.0.0.0", "::")  # noqa: S104 - what engines bind
_LAST_PORT: Final = 65535


def load_frames(number: int, stat: LoadStat) -> list[bytes]:
    """Return the three frames of a message: topic, 8-byte big-endian number, payload.

    Raises:
        ImportError: msgspec is not installed.
    """
    import msgspec

    return [LOAD_TOPIC, number.to_bytes(8, "big"), msgspec.msgpack.encode(stat.entries)]


def read_load(frames: Sequence[bytes]) -> tuple[int, LoadStat]:
    """Read the three frames of a message: its number, and the load.

    Raises:
        ValueError: the message is invalid.
        ImportError: msgspec is not installed.
    """
    import msgspec

    if len(frames) != 3 or frames[0] != LOAD_TOPIC or len(frames[1]) != 8:
        raise ValueError(f"a load has three frames, {LOAD_TOPIC!r}, 8 bytes and a payload; got {frames!r:.80}")
    try:
        message = msgspec.msgpack.decode(frames[2])
    except msgspec.DecodeError as error:
        raise ValueError(f"the payload of a load is msgpack: {error}") from None
    return int.from_bytes(frames[1], "big"), LoadStat.of(message)


def load_rank(*, attn_dp_size: int, attn_dp_rank: int, dp_rank: int | None) -> int:
    """Return the rank that a scheduler publishes as: attention DP's rank if that is on, else the replica's rank."""
    return attn_dp_rank if attn_dp_size > 1 else dp_rank or 0


def load_ports(
    option: str | None, *, kv_endpoint: str | None, replay_endpoint: str | None, ranks: int
) -> tuple[str, int] | None:
    """Return the host and first port of the load stream (`--load-publish-endpoint`); rank r binds port + r.

    Args:
        option: the server's option: None or "off" for no stream; "auto" for the ports right after those of KV events;
            or an endpoint.
        kv_endpoint: endpoint of KV events; None if there are none.
        replay_endpoint: endpoint of their replay; None if there is none.
        ranks: number of ranks.

    Returns:
        None if there is no stream.

    Raises:
        ValueError: the server does not start with this option.
    """
    if option is None or option.lower() == "off":
        return None
    asked = f"load_publish_endpoint {option!r}"
    if kv_endpoint is None:
        raise ValueError(f"{asked} needs KV events with a publisher; there are none")
    kv = _ENDPOINT.fullmatch(kv_endpoint)
    if kv is None:
        raise ValueError(f"{asked} needs KV events at a tcp endpoint with a port; they are at {kv_endpoint!r}")
    taken = [("KV events", int(kv[2]))]
    replay = None if replay_endpoint is None else _ENDPOINT.fullmatch(replay_endpoint)
    if replay is not None:
        taken.append(("their replay", int(replay[2])))
    if option.lower() == "auto":
        host, base = kv[1].strip("[]"), int(kv[2]) + ranks
        if replay is not None and _overlap(base, int(replay[2]), ranks):
            base = int(replay[2]) + ranks
    else:
        given = _ENDPOINT.fullmatch(option)
        if given is None:
            raise ValueError(f"{asked} must be 'off', 'auto', or a tcp endpoint with a port")
        host, base = given[1].strip("[]"), int(given[2])
    if host not in _WILDCARDS:
        raise ValueError(f"{asked}: its host must be a wildcard ({', '.join(_WILDCARDS)}), got {host!r}")
    last = base + ranks - 1
    if last > _LAST_PORT:
        raise ValueError(f"{asked}: the port of the last of {ranks} ranks would be {last}, above {_LAST_PORT}")
    for what, port in taken:
        if _overlap(base, port, ranks):
            raise ValueError(f"{asked}: ports {base} to {last} overlap those of {what}, {port} to {port + ranks - 1}")
    return host, base


def _overlap(first: int, second: int, ranks: int) -> bool:
    return abs(first - second) < ranks
