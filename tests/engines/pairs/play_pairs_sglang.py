"""Play recorded programs of SGLang's prefill and decode engines on ours: answers, queues, events, sizes and the shape
of the tree.

    python tests/engines/pairs/play_pairs_sglang.py FILE...

The queues and the cache are those of the package (`SglangPrefill`, `SglangDecode`). This program models what the
recording made up: the operations give the ends of handshakes and transfers, and the recorder's rule in
`PrefillPlayer.batch` chooses the prompts of a batch of P within its token budget.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import players

from pytest_kvmock import Prompt
from pytest_kvmock.engines.sglang.pairs.sglang_decode import SglangDecode
from pytest_kvmock.engines.sglang.pairs.sglang_legs import DecodeLeg, PrefillLeg
from pytest_kvmock.engines.sglang.pairs.sglang_options import SglangPairOptions
from pytest_kvmock.engines.sglang.pairs.sglang_prefill import PrefillPiece, SglangPrefill

play_hybrid = players.player("engines/sglang/play_hybrid.py")


class PairPlayer(play_hybrid.Player):
    """The common base of both players."""

    def row_of(self, event):
        """Return an event in the form of README_prefill_decode.md: a Stored has its first token."""
        row = super().row_of(event)
        return [*row, event.token_ids[0][0]] if row[0] == "S" else row


class PrefillPlayer(PairPlayer):
    """Plays the program of a prefill engine."""

    def __init__(self, program):
        super().__init__(program)
        self.budget, self.legs, self.stuck = program["budget"], {}, None
        options = SglangPairOptions(
            optimistic_prefill_attempts=program["optimistic"],
            disaggregation_decode_allocation_policy=program["policy_alloc"],
            disable_overlap_schedule=not program["overlap"],
            metadata_slots=program["buffers"],
        )
        self.side = SglangPrefill(self.manager, rows=program["max_live"], options=options)

    def play_ask(self, name, tokens, room, token):
        leg = self.legs[name] = PrefillLeg(name, room, self.manager.request(Prompt(tokens), self.rng))
        return {"ok": self.side.ask(leg), **self.said()}

    def play_shake(self, name, prefix):
        leg = self.legs[name]
        if prefix < 0:
            leg.fail()
        else:
            leg.shake(prefix)
        return {}

    def play_arrive(self, name, ok):
        leg = self.legs[name]
        if ok:
            leg.arrive()
        else:
            leg.fail()
        return {}

    def play_abort(self, name):
        self.side.abort(name)
        return {**self.said(), "status": self.status()}

    def play_step(self):
        side = self.side
        side.begin_turn()
        batch = self.batch()
        side.launch(batch)
        side.end_turn()
        pieces = [[piece.leg.name, piece.start, piece.upto] for piece in batch]
        sent = [[each.leg.name, each.pages, each.tokens] for each in side.take_sent()]
        return without_empty(batch=pieces, sent=sent) | self.said() | {"status": self.status()}

    def batch(self):
        """Choose a batch by the recorder's rule: in order, while tokens, rows and pool blocks are left.

        A prompt between chunks that once found no room is not tried again, and neither is any prompt behind it
        (program 1075).
        """
        side, manager, size = self.side, self.manager, self.size
        batch, left, rows, pages = [], self.budget, side.free_rows, 0
        for leg in side.candidates():
            request = leg.request
            if not left or not (rows or leg.has_row):
                break
            is_new = request not in manager.requests
            if is_new:
                manager.find(request)
                manager.admit(request)
            start, end = request.computed, leg.prompt_tokens
            upto = end if end - start <= left else start + left // size * size
            if leg is self.stuck or upto == start or manager.lacking(request, upto, pages):
                if is_new:
                    manager.withdraw(request)
                else:
                    self.stuck = leg
                break
            pages += manager.pages_of(upto) - request.allocated
            rows -= not leg.has_row
            left -= upto - start
            batch.append(PrefillPiece(leg, start, upto))
            if upto < end:
                break
        return batch

    def status(self):
        side = self.side
        queues = {name: [leg.name for leg in getattr(side, name)] for name in ("boot", "waiting", "inflight")}
        return without_empty(**queues, chunked=side.chunked and side.chunked.name)

    def said(self):
        return without_empty(said=[[each.name, each.finish] for each in self.side.take_answers()])


class DecodePlayer(PairPlayer):
    """Plays the program of a decode engine with a radix cache."""

    def __init__(self, program):
        super().__init__(program)
        self.legs = {}
        options = SglangPairOptions(
            disaggregation_decode_enable_radix_cache=True,
            num_reserved_decode_tokens=program["reserved"],
        )
        self.side = SglangDecode(self.manager, places=program["max_live"], options=options)

    def play_ask(self, name, tokens, max_new, room):
        leg = self.legs[name] = DecodeLeg(name, room, self.manager.request(Prompt(tokens), self.rng), max_new)
        return {"ok": self.side.ask(leg), **self.said()}

    def play_shake(self, name, ok):
        leg = self.legs[name]
        if ok:
            leg.shake()
        else:
            leg.fail()
        return {}

    def play_reserve(self):
        taken = self.side.reserve()
        got = [[leg.name, leg.hit_tokens, leg.asked_pages] for leg in taken]
        said = self.said()
        queue = [leg.name for leg in self.side.queue]
        return without_empty(got=got, failed=said.get("said"), queue=queue) | said

    def play_arrive(self, name, how, token):
        leg = self.legs[name]
        if how == "failed":
            leg.fail()
        else:
            leg.arrive(token, leg.room if how == "ok" else leg.room + 1)
        return {}

    def play_poll(self):
        got = [leg.name for leg in self.side.poll()]
        said = self.said()
        return without_empty(got=got, lost=said.get("said")) | said

    def play_batch(self):
        joined = self.side.join()
        over = [leg.name for leg in joined if leg.name not in {each.name for each in self.side.running}]
        self.said()
        return without_empty(joined=[leg.name for leg in joined], over=over)

    def play_decode(self, names, rows):
        legs, done = [self.legs[name] for name in names], 0
        for row in rows:
            if not self.side.decode(legs, row):
                break
            done += 1
        return {"done": done}

    def play_finish(self, name):
        self.side.finish(self.legs[name])
        self.said()
        return {}

    def said(self):
        return without_empty(said=[each.name for each in self.side.take_answers()])


def without_empty(**fields):
    """Return the fields that are not empty, as in the recordings."""
    return {name: value for name, value in fields.items() if value}


def player_of(program):
    """Return the player class of a program; programs of P have a token budget."""
    return PrefillPlayer if "budget" in program else DecodePlayer


def play(program):
    """Play one program up to its first step that differs; return one string per field that differs."""
    for number, wrong in player_of(program).differences(program):
        return [
            f"step {number} {program['steps'][number]['op'][0]}: {name}: {was} != {ours}" for name, was, ours in wrong
        ]
    return []


def played(programs):
    """Yield each program's name with its differences, or None."""
    for program in programs:
        yield program["seed"], "; ".join(play(program)) or None


def main(paths):
    return players.main(paths, played)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
