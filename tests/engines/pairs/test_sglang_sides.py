"""The queues of SGLang's prefill and decode engines, and the rooms that connect them: one rule per test."""

from random import Random

import pytest

from pytest_kvmock import CapturingSink, Cleared, Prompt, Removed, Stored
from pytest_kvmock.engines.sglang.geometry import Geometry
from pytest_kvmock.engines.sglang.hybrid_cache import HybridCacheManager
from pytest_kvmock.engines.sglang.pairs.sglang_decode import SglangDecode
from pytest_kvmock.engines.sglang.pairs.sglang_legs import DecodeLeg, PrefillLeg
from pytest_kvmock.engines.sglang.pairs.sglang_options import SglangPairOptions
from pytest_kvmock.engines.sglang.pairs.sglang_prefill import PrefillPiece, SglangPrefill
from pytest_kvmock.engines.sglang.pairs.sglang_rooms import RoomReused, SglangRooms

SIZE = 4
WHERE = "10.0.0.1", 8998


class Cache:
    """A cache of few pages, with its events."""

    def __init__(self, pages):
        self.sink = CapturingSink()
        self.manager = HybridCacheManager(geometry=Geometry(), num_blocks=pages, block_size=SIZE, sink=self.sink)

    @property
    def events(self):
        return [event.data for event in self.sink.events]

    @property
    def stored(self):
        return sum(len(data.blocks) for data in self.events if isinstance(data, Stored))

    def request(self, tokens):
        return self.manager.request(Prompt(tokens), Random(0))


class Prefill(Cache):
    """A prefill engine whose batches contain whole prompts."""

    def __init__(self, pages=32, rows=8, **options):
        super().__init__(pages)
        self.side = SglangPrefill(self.manager, rows=rows, options=SglangPairOptions(**options))

    def ask(self, name, tokens, room=1, asked_s=0.0):
        leg = PrefillLeg(name, room, self.request(tokens), asked_s)
        leg.token = 7
        self.side.ask(leg)
        return leg

    def turn(self, most=1000):
        """Run one turn of the event loop; each chunk has at most `most` tokens."""
        side, batch = self.side, []
        side.begin_turn()
        for leg in side.candidates():
            if leg.request not in self.manager.requests:
                if len(batch) >= side.free_rows:
                    break
                self.manager.find(leg.request)
                self.manager.admit(leg.request)
            start = leg.request.computed
            upto = min(leg.prompt_tokens, start + most)
            batch.append(PrefillPiece(leg, start, upto))
            if upto < leg.prompt_tokens:
                break
        side.launch(batch)
        side.end_turn()
        return [piece.leg.name for piece in batch]

    def said(self):
        return [(answer.name, answer.finish, answer.status) for answer in self.side.take_answers()]


class Decode(Cache):
    """A decode engine with a radix cache."""

    def __init__(self, pages=32, places=8, **options):
        super().__init__(pages)
        options = {"disaggregation_decode_enable_radix_cache": True, "num_reserved_decode_tokens": 4, **options}
        self.side = SglangDecode(self.manager, places=places, options=SglangPairOptions(**options))

    def ask(self, name, tokens, room=1, asked_s=0.0, max_new=3):
        leg = DecodeLeg(name, room, self.request(tokens), max_new, asked_s)
        self.side.ask(leg)
        return leg

    def serve(self, name, tokens):
        """Receive a prompt and start it."""
        leg = self.ask(name, tokens)
        leg.shake()
        self.side.reserve()
        leg.arrive(7, leg.room)
        self.side.poll()
        self.side.join()
        return leg

    said = Prefill.said


# ------------------------------------------------------------------------------------------------ P


def test_a_prompt_is_not_computed_before_the_decode_engine_has_reserved_pages():
    engine = Prefill()
    leg = engine.ask("a", range(10))
    assert engine.turn() == []
    leg.shake(0)
    assert engine.turn() == ["a"]


def test_a_ready_leg_is_computed_before_an_earlier_leg_that_is_not_ready():
    engine = Prefill()
    engine.ask("a", range(10))
    engine.ask("b", range(10)).shake(0)
    assert engine.turn() == ["b"]


