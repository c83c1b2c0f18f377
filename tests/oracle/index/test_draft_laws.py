"""Laws for engines with a draft model at every recorded lookup: tokens reused, by blocks promised by the events.

D is the number of leading blocks of the prompt that the reference index finds after all events; `n` is the number of
the prompt's tokens, and `b` the block size.
"""

from collections import Counter

import pytest
from players import player

from pytest_kvmock import Cleared, Prompt, RadixIndex, Removed, RouterEvent
from pytest_kvmock.values.prompt_keys import group_of

PLAYER = player("engines/play_speculative.py")


class Vllm(PLAYER.VllmPlayer):
    """A player that gives the reference index all events and records each lookup."""

    def __init__(self, program):
        super().__init__(program)
        self.index, self.names, self.seen = RadixIndex(count_copies=True), Counter(), []
        self.geometry = self.manager.geometry

    def publish(self, event, storage_tier, token_ids=None, extra=None):
        super().publish(event, storage_tier, token_ids, extra)
        self.index.apply(RouterEvent(0, event, storage_tier, token_ids, extra))
        data, group = event.data, group_of(extra)
        if isinstance(data, Cleared):
            self.names.clear()
        elif isinstance(data, Removed):
            self.names.subtract((group, name) for name in data.block_hashes)
        else:
            self.names.update((group, name) for name in data.block_hashes)

    def do_admit(self, name, *rest):
        request = self.requests[name]
        main = next(group for group in self.geometry.groups if group.kind in ("full_attention", "mla_attention"))
        tokens = request.tokens
        prompt = Prompt(tokens.cut(0, len(request)))
        if tokens.keys is not None:
            prompt = prompt.with_keys(tokens.keys)
        local = prompt.block_hashes(main.block_size, self.geometry.lookahead)
        promised = self.index.find_matches(local).scores.get((0, 0), 0)
        longest = self.longest(request)
        answer = super().do_admit(name, *rest)
        self.seen.append((len(request), main.block_size, promised, answer["computed_tokens"], longest))
        return answer

    def longest(self, request):
        """Return the tokens that all groups can resume from, by the names that are held."""
        geometry, n = self.geometry, len(request)
        most = min(n - 1, n - geometry.lookahead) // geometry.alignment * geometry.alignment
        ends = range(most, 0, -geometry.alignment)
        return next((end for end in ends if all(map(self.resumes(request, end), range(len(geometry.groups))))), 0)

    def resumes(self, request, end):
        geometry, names = self.geometry, request.tokens.names
        unit = geometry.hash_unit

        def held(group, upto):
            place = upto // unit - 1
            return place < len(names) and self.names[group, names[place]] > 0

        def full(number, size, upto):
            inside = range(upto, -(-upto // size) * size + 1, unit) if upto % size else ()
            return all(held(number, at) for at in range(size, upto + 1, size)) and (
                not inside or any(held(number, at) for at in inside)
            )

        def of_group(number):
            group, drops = geometry.groups[number], geometry.drops[number]
            size = group.block_size
            if not group.cacheable:
                return True
            if group.kind == "mamba":
                return held(number, end)
            if group.window is None:
                return full(number, size, end + drops * (unit if geometry.alignment < size else size))
            last, need = end // size + drops, -(-(group.window - 1) // size) + drops
            return all(held(number, at * size) for at in range(max(last - need, 0) + 1, last + 1))

        return of_group


def looked_up(programs):
    """Yield for each lookup: tokens, block size, blocks promised, tokens reused, tokens all groups can resume from."""
    for program in programs:
        played = Vllm(program)
        for step in program["steps"]:
            assert step == played.play(step)
        yield from played.seen


@pytest.fixture(scope="module")
def programs(request):
    recording = request.getfixturevalue("recording")
    return recording("vllm_0.33.0_eagle.json.gz")


def alone(programs, *, drops, looks_ahead):
    return [
        each
        for each in programs
        if each["facts"]["kinds"] == [["full_attention", None]]
        and (each["facts"]["drop"], each["facts"]["hash_lookahead"] > 0) == (drops, looks_ahead)
    ]


def test_an_engine_with_look_ahead_reuses_exactly_the_promised_blocks(programs):
    seen = [*looked_up(alone(programs, drops=False, looks_ahead=True))]
    assert [row for row in seen if row[2] * row[1] != row[3]] == []
    assert sum(bool(row[3]) for row in seen) > 15


def test_an_engine_with_drop_reuses_one_block_less_than_promised(programs):
    seen = [*looked_up(alone(programs, drops=True, looks_ahead=False))]
    wrong = [(n, b, d, hit) for n, b, d, hit, _ in seen if hit != max(min(d, (n - 1) // b) - 1, 0) * b]
    assert wrong == []
    assert sum(bool(row[3]) for row in seen) > 15


def test_an_engine_without_look_ahead_or_drop_reuses_all_promised_blocks_before_the_last_token(programs):
    seen = [*looked_up(alone(programs, drops=False, looks_ahead=False))]
    assert [(n, b, d, hit) for n, b, d, hit, _ in seen if hit != min(d, (n - 1) // b) * b] == []
    assert sum(bool(row[3]) for row in seen) > 15


@pytest.mark.parametrize("drops", [False, True])
def test_with_several_groups_only_tokens_that_all_can_resume_from_are_reused(programs, drops):
    of_several = [each for each in programs if len(each["groups"]) > 1 and each["facts"]["drop"] == drops]
    seen = [*looked_up(of_several)]
    assert [row for row in seen if row[3] != row[4]] == []
    assert [(n, b, d, hit) for n, b, d, hit, _ in seen if hit >= (d + 1) * b] == []
    assert sum(bool(row[3]) for row in seen) > 15


class Sglang(PLAYER.SglangPlayer):
    """Records lookups of SGLang like `Vllm`."""

    def __init__(self, program):
        super().__init__(program)
        self.index, self.seen = RadixIndex(count_copies=True), []
        self.manager.sink = self

    def publish(self, event, storage_tier, token_ids=None, extra=None):
        self.index.apply(RouterEvent(0, event, storage_tier, token_ids, extra))

    def add(self, request, *rest):
        promised = self.index.find_matches(request.tokens.local_hashes).scores.get((0, 0), 0)
        answer = super().add(request, *rest)
        if "hit" in answer[0]:
            self.seen.append((request.tokens.num_tokens, promised * self.size, answer[0]["hit"]))
        return answer


@pytest.mark.parametrize("pairs", [True, False])
def test_sglang_reuses_all_promised_pages_before_the_last_tokens(recording, pairs):
    seen = []
    for program in recording("sglang_0.5.23_eagle.json.gz"):
        if program["kind"] == "swa" or program["bigrams"] != pairs:
            continue
        played, size = Sglang(program), program["page_size"]
        for step in program["steps"]:
            played.play(step["op"])
            played.manager.take_events()
        seen += [(n, size, promised, hit) for n, promised, hit in played.seen]
    assert [row for row in seen if row[3] != min(row[2], max((row[0] - 1 - pairs) // row[1] * row[1], 0))] == []
    assert sum(bool(row[3]) for row in seen) > 20
