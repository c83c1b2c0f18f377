"""Promises of a router process for adapters that are loaded while engines run, if it is notified of them.

No event reports that an adapter was loaded again, or from where: events of its old and new blocks differ only in
hashes, which a router that names blocks by tokens cannot compare.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import pytest

from pytest_kvmock.engines.backends import speaker_of
from pytest_kvmock.testing.process.process_traffic import ProcessTraffic

if TYPE_CHECKING:
    from pytest_kvmock.servers.serve.kv_server import KvServer
    from pytest_kvmock.testing.process.process_world import ProcessWorld

_NAME: Final = "tenant-lora"
_WHAT: Final = "what it makes of an adapter that is loaded from another path"


class ProcessAdapters(ProcessTraffic):
    """The part of `ProcessContract` about adapters that are loaded while engines run.

    The test runs if the class has `adapter_loaded(name, path)`.
    """

    @pytest.mark.kvmock(workers=2, num_blocks=4096)
    def test_an_adapter_of_another_path_promises_nothing_of_before(
        self, _kvmock_servers: Callable[..., KvServer]
    ) -> None:
        """An adapter is loaded again from another path: its old blocks are no longer found."""
        self._needs_events()
        if getattr(self, "adapter_loaded", None) is None:
            self.skip("it has no adapter_loaded(name, path)", _WHAT, "adapter_loaded(name, path), which tells it,")
        with self._world(_kvmock_servers, adapters=[_NAME]) as world:
            dialect = world.server.dialect
            keys: dict[str, Any] = {"lora_name": _NAME}
            if "lora_name" not in speaker_of(dialect).prompt_keys or not dialect.tells("lora_name"):
                self.skip(f"events of {dialect.name} name no adapter", _WHAT, "the dialect of a later release")
            self._load(world, "/adapters/one")
            prompt, probe = world.text(8), world.text(8)
            for each in (prompt, probe):
                world.direct(0, each, **keys)
            world.judge("worker 0 has served a prompt with an adapter", prompt, **keys)
            self._load(world, "/adapters/two")
            world.direct(0, probe, **keys)
            if world.server.requests[-1].cached_tokens:
                self.skip(f"engines of {dialect.name} name its blocks by no path", _WHAT, "the dialect of a later one")
            where = "an adapter was loaded again, from another path"
            world.direct(1, prompt[: len(prompt) // 2], **keys)
            for worker in world.workers:
                after = world.text(8)
                world.direct(worker, after, **keys)
                world.judge(f"{where}, and worker {worker} has served a prompt with it", after, **keys)
            world.judge_known_at_most(f"{where}: of blocks of worker 0 from before", 0, prompt, 0, **keys)
            if self.goes_by_prefix and world.picked(where, prompt, **keys) == 0:
                world.fail(
                    f"{where}: a prompt of which worker 1 holds 4 blocks since then was sent to worker 0, asked of an "
                    "idle fleet; it held 8 from before, which hit nothing any more"
                )

    def _load(self, world: ProcessWorld, path: str) -> None:
        """Let all engines load the adapter from a path in place of the old one, and notify the process."""
        for worker in world.workers:
            world.load_adapter(worker, _NAME, path)
        told: Callable[[str, str], object] = getattr(self, "adapter_loaded")  # noqa: B009 - a subclass may define it
        told(_NAME, path)