def test_blocks_are_published_before_the_transfer_ends_and_the_answer_comes_after_it():
    engine = Prefill(disable_overlap_schedule=True)
    leg = engine.ask("a", range(10))
    leg.shake(0)
    engine.turn()
    assert engine.stored == 2
    assert engine.manager.protected_size() == 8
    engine.turn()
    assert engine.said() == []
    leg.arrive()
    engine.turn()
    assert engine.said() == [("a", "length", 200)]
    assert engine.manager.evictable_size() == 8


def test_overlap_scheduling_publishes_a_batch_one_turn_later():
    engine = Prefill()
    engine.ask("a", range(10)).shake(0)
    engine.turn()
    assert engine.stored == 0
    engine.turn()
    assert engine.stored == 2


@pytest.mark.parametrize(("prefix", "pages"), [(0, 3), (4, 2), (8, 1), (12, 0)])
def test_only_pages_that_the_decode_engine_lacks_are_sent(prefix, pages):
    engine = Prefill(disable_overlap_schedule=True)
    engine.ask("a", range(12)).shake(prefix)
    engine.turn()
    assert [(each.pages, each.tokens, each.is_last) for each in engine.side.take_sent()] == [(pages, 12 - prefix, True)]


def test_a_chunk_is_sent_and_published_when_the_next_chunk_is_launched():
    engine = Prefill()
    engine.ask("a", range(10)).shake(0)
    seen = []
    for _ in range(4):
        engine.turn(most=4)
        seen.append((engine.stored, [each.pages for each in engine.side.take_sent()]))
    assert seen == [(0, []), (1, [1]), (2, [1]), (2, [1])]


def test_a_failed_transfer_leaves_the_prompt_cached_but_a_failed_handshake_publishes_nothing():
    engine = Prefill(disable_overlap_schedule=True)
    engine.ask("a", range(8)).fail()
    engine.turn()
    assert engine.said() == [("a", "error", 500)]
    assert engine.stored == 0
    leg = engine.ask("b", range(8))
    leg.shake(0)
    engine.turn()
    leg.fail()
    engine.turn()
    assert engine.said() == [("b", "error", 500)]
    assert engine.manager.evictable_size() == 8


def test_an_abort_ends_all_requests_whose_name_begins_with_the_given_prefix():
    engine = Prefill(disable_overlap_schedule=True)
    for name in ("1", "12", "2"):
        engine.ask(name, range(8))
    engine.side.abort("1")
    engine.turn()
    assert engine.said() == [("1", "error", 500), ("12", "error", 500)]
    assert [leg.name for leg in engine.side.legs] == ["2"]


def test_a_prompt_aborted_between_chunks_keeps_only_its_published_chunks_cached():
    engine = Prefill()
    engine.ask("a", range(12)).shake(0)
    engine.turn(most=4)
    engine.turn(most=4)
    engine.side.abort("a")
    engine.turn(most=4)
    assert engine.said() == [("a", "abort", None)]
    assert engine.stored == 1
    assert engine.manager.available_size() == 31 * SIZE


def test_a_prompt_longer_than_the_pool_is_refused_at_once():
    engine = Prefill(pages=2)
    engine.ask("a", range(9))
    assert engine.said() == [("a", "error", 400)]
    assert engine.side.legs == []


def test_a_prompt_that_waits_for_the_decode_engine_fails_after_the_timeout():
    engine = Prefill()
    engine.ask("a", range(8), asked_s=10.0)
    assert engine.side.expires_s == 310.0
    engine.side.expire(309.0)
    engine.turn()
    assert engine.said() == []
    engine.side.expire(310.0)
    engine.turn()
    assert engine.said() == [("a", "error", 500)]


def test_metadata_slots_limit_the_number_of_requests_in_transfer():
    engine = Prefill(metadata_slots=1, disable_overlap_schedule=True)
    first, second = engine.ask("a", range(8)), engine.ask("b", range(20, 28))
    first.shake(0)
    second.shake(0)
    assert engine.turn() == ["a"]
    first.arrive()
    assert engine.turn() == []
    assert engine.turn() == ["b"]


