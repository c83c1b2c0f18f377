"""Indexes that keep the wrong blocks, lose queued events, leak, or mix up tenants, each with its right twin."""

from collections import OrderedDict, deque
from random import Random
from typing import ClassVar

from bounded_indexes import BoundedIndex
from contract_runs import Mutants
from draft_readers import ByWindows
from truncating_indexes import KeyedTokenIndex

from pytest_kvmock import Cleared, RadixIndex, Removed, StorageTier, Stored, block_hashes
from pytest_kvmock.testing import IndexContract
from pytest_kvmock.values.prompt_keys import LOOKAHEAD, hash_options
from pytest_kvmock.values.tokens import windows_of

FORGETFUL = Mutants(IndexContract)


def over(kind, **declared):
    return type(kind.__name__, (IndexContract,), {"make_index": lambda self: kind(), **declared})


# ------------------------------------------------------------------------------------------------- what it keeps


class FirstIn(BoundedIndex):
    """Right if it keeps the latest stored blocks; a lookup keeps nothing."""

    def __init__(self):
        super().__init__(100)


class LastIn(FirstIn):
    """Takes no new block once it is full."""

    def store(self, key, data):
        if len(self.held) + len(data.block_hashes) <= self.most:
            super().store(key, data)


class Recent(FirstIn):
    """Right if it keeps the latest stored blocks and the latest looked up ones."""

    touches = staticmethod(lambda chain, found: chain == found[: len(chain)])

    def find_matches(self, local_hashes):
        found, asked = super().find_matches(local_hashes), tuple(local_hashes)
        for key in [each for each, chain in self.held.items() if self.touches(chain, asked[: found.get(each[0], 0)])]:
            self.held[key] = self.held.pop(key)
        return found


class TouchesTheLastBlock(Recent):
    """A lookup touches only the last block that it finds."""

    touches = staticmethod(lambda chain, found: chain == found)


class Frequent(FirstIn):
    """Keeps the blocks that were looked up most, and among equals the oldest."""

    def __init__(self):
        super().__init__()
        self.uses = {}

    def store(self, key, data):
        self.most += len(data.block_hashes)
        super().store(key, data)
        self.most -= len(data.block_hashes)
        while len(self.held) > self.most:
            del self.held[min(reversed(self.held), key=lambda each: self.uses.get(self.held[each], 0))]

    def find_matches(self, local_hashes):
        found = super().find_matches(local_hashes)
        for end in range(1, len(local_hashes) + 1):
            self.uses[tuple(local_hashes[:end])] = self.uses.get(tuple(local_hashes[:end]), 0) + 1
        return found


class Sampled(Recent):
    """Right: evicts the least recently used of five blocks drawn at random."""

    def __init__(self):
        super().__init__()
        self.rng = Random(0)

    def store(self, key, data):
        most, self.most = self.most, 10**9
        super().store(key, data)
        self.most = most
        while len(self.held) > self.most:
            places = {name: at for at, name in enumerate(self.held)}
            del self.held[min(self.rng.sample([*self.held], 5), key=places.__getitem__)]


KEEPS = {"bounded": 100, "bounded_at_most": 100}
USED, CAME_LAST = "test_a_bounded_index_keeps_what_is_looked_up", "test_a_bounded_index_keeps_what_came_last"
FORGETFUL.breaks(USED)(over(FirstIn, keeps="recently_used", **KEEPS))
FORGETFUL.breaks(USED)(over(TouchesTheLastBlock, keeps="recently_used", **KEEPS))
FORGETFUL.breaks(CAME_LAST)(over(LastIn, keeps="recently_stored", **KEEPS))
FORGETFUL.breaks(CAME_LAST)(over(Frequent, keeps="recently_used", **KEEPS))
RIGHT = {
    "recently stored": (over(FirstIn, keeps="recently_stored", **KEEPS), USED, CAME_LAST),
    "recently used": (over(Recent, keeps="recently_used", **KEEPS), USED, CAME_LAST),
    "sampled": (over(Sampled, keeps="recently_used", **KEEPS), USED, CAME_LAST),
    "a few": (
        over(
            type("OfFew", (Recent,), {"__init__": lambda self: BoundedIndex.__init__(self, 8)}),
            keeps="recently_used",
            bounded=8,
        ),
        USED,
        CAME_LAST,
    ),
}
"""Contracts over right indexes, each with the tests that it must pass."""

# ------------------------------------------------------------------------------------------------------- a queue


class Queue:
    """Queues events until it is flushed or queried."""

    most = None

    def __init__(self):
        self.tree, self.queue, self.lost = RadixIndex(), deque(maxlen=self.most), 0

    def apply(self, event):
        self.lost += len(self.queue) == self.most
        self.queue.append(event)

    def flush(self):
        while self.queue:
            try:
                self.tree.apply(self.queue.popleft())
            except ValueError:
                if not self.lost:
                    raise

    def find_matches(self, local_hashes):
        return self.tree.find_matches(local_hashes)

    def remove_worker(self, worker_id):
        self.flush()
        self.tree.remove_worker(worker_id)


