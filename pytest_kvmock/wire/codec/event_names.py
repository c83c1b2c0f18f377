"""Block names computed from events: whether vLLM's published names follow from parents and tokens.

Theory of operation. A name is 64 bits of a digest that is chained from block to block, starting with the digest of the
seed. So a name can be computed if the parent's digest is known: for a root it is the seed's, for other blocks it is
known if the parent's name was computed, and with full digests as hashes the event has it. The values hashed with the
tokens must also be in the event; otherwise the name is skipped and the reason is counted. Without a given hash and
seed, those of vLLM are tried on chains of plain tokens until one fits; earlier events wait until then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pytest_kvmock.engines.base.hashed import HashChain
from pytest_kvmock.engines.vllm.hashes import ALGORITHMS, VERSIONS, VllmHasher, VllmVersion, vllm_version
from pytest_kvmock.values.checks import unknown_text
from pytest_kvmock.values.prompt_keys import LOOKAHEAD, block_keys, part_of
from pytest_kvmock.wire.codec.batch import DIGESTS

if TYPE_CHECKING:
    from pytest_kvmock.values.events import BlockTokens, RouterEvent, Stored, StreamKey
    from pytest_kvmock.values.prompt_keys import EventExtra

MOST_WAITING: Final = 10_000
"""Maximum number of a stream's Stored that wait until a fitting hash is found; those of other engines would wait
forever.
"""

MOST_TRIED: Final = 2**16
"""Maximum number of a stream's blocks that are tried, in total, as the right parent of others if nothing else explains
their names.
"""

MOST_CHAINS: Final = 64
"""Number of a stream's chains on which hashes are tried."""

NEWEST: Final = next(iter(VERSIONS))
"""The release that names blocks if no release is given."""

_OTHER_PARENT, _NO_TOKENS, _NO_HASH = (
    "below a parent whose name was not computed",
    "without tokens",
    "by no hash and seed that were tried",
)
_RANDOM_ROOT = "below a random root"
_NOT_SAID = "that do not follow from tokens alone, and the dialect does not say what else was hashed"
_NO_RELEASE = "that carry more than tokens and do not follow by vLLM 0.33, and nothing says which release names them"


def hasher_of(hash: object, seed: object, release: str = NEWEST) -> VllmHasher:  # noqa: A002 - the user's word
    """Make the hasher of a stream's block names.

    Args:
        hash: one of `ALGORITHMS`.
        seed: as PYTHONHASHSEED; None: the release's fixed seed.
        release: the vLLM release.

    Raises:
        ValueError: the hash is unknown, the seed is invalid, or the release has no fixed seed.
    """
    if not isinstance(hash, str) or hash not in ALGORITHMS:
        raise ValueError(unknown_text("hash", hash, ALGORITHMS))
    if seed is not None and (not isinstance(seed, str) or not seed):
        raise ValueError(f"seed must be a string, as PYTHONHASHSEED is, or None; got {seed!r:.80}")
    if seed is None and (vllm_version(release).fixed_seed is None or not hash.startswith("sha256")):
        raise ValueError(f"seed is missing: without one, vLLM {release} has other {hash} hashes in each process")
    return VllmHasher(release, hash, seed)


def hashers(release: str = NEWEST, hash: str | None = None, seed: str | None = None) -> tuple[VllmHasher, ...]:  # noqa: A002 - as above
    """Make all hashers that may name the blocks of a stream.

    Args:
        release: the vLLM release.
        hash: see `hasher_of`; None: any.
        seed: see `hasher_of`; None: "0", and the release's fixed seed if there is one.

    Raises:
        ValueError: the hash is unknown, or the seed is invalid.
    """
    found = []
    for algorithm in ALGORITHMS if hash is None else (hash,):
        for each in ("0", None) if seed is None else (seed,):
            with suppress(ValueError) if each is None else nullcontext():
                found.append(hasher_of(algorithm, each, release))
    return tuple(found)