def test_an_optimistic_prefill_publishes_before_the_handshake_and_yields_its_row():
    engine = Prefill(rows=1, optimistic_prefill_attempts=1, disable_overlap_schedule=True)
    engine.ask("a", range(8))
    engine.turn()
    assert engine.stored == 2
    engine.ask("b", range(20, 28)).shake(0)
    assert engine.turn() == []
    assert [leg.name for leg in engine.side.boot] == ["a"]
    assert engine.turn() == ["b"]


def test_a_prompt_computed_before_pages_are_reserved_keeps_its_row():
    policy = "prefill_complete"
    engine = Prefill(rows=1, disaggregation_decode_allocation_policy=policy, disable_overlap_schedule=True)
    engine.ask("a", range(8))
    engine.turn()
    engine.ask("b", range(20, 28)).shake(0)
    assert engine.turn() == []
    assert [leg.name for leg in engine.side.inflight] == ["a"]


# ------------------------------------------------------------------------------------------------ D


def test_received_blocks_are_published_when_the_request_joins_the_batch_and_not_on_arrival():
    engine = Decode(places=1)
    first = engine.serve("a", range(8))
    assert engine.stored == 2
    engine.serve("b", range(20, 28))
    assert engine.stored == 2
    engine.side.finish(first)
    engine.side.join()
    assert engine.stored == 4


def test_the_decode_engine_matches_the_whole_prompt_including_its_last_token():
    engine = Decode()
    engine.side.finish(engine.serve("a", range(8)))
    leg = engine.ask("b", range(8))
    leg.shake()
    engine.side.reserve()
    assert (leg.hit_tokens, leg.asked_pages) == (8, 0)


def test_the_first_leg_that_does_not_fit_blocks_all_later_legs():
    engine = Decode(pages=8)
    for name, length in (("a", 16), ("b", 24), ("c", 4)):
        engine.ask(name, range(length)).shake()
    assert [leg.name for leg in engine.side.reserve()] == ["a"]
    assert [leg.name for leg in engine.side.queue] == ["b", "c"]


def test_a_prompt_as_large_as_the_pool_is_accepted_and_blocks_the_queue_forever():
    engine = Decode(pages=4)
    assert engine.side.ask(DecodeLeg("a", 1, engine.request(range(16)), 1))
    engine.ask("b", range(20, 24)).shake()
    engine.side.queue[0].shake()
    assert engine.side.reserve() == []
    engine.ask("c", range(17))
    assert engine.said() == [("c", "error", 400)]


def test_pages_are_reserved_for_the_output_of_running_requests():
    prompts = [("a", range(8)), ("b", range(20, 28))]
    for reserved, got in ((0, ["a", "b"]), (8, ["a"])):
        engine = Decode(pages=6, num_reserved_decode_tokens=reserved)
        for name, tokens in prompts:
            engine.ask(name, tokens).shake()
        assert [leg.name for leg in engine.side.reserve()] == got


@pytest.mark.parametrize("how", ["failed", "another room", "handshake"])
def test_a_failed_decode_leg_publishes_nothing_and_frees_all_its_pages(how):
    engine = Decode()
    leg = engine.ask("a", range(8))
    if how == "handshake":
        leg.fail()
        engine.side.reserve()
    else:
        leg.shake()
        engine.side.reserve()
        if how == "failed":
            leg.fail()
        else:
            leg.arrive(7, leg.room + 1)
        engine.side.poll()
    assert engine.said() == [("a", "error", 500)]
    assert [type(data) for data in engine.events] == [Cleared]
    assert engine.manager.available_size() == 32 * SIZE


def test_blocks_evicted_for_a_failed_transfer_stay_evicted():
    engine = Decode(pages=4, num_reserved_decode_tokens=0)
    engine.side.finish(engine.serve("a", range(8)))
    leg = engine.ask("b", range(20, 34), max_new=1)
    leg.shake()
    engine.side.reserve()
    leg.fail()
    engine.side.poll()
    assert [type(data) for data in engine.events] == [Cleared, Stored, Removed]


