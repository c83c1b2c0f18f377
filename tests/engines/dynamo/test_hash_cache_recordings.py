"""Recordings of the real manager of dynamo-mocker 1.0.2, compared step by step."""

from collections import Counter

import pytest
from cache_helpers import Player, event_rows, publish_rows

from pytest_kvmock import CapturingSink, EngineProfile, RouterHarness, create_manager
from pytest_kvmock.engines.dynamo.sequence import ActiveSequence
from pytest_kvmock.values import Destroy, MoveError, Promote, Use


def shown(manager):
    """Return a manager's visible state, to check that it did not change."""
    return manager.active_blocks, manager.inactive_blocks(), list(manager.sink.events)


class HashCachePlayer(Player):
    """Plays the operations of 1.0.2, which answers true or false where the newer manager answers a number."""

    def play(self, operation):
        """Execute one operation and return its row: value, events, active, inactive."""
        kind, *arguments = operation
        value = getattr(self, f"play_{kind}")(*arguments)
        manager = self.manager
        assert manager.current_capacity == manager.num_active_blocks + manager.num_inactive_blocks
        return [value, event_rows(manager.sink.take()), manager.num_active_blocks, manager.num_inactive_blocks]

    def use(self, move):
        answer = self.manager.process(move)
        assert answer in (0, len(move.blocks))
        return answer == len(move.blocks)

    def play_use(self, names, local_hashes):
        return self.use(Use(self.blocks(names), local_hashes))

    def play_destroy(self, names):
        return self.manager.process(Destroy(self.blocks(names)))

    def play_promote(self, partial, block, parent, local_hash):
        return self.manager.process(Promote(self.block(partial), block, parent, local_hash))

    def play_probe(self, names):
        return self.manager.probe_new_blocks(self.blocks(names))

    def play_new(self, name, tokens, max_output):
        sequence = ActiveSequence(tokens, max_output, self.manager.block_size, rng=self.rng, moves="whole")
        self.sequences[name] = sequence
        return len(sequence.unique_blocks)

    def play_admit(self, name):
        return self.use(self.sequences[name].take_creation_signal())

    def play_push(self, name, token):
        sequence = self.sequences[name]
        for move in sequence.push(token):
            if not self.manager.process(move):
                sequence.pop()
                return False
        return True

    def play_cost(self, name):
        cost = self.manager.prefill_cost(self.sequences[name])
        assert cost.new_tokens + cost.cached_tokens == self.sequences[name].num_input_tokens
        return [cost.new_blocks, cost.new_tokens]


@pytest.mark.parametrize("file", ["scenarios", "moves", "requests"])
def test_a_recorded_program_gives_the_recorded_answers_events_and_counts(recording, file):
    for program in recording(f"hash_cache_{file}.json.gz")["programs"]:
        sizes = {"num_blocks": program["capacity"], "block_size": program["block_size"]}
        player = HashCachePlayer(create_manager("hash_cache", **sizes, sink=CapturingSink()))
        for number, (operation, *expected) in enumerate(program["steps"]):
            where = (program.get("name", program.get("seed")), number, operation)
            if isinstance(expected[0], dict):  # the real manager panicked
                before = shown(player.manager)
                with pytest.raises(MoveError):
                    player.play(operation)
                assert before == shown(player.manager), where
            else:
                assert player.play(operation) == expected, where


OWN_FAULTS = {  # faults of the real manager: blocks kept by a `Use` that does not fit, and blocks that occur twice
    "scenarios": {
        ("engine_drift", True, None): 2,
        ("block_not_found", True, None): 1,
        ("invalid_block", True, None): 1,
    },
    "moves": {
        ("engine_drift", True, None): 55,
        ("block_not_found", True, None): 111,
        ("parent_block_not_found", True, None): 5,
    },
    "requests": {("wrong_hash", False, None): 1},
}


@pytest.mark.parametrize("file", ["scenarios", "moves", "requests"])
def test_a_custom_engine_sink_reports_the_faults_of_the_recorded_manager(recording, file):
    """The sink is compared with the manager's blocks after each step and detects that hashes are chained."""
    found = Counter()
    for program in recording(f"hash_cache_{file}.json.gz")["programs"]:
        sizes = {"num_blocks": program["capacity"], "block_size": program["block_size"]}
        player = HashCachePlayer(create_manager("hash_cache", **sizes, sink=CapturingSink()))
        kv = RouterHarness(EngineProfile(block_size=program["block_size"]), backend=None)
        sink = kv.make_sink(num_blocks=program["capacity"], prefix_closed=False)
        sink.compare(player.manager.resident)
        for operation, *expected in program["steps"]:
            if isinstance(expected[0], dict):  # the real manager panicked
                continue
            player.play(operation)
            publish_rows(sink, expected[1])
            kv.flush()
        found.update(
            (problem.rule, problem.is_error, problem.cause and problem.cause.rule) for problem in kv.events.problems
        )
    assert OWN_FAULTS[file] == found