class Waiting(NamedTuple):
    """A Stored that is not checked yet.

    Attributes:
        event: the event.
        position: its number in the log.
        blocks: number of its blocks.
    """

    event: RouterEvent
    position: int
    blocks: int


class EventNames:
    """The block names of one source's streams: how they are computed, and how many were.

    Args:
        candidates: the possible hashers; the one that fits the first chain of plain tokens is used.
        release: the vLLM release; releases differ in the values that they hash with tokens.
        says_keys: whether events have `extra_keys` if other values are hashed with tokens. If not, a name that does not
            follow is skipped, unless it follows from another parent, or later names follow from the expected name.
        is_given: whether the only candidate is certain, whatever the events show.
        knows_release: whether the release is certain. If not, names with keys that do not follow are skipped until one
            follows: another build may hash keys in another form, and events do not show which.

    Attributes:
        is_given: as given.
        knows_release: as given, or found by now.
        computed: number of computed names.
        skipped: number of skipped names, by reason.
        found: the given or found hashes, as text.
    """

    def __init__(
        self,
        candidates: Sequence[VllmHasher],
        *,
        release: str = NEWEST,
        says_keys: bool = True,
        is_given: bool = False,
        knows_release: bool = True,
    ) -> None:
        self.candidates = tuple(candidates)
        self.knows_release = knows_release
        self.release: VllmVersion = vllm_version(release)
        self.says_keys = says_keys
        self.computed = 0
        self.skipped: Counter[str] = Counter()
        self.is_given = is_given
        self.found: dict[str, None] = dict.fromkeys(map(_hasher_text, candidates) if is_given else ())
        self._waiting: dict[StreamKey, list[Waiting]] = {}

    def __deepcopy__(self, memo: object) -> EventNames:
        return self  # the key of a source, also when its streams are replayed

    def chain(self) -> NameChain:
        """Make the naming rule of one stream."""
        return NameChain(self)

    def taken(self, event: RouterEvent, position: int, chain: NameChain) -> list[Waiting]:
        """Note that a ledger has taken an event of a stream; return the waiting events to check now if its hash was
        found.

        Args:
            event: a Stored.
            position: its number in the log.
            chain: the rule of its stream.
        """
        waiting = self._waiting.setdefault(event.key, [])
        if chain.is_found:
            del self._waiting[event.key]
            return waiting
        if chain.waits_for is not None and chain.waits_for is event.event.data:
            blocks = len(chain.waits_for.block_hashes)
            if len(waiting) < MOST_WAITING:
                waiting.append(Waiting(event, position, blocks))
            else:
                self.skipped[_NO_HASH] += blocks
        return []

    def close(self) -> None:
        """Count the events that still wait."""
        for waiting in self._waiting.values():
            if waiting:
                self.skipped[_NO_HASH] += sum(count for _, _, count in waiting)
        self._waiting.clear()

    @property
    def text(self) -> str:
        """One line with the number of computed names and their hashes, and the numbers of skipped names with
        reasons.
        """
        by = " or ".join(self.found)
        skipped = ", ".join(f"{count:,} {why}" for why, count in self.skipped.most_common())
        left = f"; {self.skipped.total():,} not: {skipped}" if skipped else ""
        return f"{self.computed:,} name{'s' * (self.computed != 1)} computed{f' ({by})' if by else ''}{left}"


def _hasher_text(hasher: Any, roots: bool = True) -> str:
    return f"{hasher.algorithm}, seed {hasher.seed!r}" if roots else f"{hasher.algorithm}, random root"


def _after(extra: EventExtra | None, place: int) -> EventExtra | None:
    """Return the look-ahead tokens of one block of an event."""
    ahead = None if extra is None else extra.get(LOOKAHEAD)
    return {LOOKAHEAD: ahead[place : place + 1]} if ahead else None