def test_without_a_radix_cache_no_page_is_matched_or_kept():
    engine = Decode(disaggregation_decode_enable_radix_cache=False)
    for name in ("a", "b"):
        leg = engine.serve(name, range(8))
        assert (leg.hit_tokens, leg.asked_pages) == (0, 2)
        engine.side.finish(leg)
    assert engine.stored == 0
    assert engine.manager.available_size() == 32 * SIZE


def test_a_request_for_one_token_ends_when_it_joins_the_batch():
    engine = Decode()
    leg = engine.ask("a", range(8), max_new=1)
    leg.shake()
    engine.side.reserve()
    leg.arrive(7, leg.room)
    engine.side.poll()
    assert engine.side.join() == [leg]
    assert engine.side.running == []
    assert engine.said() == [("a", "length", 200)]


def test_pages_that_a_transfer_may_still_write_are_held_for_30_seconds_after_an_abort():
    engine = Decode()
    leg = engine.ask("a", range(8))
    leg.shake()
    engine.side.reserve()
    engine.side.abort("a", 5.0)
    engine.side.poll()
    assert engine.said() == [("a", "error", 500)]
    assert engine.manager.available_size() == 30 * SIZE
    engine.side.expire(34.9)
    assert engine.manager.available_size() == 30 * SIZE
    engine.side.expire(35.0)
    assert engine.manager.available_size() == 32 * SIZE


def test_no_leg_gets_pages_while_a_retracted_request_waits():
    engine = Decode(pages=6, num_reserved_decode_tokens=8)
    leg = engine.serve("a", range(8))
    assert engine.side.decode([leg], [1])
    engine.side.retract(leg)
    waits = engine.ask("b", range(12))
    waits.shake()
    taken = engine.ask("c", range(20, 36))
    assert engine.side.reserve() == []
    assert engine.side.arrived == [leg]
    assert taken.polled == "handshake"


# ------------------------------------------------------------------------------------------------ rooms


class Pair:
    """One engine of each kind, a room between their legs, and their turns."""

    def __init__(self, link_s=None, reused="fails", ranks=1, **options):
        self.rooms = SglangRooms(link_s, reused=reused)
        self.prefills = [Prefill(disable_overlap_schedule=True, **options) for _ in range(ranks)]
        self.p = self.prefills[0]
        self.d = Decode(**options)
        self.rooms.add(WHERE, [each.side for each in self.prefills])

    def ask_p(self, room, tokens, name="p", rank=0):
        leg = self.prefills[rank].ask(name, tokens, room)
        self.rooms.prefill(leg, WHERE, rank)
        return leg

    def ask_d(self, room, tokens, name="d", **options):
        leg = self.d.ask(name, tokens, room)
        self.rooms.decode(leg, WHERE, **options)
        return leg

    def turn(self, now_s=0.0):
        self.rooms.reserved(self.d.side.reserve())
        for engine in self.prefills:
            engine.turn()
            self.rooms.computed(engine.side.inflight)
            self.rooms.sent(engine.side.take_sent(), now_s)
        self.rooms.at(now_s)
        self.d.side.poll()
        self.d.side.join()


@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_a_prompt_is_handed_over_in_either_order_of_the_legs(first):
    pair = Pair()
    for leg in (first, "decode" if first == "prefill" else "prefill"):
        (pair.ask_p if leg == "prefill" else pair.ask_d)(5, range(8))
        pair.turn()
    pair.turn()
    assert pair.p.said() == [("p", "length", 200)]
    assert [leg.token for leg in pair.d.side.running] == [7]
    assert pair.p.events[1] == pair.d.events[1]


def test_the_prefill_waits_for_free_memory_of_the_decode_engine():
    pair = Pair()
    pair.d.serve("a", range(100, 220))
    pair.ask_d(5, range(40))
    pair.ask_p(5, range(40))
    pair.turn()
    assert pair.p.stored == 0


def test_the_link_delays_the_arrival_of_pages():
    pair = Pair(link_s=lambda tokens: tokens / 4)
    pair.ask_d(5, range(8))
    pair.ask_p(5, range(8))
    pair.turn(now_s=1.0)
    assert pair.rooms.next_s == 3.0
    pair.turn(now_s=2.9)
    assert pair.d.side.running == []
    pair.turn(now_s=3.0)
    assert len(pair.d.side.running) == 1


