"""The state machine: right backends pass, seeded bugs are found, and the printed program shows them again."""

import re

import pytest
from depth import FEWEST_EXAMPLES, examples, few, worth_its_time
from hybrid_sizes import EACH, HYBRID, block_size_of
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from mutants_indexes import IgnoresRemoved
from mutants_managers import Spoilt
from mutants_policies import GivesOneAtMost

from pytest_kvmock import BackendSpec, RadixIndex
from pytest_kvmock.testing import KvStateMachine

QUICK = settings(
    database=None,
    derandomize=True,
    phases=(Phase.generate, Phase.shrink),
    report_multiple_bugs=False,
    stateful_step_count=10,
    max_examples=400,
)


@pytest.mark.parametrize("backend", EACH)
def test_a_right_backend_passes(backend):
    sizes = {"workers": 2, "block_size": block_size_of(backend, 2)}
    machine = KvStateMachine.for_backend(backend, **sizes, make_index=lambda: RadixIndex(count_copies=True))
    most = FEWEST_EXAMPLES if backend in HYBRID else examples(30)  # the models of an engine share its manager
    run_state_machine_as_test(machine, settings=settings(QUICK, max_examples=most))


class PromotesInSilence(Spoilt):
    def _promote(self, move):
        sink, self.sink = self.sink, None
        super()._promote(move)
        self.sink = sink
        return 1


def spoilt_manager(*, num_blocks, block_size, dp_rank, sink):
    assert not dp_rank
    return PromotesInSilence(num_blocks, block_size, sink)


class IgnoresAllRemoved(KvStateMachine):
    """A machine with a wrong index, as a subclass."""

    backend = "lru"
    num_blocks = 3

    def make_index(self):
        return IgnoresRemoved.Subject()


def machine_of(spec):
    return KvStateMachine.for_backend(spec, num_blocks=4)


def spoilt_policy(num_blocks):
    assert num_blocks == 4
    return GivesOneAtMost.Subject()


BUGS = [
    pytest.param(
        machine_of(BackendSpec.of_policy("spoilt", spoilt_policy, models="nobody")),
        {"prefill", "finish"},
        id="evicts too few",
    ),
    pytest.param(
        machine_of(BackendSpec("spoilt", "nobody", spoilt_manager)), {"prefill", "decode"}, id="promotes in silence"
    ),
    pytest.param(IgnoresAllRemoved, {"prefill", "finish"}, id="an index that ignores Removed"),
]


STEP = r"(?:request_\d+ = )?state\.(prefill|decode|finish|preempt|resume|clear)\((?:\w+=[\w\[\], ]+)*\)"


@worth_its_time
@pytest.mark.parametrize(("machine", "needed"), few(BUGS))
def test_a_seeded_bug_is_found_and_printed_in_the_few_steps_that_show_it(machine, needed):
    with pytest.raises(Exception) as raised:  # whatever a broken engine raises
        run_state_machine_as_test(machine, settings=QUICK)
    program = steps_in(raised.value)
    assert program[0] == f"state = {machine.__name__}()"
    assert program[-1] == "state.teardown()"
    steps = program[1:-1]
    assert len(steps) <= 5
    assert [step for step in steps if not re.fullmatch(STEP, step)] == []
    assert needed <= {re.fullmatch(STEP, step)[1] for step in steps}
    with pytest.raises(type(raised.value)):  # the text is Python and shows the bug again
        exec("\n".join(program), {machine.__name__: machine})


def steps_in(error):
    return re.findall(r"^(?:\w+ = )?state\b.*$", "\n".join(error.__notes__), re.MULTILINE)


def test_a_machine_is_named_after_its_backend_by_a_valid_identifier():
    spec = BackendSpec.of_policy("s3-fifo.2", spoilt_policy, models="nobody")
    assert KvStateMachine.for_backend(spec).__name__ == "KvStateMachine_s3_fifo_2"
    assert IgnoresAllRemoved.for_backend("lru", workers=2).__name__ == "IgnoresAllRemoved_lru"


def test_an_unknown_attribute_of_a_machine_is_refused():
    message = "^for_backend: unknown attribute 'blocks'; did you mean 'num_blocks' or 'block_size'[?] known: num_blocks, block_size, workers, chunk, make_index$"  # noqa: E501
    with pytest.raises(TypeError, match=message):
        KvStateMachine.for_backend("lru", blocks=8)
