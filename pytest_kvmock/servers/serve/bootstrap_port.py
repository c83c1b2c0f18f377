"""The bootstrap server of a prefill engine, which routers and decode engines query.

One subject: the routes of SGLang's server (`disaggregation/common/conn.py`) and of vLLM's MooncakeConnector
(`mooncake/mooncake_utils.py`). Registrations are answered but have no effect, as the engines of a `KvServer` are
connected directly.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from aiohttp import web

from pytest_kvmock.servers.serve.api import from_json, to_json
from pytest_kvmock.servers.serve.listening import SILENT, end_listening

if TYPE_CHECKING:
    from pytest_kvmock.servers.serve.network import Network


class BootstrapPort:
    """The port of the bootstrap server of one prefill engine, for all its ranks.

    Args:
        network: the address that it listens at.
        in_rooms: whether it is SGLang's server; False: Mooncake's.
        page_size: tokens per block.
        ranks: number of ranks of the engine.

    Attributes:
        port: its number.
        engine_ids: the names of the engine's ranks (Mooncake).
        seen: rank, room and leg of each leg that arrived (SGLang).
    """

    def __init__(self, network: Network, *, in_rooms: bool, page_size: int, ranks: int = 1) -> None:
        self._network, self._in_rooms, self._page_size, self._ranks = network, in_rooms, page_size, ranks
        self._listening: socket.socket = network.bound_socket(0)
        self.port: int = self._listening.getsockname()[1]
        self.engine_ids: dict[int, str] = {}
        self.seen: Sequence[tuple[int, int, str]] = ()
        self._runner: web.ServerRunner | None = None
        self._server: web.Server | None = None

    @property
    def url(self) -> str:
        """The URL that it listens at."""
        return self._network.url(self.port)

    async def start(self) -> None:
        """Start to listen."""
        self._server = web.Server(self._handle, handler_cancellation=True, access_log=None, logger=SILENT)
        self._runner = web.ServerRunner(self._server, shutdown_timeout=0.0)
        await self._runner.setup()
        await web.SockSite(self._runner, self._listening).start()

    async def stop(self) -> None:
        """Stop listening."""
        if self._runner is not None and self._server is not None:
            await end_listening(self._runner, self._server, self._listening)

    def close(self) -> None:
        """Close the socket of a port that never listened."""
        self._listening.close()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        asked = f"{request.method} {request.path}"
        found = self._of_rooms(asked, request, await request.read()) if self._in_rooms else self._of_mooncake(asked)
        if found is None:
            return web.Response(status=404, text="Not Found")
        if isinstance(found, str):
            return web.Response(text=found)
        return web.Response(body=to_json(found), content_type="application/json")

    def _of_mooncake(self, asked: str) -> Any:
        if asked == "GET /query":  # by data-parallel rank; addresses by tensor-parallel and pipeline-parallel rank
            worker = f"tcp://{self._network.advertised}:{self.port}"
            worker_addr = {"0": {"0": worker}}
            rows = sorted(self.engine_ids.items())
            return {str(rank): {"engine_id": name, "worker_addr": worker_addr} for rank, name in rows}
        return {"status": "ok"} if asked == "POST /register" else None

    def _of_rooms(self, asked: str, request: web.BaseRequest, body: bytes) -> Any:
        if asked in ("PUT /route", "POST /register_dp_rank", "GET /health"):
            return "OK"
        if asked == "POST /query_dp_ranks":
            try:
                rooms = from_json(body)["bootstrap_rooms"]
                if self._ranks == 1:
                    return {str(room): 0 for room in rooms}
                return {str(room): rank for rank, room, leg in self.seen if leg == "prefill" and room in rooms}
            except (ValueError, TypeError, KeyError):
                return {}
        if asked != "GET /route":
            return None
        if request.query.get("prefill_dp_rank", "-1") == "-1":
            sizes = {"attn_tp_size": 1, "attn_cp_size": 1, "dp_size": self._ranks, "pp_size": 1}
            return {**sizes, "page_size": self._page_size, "kv_cache_dtype": "auto", "follow_bootstrap_room": True}
        return {"rank_ip": self._network.advertised, "rank_port": self.port}