class DropsInSilence(Queue):
    most = 2**14


class DropsInSilenceLater(Queue):
    most = 2**16


class SaysWhatItDrops(Queue):
    most = 2**14

    def dropped(self):
        return self.lost


class SaysThatItDropsNone(SaysWhatItDrops):
    def dropped(self):
        return 0


QUEUED = "test_many_events_may_come_before_a_flush"
FORGETFUL.breaks(QUEUED)(over(DropsInSilence))
FORGETFUL.breaks(QUEUED)(over(SaysThatItDropsNone))
FORGETFUL.breaks(QUEUED)(over(DropsInSilenceLater, async_bound=True))
RIGHT |= {
    "keeps all": (over(Queue), QUEUED),
    "keeps all of 100,000": (over(Queue, async_bound=True), QUEUED),
    "says what it drops": (over(SaysWhatItDrops), QUEUED),
}

# -------------------------------------------------------------------------------------------------------- leaks


class Tree(RadixIndex):
    def size(self):
        return sum(self.num_blocks(*key) for key in self.workers)


class KeepsEveryEvent(Tree):
    def __init__(self):
        super().__init__()
        self.log = []

    def apply(self, event):
        self.log.append(event)
        super().apply(event)


class KeepsNamesOfAllThatWent(Tree):
    gone: ClassVar = {}

    def __init__(self):
        super().__init__()
        self.gone.clear()  # of the index before, so that each run gives the same result

    def apply(self, event):
        if isinstance(event.event.data, Removed):
            self.gone.update(dict.fromkeys(event.event.data.block_hashes))
        super().apply(event)


NUMBERS = []


class KeepsNamesInItsModule(RadixIndex):
    def __init__(self):
        super().__init__()
        NUMBERS.clear()  # for the same reason

    def apply(self, event):
        NUMBERS.append(event.event.data)
        super().apply(event)


class KeepsLateNames(Tree):
    """Right: keeps the names of the last 4,000 removed blocks."""

    def __init__(self):
        super().__init__()
        self.late = OrderedDict()

    def apply(self, event):
        if isinstance(event.event.data, Removed):
            self.late.update(dict.fromkeys(event.event.data.block_hashes))
            while len(self.late) > 4000:
                self.late.popitem(last=False)
        super().apply(event)


class TidiesUpNowAndThen(Tree):
    """Right: leaves removed blocks in place until there are too many of them."""

    def __init__(self):
        super().__init__()
        self.dead = []

    def apply(self, event):
        self.dead.append(event)
        if len(self.dead) > 5000:
            self.dead.clear()
        super().apply(event)


GROWS = "test_it_does_not_grow_with_events"
for leaks in (KeepsEveryEvent, KeepsNamesOfAllThatWent, KeepsNamesInItsModule):
    FORGETFUL.breaks(GROWS)(over(leaks))
RIGHT |= {
    "late names": (over(KeepsLateNames), GROWS),
    "tidies up": (over(TidiesUpNowAndThen), GROWS),
    "no leak": (over(RadixIndex), GROWS),
}


class HoldsFewOfARank(RadixIndex):
    """Has room for 50,000 blocks of a rank and does not declare it."""

    def apply(self, event):
        if not isinstance(event.event.data, Stored) or self.num_blocks(*event.key) < 50_000:
            super().apply(event)


FORGETFUL.breaks("test_it_holds_what_a_fleet_has")(over(HoldsFewOfARank))

# -------------------------------------------------------------------------------------------------- several keys


class ByAllKeys(KeyedTokenIndex):
    """Right: looks up a prompt by all keys that vLLM hashes with each block."""


class NoSaltBesideAnAdapter(KeyedTokenIndex):
    def looked_at(self, keys, extra):
        has_adapter = extra.get("lora_name") is not None
        return tuple(key for key in keys or () if not (has_adapter and key == extra.get("cache_salt")))


class NoImageBesideAnAdapter(KeyedTokenIndex):
    def looked_at(self, keys, extra):
        has_adapter = extra.get("lora_name") is not None
        return tuple(key for key in keys or () if not (has_adapter and isinstance(key, tuple)))


class NoImageBesideASalt(KeyedTokenIndex):
    def looked_at(self, keys, extra):
        has_salt = extra.get("cache_salt") is not None
        return tuple(key for key in keys or () if not (has_salt and isinstance(key, tuple)))


CROSSED, AHEAD = "test_keys_are_told_apart_each_with_each", "test_keys_are_told_apart_where_names_look_ahead"
for joins in (NoSaltBesideAnAdapter, NoImageBesideAnAdapter, NoImageBesideASalt):
    FORGETFUL.breaks(CROSSED)(over(joins, backends=("vllm",)))