class NameChain(HashChain):
    """The naming rule of one vLLM stream; see `hygiene.content.Chain`.

    Args:
        names: the names of the source.

    Attributes:
        names: as given.
        is_found: whether its hash is known.
        waits_for: the last Stored that was not checked because the hash is not known yet.
    """

    __slots__ = ("_parents_left", "_roots", "_tries", "_units", "is_found", "names", "waits_for")

    reads_extra = True

    def __init__(self, names: EventNames) -> None:
        super().__init__(names.candidates[0])
        self.names = names
        self._roots = True  # whether the digest before a root is known
        self._units: dict[int, int | None] = {}  # by block size, the number of tokens found for each digest
        self._tries, self._parents_left = MOST_CHAINS, MOST_TRIED
        self.is_found = names.is_given
        self.waits_for: Stored | None = None

    @property
    def named_by(self) -> str:
        """A text that describes its naming rule."""
        return _hasher_text(self._hasher, self._roots)

    def expected(
        self,
        data: Stored,
        token_ids: BlockTokens | None,
        block_size: int | None,  # noqa: ARG002 - as its tokens have it
        extra: EventExtra | None = None,
    ) -> Sequence[int] | None:
        """Return the expected names of a Stored's blocks; None if they cannot be computed. Both cases are counted."""
        names, count = self.names, len(data.block_hashes)
        if not count:
            return None
        why = self._hidden(extra)
        size = _size_of(token_ids, count)
        if size is None:
            why = why or _NO_TOKENS
        if why is not None:
            names.skipped[why] += count
            return None
        assert size is not None
        assert token_ids is not None
        if not (size in self._units and self._roots) and not any(block_keys(extra) if extra else ()):
            self._find(data, token_ids, size, extra)
        if self.is_found:
            return self._judged(data, token_ids, size, extra)
        if self._tries:
            self.waits_for = data
        else:
            names.skipped[_NO_HASH] += count
        return None

    def name(
        self,
        parent: int | None,
        local: int,
        tokens: Sequence[int] | None,
        block_size: int | None,  # noqa: ARG002 - as above
        extra: EventExtra | None = None,
    ) -> int | None:
        """Return the name of a block below a parent; None if it has no tokens, or is a root and roots are random."""
        if not tokens or (parent is None and not self._roots):
            return None
        return super().name(parent, local, tokens, len(tokens), extra)

    def _judged(
        self, data: Stored, token_ids: BlockTokens, size: int, extra: EventExtra | None
    ) -> Sequence[int] | None:
        names, blocks, first = self.names, data.block_hashes, 0
        parent, digests = data.parent_hash, None if extra is None else extra.get(DIGESTS)
        before = None if parent is None else self._digests.get(parent)
        if digests is not None:
            before, given = digests
            if before is None and not self._roots:
                before, first = given[0], 1  # a random root, whose name is known
                self._digests[blocks[0]] = given[0]
                names.skipped[_RANDOM_ROOT] += 1
        if before is None and (parent is not None or not self._roots):
            names.skipped[_RANDOM_ROOT if parent is None else _OTHER_PARENT] += len(blocks)
            return None
        keys = extra if not first else part_of(extra, range(first, len(blocks)))
        self._unit = self._units.get(size)
        made = self._made(token_ids[first:], size, before, keys)
        if made is None:
            names.skipped["whose keys are of a block, and hashes of less"] += len(blocks) - first
            return None
        fits = next((n for n, name in enumerate(made[1]) if name != blocks[first + n]), len(made[1]))
        self._digests.update(zip(made[1][:fits], made[0], strict=False))
        is_keyed = any(block_keys(extra)) if extra else False
        names.knows_release |= is_keyed and fits == len(made[1])
        is_sure = names.says_keys and (names.knows_release or not is_keyed)
        goes_on = any(name == made[1][n] for n, name in enumerate(blocks[first:]) if n > fits)  # after a wrong name
        if (
            fits == len(made[1])
            or is_sure
            or goes_on
            or (not fits and self._fits_elsewhere(blocks[first], token_ids[first], _after(extra, first)))
        ):
            names.computed += len(made[1])
            return [*blocks[:first], *made[1]]
        names.computed += fits
        names.skipped[_NO_RELEASE if names.says_keys else _NOT_SAID] += len(made[1]) - fits
        return None

    def _fits_elsewhere(self, block: int, tokens: Sequence[int], after: EventExtra | None) -> bool:
        """Whether a block follows from its tokens and another parent."""
        others = reversed(self._digests.values())
        for before in islice(chain((None,) if self._roots else (), others), self._parents_left):
            self._parents_left -= 1
            made = self._made((tokens,), len(tokens), before, after)
            if made is not None and made[1][0] == block:
                return True
        return False

    def _find(self, data: Stored, token_ids: BlockTokens, size: int, extra: EventExtra | None) -> None:
        """Search the hash, seed and unit that give a block its name, for a root or a block whose parent's digest
        came.
        """
        digests: tuple[Any, Any] | None = None if extra is None else extra.get(DIGESTS)
        before: bytes | None = None
        given: Sequence[bytes] = ()
        names, first = data.block_hashes, _after(extra, 0)
        if digests is not None:
            before, given = digests
        if not self._tries or (data.parent_hash is not None and before is None):
            return
        self._tries -= 1
        if data.parent_hash is None and self._fit(None, token_ids[0], size, names[0], first):
            return
        if before is None and len(given) > 1:
            self._fit(given[0], token_ids[1], size, names[1], _after(extra, 1))
        elif before is not None:
            self._fit(before, token_ids[0], size, names[0], first)

    def _fit(self, before: bytes | None, tokens: Sequence[int], size: int, name: int, after: EventExtra | None) -> bool:
        """Whether a hasher gives a block this name; it is then used for the other blocks."""
        kept, is_known = self._hasher, self.is_found and (before is not None or self._roots)
        for hasher in (kept,) if is_known else self.names.candidates:
            for unit in (None, *(each for each in range(size - 1, 0, -1) if not size % each)):
                self._hasher, self._unit = hasher, unit
                made = self._made((tokens,), size, before, after)
                if made is not None and made[1][0] == name:
                    if not is_known:
                        self._roots = before is None
                        self.names.found[_hasher_text(hasher, self._roots)] = None
                    self.is_found, self._units[size] = True, unit
                    return True
        self._hasher = kept
        return False

    def _hidden(self, extra: EventExtra | None) -> str | None:
        """Return why names cannot be computed from an event's fields; None if they can."""
        if extra is None:
            return None
        tagged, keys = self.names.release.tagged_keys, block_keys(extra)
        if extra.get(LOOKAHEAD) and any(
            isinstance(key, (list, tuple)) for of_block in keys if of_block for key in of_block
        ):
            return "whose draft model looks ahead, at items that the next event may have"
        has_adapter = extra.get("lora_name") is not None or extra.get("lora_id") is not None
        if has_adapter and tagged:
            return "with an adapter, whose path is hashed and on no wire"
        if (has_adapter or extra.get("cache_salt")) and not keys:
            return "whose keys are not in the event"
        for key in (key for of_block in keys if of_block for key in of_block):
            if isinstance(key, str):
                continue
            if not isinstance(key, (list, tuple)) or len(key) != 2:
                return "with prompt embeddings"
            if not tagged:
                return "with an image, of vLLM up to 0.28"
        return None


def _size_of(token_ids: BlockTokens | None, count: int) -> int | None:
    """Return the tokens per block if all `count` blocks have the same number; else None."""
    try:
        sizes = {*map(len, token_ids)} if token_ids is not None and len(token_ids) == count else ()
    except TypeError:
        return None
    return next(iter(sizes), None) or None if len(sizes) == 1 else None
