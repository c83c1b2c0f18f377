"""`kv_router`, `kv_fleet` and `make_kv_fleet` in a test: verdict, matrix, faults, and reproduction of a failure."""

from depth import worth_its_time

TRACE = """
from pytest_kvmock import Fleet
from pytest_kvmock.fleets import Report
from pytest_kvmock.fleets import DynamoRouter, RoundRobin
from pytest_kvmock.oracle import RadixIndex
from pytest_kvmock.fleets import synthetic_trace

def trace(count=30):
    return list(synthetic_trace(count, groups=3, prefix_blocks=(3, 3), turns=(1, 2), block_size=4, interval_ms=10,
        input_tokens=(4, 24), output_tokens=(1, 12), delay_ms=(5, 50)))
"""
SMALL = "@pytest.mark.kvmock(workers=3, num_blocks=64, block_size=4)"


def test_a_router_runs_over_every_backend(nested):
    source = f"""{TRACE}
class Last:
    def pick(self, request, candidates): return candidates[-1].worker

@pytest.fixture
def kv_router(): return Last()

{SMALL}
def test(kv_fleet):
    report = kv_fleet.run(trace())
    assert isinstance(kv_fleet, Fleet) and isinstance(report, Report)
    assert {{2}} == {{pick.worker for pick in report.picks}}
"""
    nested(source).assert_outcomes(passed=3)


def test_without_a_router_dynamos_router_picks_and_further_fleets_can_be_made(nested):
    source = f"""{TRACE}
{SMALL}
def test(kv_fleet, make_kv_fleet):
    assert "<Fleet of 3 engines behind DynamoRouter>" == repr(kv_fleet)
    assert 30 == len(kv_fleet.run(trace()).completed)
    other = make_kv_fleet(workers=2, backends=["lru", "lineage"], engine={{"max_num_seqs": 2}}, router=RoundRobin())
    assert 30 == len(other.run(trace()).completed)
    assert {{2}} == {{engine.args.max_num_seqs for engine in other.engines.values()}}
"""
    nested(source, "-k", "lineage").assert_outcomes(passed=1)


def test_a_value_that_is_not_a_router_fails_in_one_line(nested):
    source = f"@pytest.fixture\ndef kv_router(): return int\n{SMALL}\ndef test(kv_fleet): pass"
    result = nested(source, "-k", "lineage")
    result.assert_outcomes(errors=1)
    assert "kv_fleet: router is the class int; it must be an object, int()" in result.stdout.str()


def test_a_wrong_index_behind_a_router_is_found_and_reproduced(nested):
    source = f"""{TRACE}
class Blind(RadixIndex):
    count = 0
    def new(self): return Blind()
    def apply(self, event):
        self.count += type(event.event.data).__name__ == "Removed"
        if type(event.event.data).__name__ != "Removed" or self.count % 3:
            super().apply(event)

@pytest.fixture
def kv_index(): return Blind()

{SMALL}
def test(kv_fleet): kv_fleet.run(trace())
"""
    result = nested(source, "-k", "lineage")
    result.assert_outcomes(failed=1)
    text = result.stdout.str()
    assert "index_drift: your index disagrees with the reference index" in text
    assert "def test_reproduction(kv_index):" in text


@worth_its_time
def test_an_unannounced_restart_must_be_expected_or_the_test_fails(nested):
    source = f"""{TRACE}
def serve(fleet):
    fleet.at(100).restart(1, announced=False)
    fleet.run(trace())

{SMALL}
def test_unannounced(kv_fleet): serve(kv_fleet)

{SMALL}
def test_expected(kv_fleet, kv_events):
    kv_events.expect_error("event_id_gap")
    serve(kv_fleet)

{SMALL}
def test_announced(kv_fleet):
    kv_fleet.at(100).restart(1)
    kv_fleet.run(trace())
"""
    result = nested(source, "-k", "lineage", "-rA", "--kv-reduce=60")
    result.assert_outcomes(passed=2, failed=1)
    text = result.stdout.str()
    assert "1 KV event error: event_id_gap" in text
    assert "fault:     injected: restart of worker 1" in text
    assert "kv.worker(1).restart()" in text.partition("smallest reproduction")[2]