RIGHT |= {"all keys": (over(ByAllKeys, backends=("vllm",)), CROSSED)}


class KeyedWindows(ByWindows):
    """Right: looks up by the windows that names cover, and by the keys of a prompt."""

    def __init__(self):
        super().__init__(True)

    def match_tokens(self, tokens, extra=None):
        found = {}
        for ahead in {*self.forms.values()}:
            hashes = block_hashes(tokens, self.size, lookahead=ahead, **self.options(extra))
            scores = self.index.find_matches(hashes).scores
            found |= {key: count for key, count in scores.items() if self.forms.get(key) == ahead}
        return found

    def options(self, extra):
        return hash_options(extra)

    def remove_worker(self, worker_id):
        super().remove_worker(worker_id)
        self.forms = {key: ahead for key, ahead in self.forms.items() if key[0] != worker_id}


class WindowsWithoutSalts(KeyedWindows):
    """Hashes windows itself, without the salt next to them."""

    def apply(self, event):
        data = event.event.data
        if isinstance(data, Stored):
            windows, ahead = windows_of(event.token_ids, (event.extra or {}).get(LOOKAHEAD))
            options = self.options(event.extra)
            hashes = [block_hashes(window, self.size, lookahead=ahead, **options)[0] for window in windows]
            parts = type(event.event)(
                event.event.event_id, Stored(data.parent_hash, data.block_hashes, hashes), event.event.dp_rank
            )
            event = type(event)(event.worker_id, parts, event.storage_tier, event.token_ids, event.extra)
        super().apply(event)

    def options(self, extra):
        return {name: value for name, value in hash_options(extra).items() if name != "cache_namespace"}


class KeepsTheFormOfAWorker(KeyedWindows):
    """Reads only once for each worker how far its names look ahead."""

    def apply(self, event):
        form = self.forms.get(event.key)
        super().apply(event)
        if form is not None:
            self.forms[event.key] = form

    def remove_worker(self, worker_id):
        self.index.remove_worker(worker_id)


class ByWindow:
    """Looks up one window at a time; the shortest match counts."""

    counts = staticmethod(min)

    def __init__(self):
        self.held = {}

    def apply(self, event):
        data, windows = event.event.data, self.held.setdefault(event.key, {})
        if isinstance(data, Cleared):
            windows.clear()
        elif event.storage_tier is StorageTier.DEVICE:
            blocks = windows.setdefault((event.extra or {}).get("window_size", 0), {})
            if isinstance(data, Removed):
                for block in data.block_hashes:
                    blocks.pop(block, None)
            else:
                chain = () if data.parent_hash is None else blocks.get(data.parent_hash)
                for block, local in (
                    zip(data.block_hashes, data.tokens_hashes, strict=False) if chain is not None else ()
                ):
                    blocks[block] = chain = (*chain, local)

    def find_matches(self, local_hashes):
        asked = [tuple(local_hashes[:end]) for end in range(1, len(local_hashes) + 1)]
        found = {}
        for key, windows in self.held.items():
            held = {*windows[self.counts(windows)].values()} if windows else set()
            found[key] = next((end for end, chain in enumerate(asked) if chain not in held), len(asked))
        return found

    def remove_worker(self, worker_id):
        self.held = {key: held for key, held in self.held.items() if key[0] != worker_id}


class AnyWindow(ByWindow):
    """Takes a block as held if any window has it."""

    def find_matches(self, local_hashes):
        found = {}
        for key, windows in self.held.items():
            held = {chain for blocks in windows.values() for chain in blocks.values()}
            asked = (tuple(local_hashes[:end]) for end in range(1, len(local_hashes) + 1))
            found[key] = next((end for end, chain in enumerate(asked) if chain not in held), len(local_hashes))
        return found


class LongestWindow(ByWindow):
    """Right."""

    counts = staticmethod(max)


TWO = "test_it_follows_traffic_of_two_windows"
FORGETFUL.breaks(TWO)(over(ByWindow, backends=("trtllm",)))
FORGETFUL.breaks(TWO)(over(AnyWindow, backends=("trtllm",)))
RIGHT |= {
    "the longest window": (over(LongestWindow, backends=("trtllm",)), TWO),
    "the reference": (over(RadixIndex, backends=("trtllm",)), TWO),
}

DRAFTS = {"backends": ("vllm_mtp", "sglang_eagle")}
RETURNS = "test_a_worker_comes_back_with_other_names"
FORGETFUL.breaks(AHEAD)(over(WindowsWithoutSalts, **DRAFTS))
FORGETFUL.breaks(RETURNS)(over(KeepsTheFormOfAWorker, **DRAFTS))
RIGHT |= {
    "windows and keys": (over(KeyedWindows, **DRAFTS), AHEAD, RETURNS),
    "by hashes": (over(RadixIndex, **DRAFTS), AHEAD, RETURNS, CROSSED),
}
