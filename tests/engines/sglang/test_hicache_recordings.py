"""The recordings of SGLang 0.5.23's HiCache, step by step, and their events in an index and a ledger."""

import gzip
import json

import pytest
from players import player

from pytest_kvmock import Cleared, KvCacheEvent, RouterEvent, StorageTier, Stored
from pytest_kvmock.oracle import RadixIndex
from pytest_kvmock.oracle.hygiene.ledger import Ledger

play_hicache = player("engines/sglang/play_hicache.py")

FILE = "sglang_0.5.23_hicache.json.gz"
KINDS = {
    *("back", "back_storage", "pressure_storage", "scenario"),
    *("selective", "selective_storage", "through", "through_storage", "tight_storage"),
}
DEVICE, HOST, *_ = StorageTier


def programs_of(recording, kind):
    return [program for program in recording(FILE) if program["kind"] == kind]


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_programs_give_the_recorded_answers_events_sizes_and_trees(recording, kind):
    for program in programs_of(recording, kind):
        assert list(play_hicache.Player.differences(program)) == [], program.get("name", program.get("seed"))


def test_every_recorded_program_is_played(recording):
    assert {program["kind"] for program in recording(FILE)} == KINDS


def test_the_player_prints_differences_and_exits_with_1(recording, tmp_path, capsys):
    program, other = programs_of(recording, "through")[:2]
    program["steps"][3]["sizes"][0] += 1
    path = tmp_path / "programs.json.gz"
    path.write_bytes(gzip.compress(json.dumps([program, other]).encode()))
    assert play_hicache.main([path]) == 1
    first, recorded, ours, last = capsys.readouterr().out.splitlines()
    assert first == f"programs.json.gz: through {program['seed']}: step 3 {program['steps'][3]['op'][0]}:"
    assert recorded == f"  sizes: recorded {program['steps'][3]['sizes']}"
    assert ours.startswith("         ours     [")
    assert last == "1 of 2 programs equal"


class Follower:
    """Pass the events of a player to a ledger and an index, and record the contents of each medium independently."""

    def __init__(self, play):
        self.play, self.taken = play, 0
        self.ledger, self.index = Ledger(), RadixIndex()
        tiers = {HOST: play.manager.host_blocks}
        self.ledger.open((0, 0), first_id=0, num_blocks=play.manager.num_blocks, tier_blocks=tiers)
        self.held = {DEVICE: set(), HOST: set()}

    def take(self):
        """Take the pending events; returns the findings of the ledger."""
        problems = []
        for taken in self.play.manager.take_events():
            data, tier = taken.data, taken.tier
            event = RouterEvent(0, KvCacheEvent(self.taken, data), tier, taken.token_ids)
            self.taken += 1
            problems += self.ledger.take(event)
            self.index.apply(event)
            blocks = self.held[tier]
            if isinstance(data, Cleared):
                for each in self.held.values():
                    each.clear()
            elif isinstance(data, Stored):
                blocks.update(data.block_hashes)
            else:
                blocks.difference_update(data.block_hashes)
        return problems


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_events_agree_with_the_pages_of_each_medium_and_pass_the_ledger(recording, kind):
    for program in programs_of(recording, kind):
        play = play_hicache.Player(program)
        follower = Follower(play)
        for step in program["steps"]:
            if step.get("oom"):
                break
            play.play(step["op"])
            assert follower.take() == [], program.get("seed")
            for tier, blocks in follower.held.items():
                resident = play.manager.resident(tier)
                assert len(blocks) == len(resident)
                assert {*resident} == blocks


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_the_reference_index_answers_each_probe_like_the_engine(recording, kind):
    probes = 0
    for program in programs_of(recording, kind):
        play = play_hicache.Player(program)
        follower, size = Follower(play), play.size
        for step in program["steps"]:
            if step.get("oom"):
                break
            if step["op"][0] == "probe":
                key, _ = play.manager._key(step["op"][1], None, None)
                found = follower.index.find_tiered(key.local_hashes)
                pages = [found.get(tier, {}).get((0, 0), 0) * size for tier in (DEVICE, HOST)]
                assert [step["hit"], step["host_hit"]] == pages, (program.get("seed"), step)
                probes += 1
            play.play(step["op"])
            follower.take()
    assert probes


def test_a_host_copy_is_not_resident_before_it_is_acknowledged(recording):
    program = next(
        each for each in programs_of(recording, "scenario") if each["name"] == "locked until the copy is done"
    )
    play = play_hicache.Player(program)
    for step in program["steps"][:2]:
        play.play(step["op"])
    assert len(play.manager.resident(DEVICE)) == 7
    assert play.manager.resident(HOST) == []
    play.manager.step(writes=1, loads=0)
    assert len(play.manager.resident(HOST)) == 7
