"""The true state of the caches behind a server: what a router should know, and how its knowledge differs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from pytest_kvmock.harness.under_test import forms_of, of_each_form
from pytest_kvmock.servers.serve.loop_thread import WAIT_S
from pytest_kvmock.servers.serve.reasons import reason
from pytest_kvmock.servers.serve.text import encode
from pytest_kvmock.values.checks import is_integer
from pytest_kvmock.values.events import KvCacheEvent, Removed, RouterEvent
from pytest_kvmock.values.tokens import Prompt, TokenIds
from pytest_kvmock.wire.sockets.waiting import POLL_MS, Deadline, at_once

if TYPE_CHECKING:
    from pytest_kvmock.harness import RouterHarness
    from pytest_kvmock.servers.serve.server_inside import ServerInside


RouterAnswer: TypeAlias = Sequence[Mapping[str, int]] | Mapping[str, Any]
"""A router's knowledge of a prompt: rows of blocks, or `blocks` and `last_batch` as `KvServer.expect` returns them."""


class Difference(NamedTuple):
    """The difference between a router's knowledge and the truth.

    Attributes:
        about: the prompt, in words.
        text: the differences; "" if there are none.
        is_outdated: whether the router's answer is based on another number of batches than were published.
        places: for each rank with another number of blocks than held: worker, rank, the known and the held number, and
            the text.
    """

    about: str
    text: str
    is_outdated: bool = False
    places: tuple[tuple[int, int, int, int, str], ...] = ()


