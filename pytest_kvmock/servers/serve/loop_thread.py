"""An event loop in a separate thread, for calls from the thread of a test; its errors are printed as lines of standard
error.
"""

from __future__ import annotations

import asyncio
import errno
import sys
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError
from contextlib import suppress
from typing import Any, Final, TypeVar

WAIT_S: Final = 5.0
"""Default time limit of waits, in seconds."""

_T = TypeVar("_T")


class LoopThread:
    """A thread with an event loop.

    Args:
        name: the name of the thread.

    Attributes:
        loop: the loop.
    """

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self.loop.set_exception_handler(self._failed)
        self._is_full = False
        self._thread: threading.Thread | None = None
        self._ending = threading.Lock()
        self._name = name

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def _failed(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Print an error that is reported nowhere else, as one line. A lack of descriptors is printed only once, as it
        occurs at each attempt.
        """
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE):
            print_error(f"{context['message']}: {type(error).__name__}: {error}")
        elif not self._is_full:
            self._is_full = True
            print_error("all descriptors are in use; a connection waits until one is free (ulimit -n)")

    def call(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine in the loop, and wait for its result.

        Raises:
            RuntimeError: called in the loop's own thread, where it would wait for ever.
            ValueError: the thread has ended, or ends meanwhile.
            Exception: whatever the coroutine raises.
        """
        with self._ending:
            thread = self._thread
            if thread is None or threading.current_thread() is thread:
                coroutine.close()
                if thread is None:
                    raise ValueError(f"this {self._name} is closed")
                raise RuntimeError(f"{self._name}: this waits for its own event loop; call it in another thread")
            found = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return found.result()
        except CancelledError:
            raise ValueError(f"this {self._name} was closed meanwhile") from None

    def end(self) -> None:
        """End the loop, and wait for the thread; pending calls are cancelled. A second call does nothing."""
        with self._ending:  # calls from before are already in the loop when it stops
            thread, self._thread = self._thread, None
        if thread is not None:
            self.loop.call_soon_threadsafe(self.loop.stop)
            thread.join()
        if not self.loop.is_closed():
            self.loop.run_until_complete(_cancel_all())
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.run_until_complete(self.loop.shutdown_default_executor())
            self.loop.close()


def print_error(text: str, who: str = "KvServer") -> None:
    """Print an error as one line of standard error, if that is open."""
    with suppress(OSError, ValueError, AttributeError):  # standard error is closed, missing or not read
        sys.stderr.write(f"{who}: {text}\n")
        sys.stderr.flush()


async def _cancel_all() -> None:
    """Cancel all other tasks of the running loop, and wait for their end."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
