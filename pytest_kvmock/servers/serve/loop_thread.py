"""An event loop in a thread of its own, in which the thread of a test has things done; what goes wrong in it is a
line of standard error.
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
"""How long something is waited for, in seconds, where nothing else is said."""

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
        """Print an error that is reported nowhere else, as one line; that descriptors are used up once, as it is met at
        each try.
        """
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE):
            print_error(f"{context['message']}: {type(error).__name__}: {error}")
        elif not self._is_full:
            self._is_full = True
            print_error("all descriptors are in use; a connection waits until one is free (ulimit -n)")

    def call(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Run something in the loop, and wait for it.

        Raises:
            RuntimeError: it is called in the loop itself, where it would wait for ever.
            ValueError: the thread has ended, or ends meanwhile.
            Exception: whatever that raises.
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
        """End the loop, and wait for the thread; who waits for something there waits no longer. Twice is no error."""
        with self._ending:  # what was given to the loop before is there when it stops
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
    """Print what went wrong as one line of standard error, where there is one."""
    with suppress(OSError, ValueError, AttributeError):  # it is closed, or not read
        sys.stderr.write(f"{who}: {text}\n")
        sys.stderr.flush()


async def _cancel_all() -> None:
    """End all other tasks of the loop that runs."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