class Truth:
    """The blocks that the workers of a harness hold, according to their published events.

    Args:
        harness: the harness.

    Attributes:
        differences: the differences that `check` found.
    """

    def __init__(self, harness: RouterHarness) -> None:
        self._harness = harness
        self._batches: Mapping[tuple[int, int], Any] = {}
        self.differences: list[str] = []

    def _scores(self, prompt: Prompt) -> Mapping[tuple[int, int], int]:
        harness = self._harness
        size, forms = harness.profile.block_size, forms_of(harness.inside.streams, prompt)
        found = {
            ahead: harness.inside.reference.find_matches(prompt.block_hashes(size, ahead)).scores for ahead in forms
        }
        return found[forms[0]] if len(forms) == 1 else of_each_form(found, harness.inside.streams)

    def held(self, prompt: Prompt) -> dict[int, int]:
        """Return how many leading blocks each worker's best rank holds; workers without any are absent."""
        found: dict[int, int] = {}
        with self._harness.publisher.lock:
            for (worker, _), blocks in self._scores(prompt).items():
                found[worker] = max(blocks, found.get(worker, 0))
        return found

    def expect(self, prompt: Prompt) -> dict[str, Any]:
        """Return what a router should know; see `KvServer.expect`."""
        with self._harness.publisher.lock:
            rows: list[dict[str, int]] = []
            for (worker, rank), count in sorted(self._scores(prompt).items()):
                engine, more = self._harness.worker(worker, dp_rank=rank), {}
                if engine.traits.promises_more:
                    more = {"reusable": min(engine.cached_tokens(prompt), count * self._harness.profile.block_size)}
                rows.append({"worker": worker, "rank": rank, "blocks": count, **more})
            return {"blocks": rows, "last_batch": self.last_batches(), "tokens": list(prompt.tokens or ())}

    def last_batches(self) -> list[dict[str, int]]:
        """Return the number of the last batch of each worker and rank."""
        return [
            {"worker": worker, "rank": rank, "number": publisher.batches(rank) - 1}
            for (worker, rank), publisher in self._batches.items()
        ]

    def numbered_by(self, publishers: Mapping[tuple[int, int], Any]) -> None:
        """Set the publisher (`KvPublisher`) that numbers the batches of each worker and rank."""
        self._batches = publishers

    def compare(self, prompt: Prompt, answer: object, last_batch: object = None) -> Difference:
        """Compare a router's knowledge of a prompt with the truth.

        Args:
            prompt: the prompt.
            answer: rows of `blocks`, or `blocks` and `last_batch` as `expect` returns them.
            last_batch: rows of the last batches that the answer covers, if it does not have them; None: the current
                ones.

        Raises:
            TypeError: invalid rows.
        """
        if isinstance(answer, Mapping) and "blocks" in answer:
            last_batch = answer.get("last_batch", last_batch)
            answer = answer["blocks"]
        known = _checked("blocks", answer, "blocks", least=0)
        numbers = None if last_batch is None else _checked("last_batch", last_batch, "number", least=-1)
        with self._harness.publisher.lock:
            expected = self.expect(prompt)
        about = _about(prompt)
        published = _by_rank(expected["last_batch"], "number")
        if numbers is not None and (text := self._outdated(numbers, published)):
            return Difference(about, text, is_outdated=True)
        true = _by_rank(expected["blocks"], "blocks")
        size = self._harness.profile.block_size
        least = {key: tokens // size for key, tokens in _by_rank(expected["blocks"], "reusable").items()}
        places = tuple(
            (
                *key,
                known.get(key, 0),
                true.get(key, 0),
                f"worker {key[0]} rank {key[1]}: the router knows {known.get(key, 0)} blocks, {true.get(key, 0)} are "
                "held" + (f", and {least[key]} would be reused" if key in least else ""),
            )
            for key in sorted(known.keys() | true.keys())
            if not least.get(key, true.get(key, 0)) <= known.get(key, 0) <= true.get(key, 0)
        )
        return Difference(about, "; ".join(text for *_, text in places), places=places)

    def explained(self, prompt: Prompt, difference: Difference) -> Difference:
        """Return a difference with the reason for each rank: the batch with the change, and the batch's fate."""
        if not difference.places:
            return difference
        size = self._harness.profile.block_size
        texts = []
        for worker, rank, known, held, text in difference.places:
            publisher = self._batches.get((worker, rank))
            if publisher is not None and hasattr(publisher, "fate"):  # polled events have no batches
                text += f" ({reason(publisher, rank, prompt, size, known=known, held=held)})"  # noqa: PLW2901 - it says more
            texts.append(text)
        return difference._replace(text="; ".join(texts))

    def _outdated(self, numbers: Mapping[tuple[int, int], int], published: Mapping[tuple[int, int], int]) -> str:
        """Return the text of the workers whose last batch the answer does not match; "" if it matches all."""
        ranks = self._harness.profile.dp_size
        return "; ".join(
            f"worker {worker}{f' rank {rank}' if ranks > 1 else ''}: {_batches_text(answered, last)}"
            for worker, rank in sorted(numbers.keys() | published.keys())
            if (answered := numbers.get((worker, rank), -1)) != (last := published.get((worker, rank), -1))
        )

    def keep(self, prompt: Prompt, difference: Difference) -> str:
        """Keep a difference for the verdict, unless it is empty; return its text with the reasons."""
        difference = self.explained(prompt, difference)
        if difference.text:
            self.differences.append(f"{difference.about}: {difference.text}")
        return difference.text


def _about(prompt: Prompt) -> str:
    return f"a prompt of {len(prompt.tokens or ())} tokens"


def _batches_text(answered: int, published: int) -> str:
    by = f"batch {answered}" if answered >= 0 else "no batch"
    return f"the router answers by {by}, {published if published >= 0 else 'none'} was published"


def _checked(name: str, rows: object, value: str, least: int) -> dict[tuple[int, int], int]:
    """Return rows as numbers by worker and rank.

    Raises:
        TypeError: invalid rows.
    """
    shape = f'[{{"worker": 0, "rank": 0, "{value}": 4}}]'
    if not isinstance(rows, list | tuple):
        raise TypeError(f"check: {name} must be rows such as expect returns, {shape}, got {rows!r:.80}")
    for row in rows:
        fits = isinstance(row, Mapping) and {"worker", value} <= set(row)
        if (
            not fits
            or not all(map(is_integer, (row["worker"], row.get("rank", 0))))
            or not is_integer(row[value], least)
        ):
            raise TypeError(f"check: a row of {name} must be as in {shape}, got {row!r:.80}")
    return _by_rank(rows, value)


def _by_rank(rows: Sequence[Mapping[str, int]], value: str) -> dict[tuple[int, int], int]:
    return {(row["worker"], row.get("rank", 0)): row[value] for row in rows if value in row}


def prompt_of(prompt: Prompt | TokenIds | str) -> Prompt:
    """Return the prompt of tokens or a text."""
    return Prompt(encode(prompt)) if isinstance(prompt, str) else Prompt.of(prompt)


class RouterChecks:
    """The part of a `KvServer` that compares a router's knowledge with the truth.

    Attributes:
        truth: the blocks that the engines hold, and the differences found.
    """

    truth: Truth
    inside: ServerInside

    def held(self, prompt: Prompt | TokenIds | str) -> dict[int, int]:
        """Return how many leading blocks of a prompt each worker's best rank holds now; workers without any are absent.

        Args:
            prompt: tokens, or a text.
        """
        return self.truth.held(prompt_of(prompt))

    def expect(self, prompt: Prompt | TokenIds | str) -> dict[str, Any]:
        """Return what a router should know of a prompt after it has applied all published events.

        Returns:
            `blocks`: a row for each worker and rank that holds any, with the number of leading blocks. For a hybrid
            model a row also has the tokens that the engine would reuse; a router may know fewer blocks, down to that
            number. `last_batch`: the number of the last batch of each worker and rank, -1 if there was none. `tokens`:
            the prompt's tokens.
        """
        return self.truth.expect(prompt_of(prompt))

    def check(
        self,
        prompt: Prompt | TokenIds | str,
        blocks: RouterAnswer | Callable[[], RouterAnswer],
        last_batch: Sequence[Mapping[str, int]] | None = None,
        *,
        timeout: float = WAIT_S,
    ) -> str:
        """Compare a router's knowledge of a prompt with the truth; `assert_knows` fails if they differ.

        Args:
            prompt: the prompt.
            blocks: rows as `expect` returns them, or `blocks` and `last_batch` as it returns them; or a function that
                asks the router for these. The function is called until nothing differs, and the last answer counts; an
                AssertionError counts as no answer yet.
            last_batch: the last batches that the rows cover, if the answer does not have them; None: the current ones.
                Batches published after them are a difference.
            timeout: for how many seconds the router is asked again.

        Returns:
            The differences, which are kept for the verdict; "" if there are none. For each rank the text names the
            batch with the change, whether a subscriber got it, the fault that changed it, and whether a replay had it.

        Raises:
            TypeError: invalid rows, or a coroutine function.
            ValueError: `timeout` is no finite number of at least 0.
            Exception: whatever else the function raises.
        """
        asked, deadline = prompt_of(prompt), Deadline(timeout)
        if not callable(blocks):
            return self.truth.keep(asked, self.truth.compare(asked, blocks, last_batch))
        while True:
            try:
                found = self.truth.compare(asked, at_once(blocks(), "check", ""), last_batch)
            except AssertionError as error:
                found = Difference(_about(asked), f"the router gave no answer: {' '.join(str(error).split())}")
            if not found.text or not deadline.left:
                return self.truth.keep(asked, found)
            self.inside.thread.call(asyncio.sleep(min(deadline.left, POLL_MS / 1000)))

    def assert_knows(
        self,
        prompt: Prompt | TokenIds | str,
        ask: RouterAnswer | Callable[[], RouterAnswer],
        timeout: float = WAIT_S,
    ) -> None:
        """Fail unless a router knows what it should of a prompt; for the arguments see `check`.

        Raises:
            AssertionError: it still does not at the time limit; the message has the differences.
        """
        __tracebackhide__ = True
        text = self.check(prompt, ask, timeout=timeout)
        if text:
            raise AssertionError(f"{text}{f' ({timeout:g} s after the first question)' if callable(ask) else ''}")


def all_removed(harness: RouterHarness, worker: int, rank: int) -> list[RouterEvent]:
    """Return Removed of all blocks that a rank holds according to its events, the last stored first, so that children
    come before parents.
    """
    stream = harness.inside.streams.get((worker, rank))
    if stream is None:
        return []
    found: list[RouterEvent] = []
    for tier, held in stream.tiers.items():
        copies = stream.copies.get(tier, {})
        blocks = [block for block in reversed(held) for _ in range(1 + copies.get(block, 0))]
        if blocks:
            found.append(RouterEvent(worker, KvCacheEvent(0, Removed(tuple(blocks)), rank), tier))
    return found