def test_a_decode_engine_waits_for_a_prefill_engine_that_computes_first():
    pair = Pair()
    complete = Pair(
        disaggregation_decode_allocation_policy="prefill_complete", disaggregation_decode_enable_radix_cache=False
    )
    for each, ready in ((pair, "ready"), (complete, "handshake")):
        assert each.ask_d(5, range(8)).polled == ready
    complete.ask_p(5, range(8))
    for _ in range(3):
        complete.turn()
    assert complete.p.said() == [("p", "length", 200)]


def test_a_failed_prefill_leg_is_reported_to_the_decode_engine():
    pair = Pair()
    leg, other = pair.ask_p(5, range(8)), pair.ask_d(5, range(8))
    pair.p.side.abort("p")
    pair.p.turn()
    assert pair.p.said() == [("p", "error", 500)]
    pair.rooms.ended(leg, is_well=False)
    assert other.polled == "failed"


@pytest.mark.parametrize(
    ("fate", "p", "d"), [("fails", "error", "error"), ("handshake", "error", "error"), ("never", None, None)]
)
def test_the_fate_of_a_transfer_decides_how_both_legs_finish(fate, p, d):
    pair = Pair()
    pair.ask_p(5, range(8))
    pair.ask_d(5, range(8), fate=fate)
    for _ in range(3):
        pair.turn()
    assert [finish for _, finish, _ in pair.p.said()] == ([] if p is None else [p])
    assert [finish for _, finish, _ in pair.d.said()] == ([] if d is None else [d])
    assert pair.d.stored == 0


def test_a_lost_bootstrap_server_fails_all_its_rooms():
    pair = Pair()
    legs = [pair.ask_d(room, range(8), f"d{room}") for room in (1, 2)]
    pair.rooms.lose(WHERE)
    late = pair.ask_d(3, range(8), "d3")
    assert [leg.polled for leg in (*legs, late)] == ["failed"] * 3


def test_a_room_is_looked_up_at_the_rank_of_its_number_unless_a_rank_is_given():
    pair = Pair(ranks=2)
    pair.ask_p(5, range(8), rank=0)
    pair.ask_d(5, range(8), "wrong")  # 5 % 2 is rank 1, which does not have the room
    pair.turn()
    assert pair.p.said() == []
    right = pair.ask_d(5, range(8), "right", rank=0)
    pair.turn()
    assert right.polled == "arrived"
    assert pair.rooms.seen == [(0, 5, "prefill"), (1, 5, "decode"), (0, 5, "decode")]


def test_reusing_a_room_with_a_live_leg_fails_the_second_leg_or_crashes_the_engine():
    pair = Pair()
    first = pair.ask_p(5, range(8))
    assert pair.ask_p(5, range(8), "q").polled == "failed"
    assert first.polled == "handshake"
    dead = Pair(reused="dies")
    dead.ask_d(5, range(8))
    with pytest.raises(RoomReused, match=r"room 5 was given to e while another leg has it"):
        dead.ask_d(5, range(8), "e")


def test_a_room_can_be_reused_after_both_legs_have_ended():
    pair = Pair()
    legs = pair.ask_p(5, range(8)), pair.ask_d(5, range(8))
    for leg in legs:
        pair.rooms.ended(leg, is_well=True)
    assert pair.ask_p(5, range(8), "q").polled == "handshake"


# ------------------------------------------------------------------------------------------------ options


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lease": 1}, "'lease' is not an option of a pair"),
        ({"bootstrap_timeout": -1}, "bootstrap_timeout must be"),
        ({"metadata_slots": 0}, "metadata_slots must be an integer of at least 1"),
        ({"disable_overlap_schedule": 1}, "disable_overlap_schedule must be True or False, got 1"),
        ({"disaggregation_decode_allocation_policy": "late"}, "must be 'early' or 'prefill_complete', got 'late'"),
        (
            {
                "disaggregation_decode_allocation_policy": "prefill_complete",
                "disaggregation_decode_enable_radix_cache": True,
            },
            "is refused with disaggregation_decode_enable_radix_cache",
        ),
    ],
)
def test_an_invalid_option_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        SglangPairOptions.of(given)
