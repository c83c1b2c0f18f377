"""An event loop in a thread of its own, in which the thread of a test has things done."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable
from typing import TypeVar

_T = TypeVar("_T")


class LoopThread:
    """A thread with an event loop.

    Args:
        name: of the thread.

    Attributes:
        loop: the loop.
    """

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread: threading.Thread | None = None
        self._name = name

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def call(self, awaitable: Awaitable[_T]) -> _T:
        """Run something in the loop, and wait for it.

        Raises:
            RuntimeError: it is called in the loop itself, where it would wait for ever.
            Exception: whatever that raises.
        """
        if threading.current_thread() is self._thread:
            raise RuntimeError(f"{self._name}: this waits for its own event loop; call it in another thread")

        async def run() -> _T:
            return await awaitable

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result()

    def end(self) -> None:
        """End the loop, and wait for the thread. Twice is no error."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self.loop.call_soon_threadsafe(self.loop.stop)
            thread.join()
        if not self.loop.is_closed():
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.run_until_complete(self.loop.shutdown_default_executor())
            self.loop.close()
