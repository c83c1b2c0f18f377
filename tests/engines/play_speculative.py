"""Play recorded programs of engines with a draft model on our managers; print the differences by program and step.

    python tests/engines/play_speculative.py FILE...

The files are those of vLLM and of SGLang. The last line is "N of M programs equal"; the exit status is 1 if any
differs.
"""

import json
import sys
from pathlib import Path
from zlib import crc32

sys.path.insert(0, str(Path(__file__).parent.parent))

import players

VLLM = players.player("engines/vllm/play_hybrid.py")
SGLANG = players.player("engines/sglang/play_hybrid.py")


class VllmPlayer(VLLM.Player):
    """A replayed manager of vLLM with a draft model."""

    def __init__(self, program):
        super().__init__(program)
        self.outputs = {}

    def facts(self):
        draft = self.manager.speculative
        return super().facts() | {
            "draft_tokens": draft.tokens,
            "lookahead_slots": draft.slots,
            "prefill_lookahead": draft.chunk_lookahead,
            "hash_lookahead": draft.lookahead,
            "drop": draft.drops,
            "input_slots": draft.input_slots,
        }

    def do_new(self, name, runs, salt, max_tokens):
        super().do_new(name, runs, salt)
        self.outputs[name] = max_tokens

    def do_admit(self, name, asked, padded=0):
        manager, request = self.manager, self.requests[name]
        hits = manager.get_computed_blocks(request)
        request.drafts.proposed = padded
        tokens = manager.chunk_tokens(request, min(len(request) + padded - hits.num_tokens, asked), hits)
        if padded and tokens < 1 + padded:
            tokens = min(tokens, 1)
        found = [[len(blocks), sum(map(bool, blocks))] for blocks in hits.blocks]
        ok = bool(tokens) and manager.allocate_slots(request, tokens, hits, full_sequence_must_fit=True) is not None
        if ok:
            request.drafts.scheduled(request, tokens)
        else:
            request.drafts.forget()
        return {
            "computed_tokens": hits.num_tokens,
            "junction": hits.junction,
            "found": found,
            "tokens": tokens,
            "ok": ok,
        }

    def do_run(self, name, asked):
        manager, request = self.manager, self.requests[name]
        wanted = request.drafts.wanted(request)
        tokens = manager.chunk_tokens(request, min(wanted, asked))
        ok = not tokens or manager.allocate_slots(request, tokens) is not None
        if ok and tokens:
            request.drafts.scheduled(request, tokens)
        return {"tokens": tokens, "ok": ok, "want": wanted}

    def do_draft(self, name, count):
        self.requests[name].drafts.proposed = count

    def do_promise(self, names):
        for name in names:
            self.requests[name].drafts.assume(self.manager.speculative.tokens)

    def do_out(self, name, tokens, sampled, stale):
        request = self.requests[name]
        self.outputs[name] -= self.manager.take_output(request, tokens, sampled, room=self.outputs[name], stale=stale)
        if sampled is None:
            return None
        return {
            "computed": request.num_computed_tokens,
            "promised": request.drafts.placeholders,
            "flying": request.num_in_flight_tokens,
        }

    def do_preempt(self, name):
        self.manager.free(self.requests[name])

    def do_free(self, name):
        self.manager.free(self.requests[name])

    def beside(self, extra):
        """Return its keys, or None, and the look-ahead tokens of names that look ahead."""
        ahead = extra.get("lookahead_token_ids")
        return [*(super().beside(extra) or [None]), *([] if ahead is None else [ahead])]


def vllm_difference(program):
    """Return the first difference of a program of vLLM as text, or None."""
    return VLLM.difference(program, VllmPlayer)


class SglangPlayer(SGLANG.Player):
    """A replayed cache of SGLang with speculative decoding."""

    def __init__(self, program):
        super().__init__(program)
        manager = self.manager
        assert program["bigrams"] == manager.hasher.is_eagle
        assert program["reserve"] == manager.speculative.ahead(self.size)

    def row_of(self, event):
        row = super().row_of(event)
        if row[0] == "S":
            units = [unit for page in event.token_ids for unit in page]
            packed = json.dumps(units, separators=(",", ":")).encode()
            row.append([list(units[0]) if isinstance(units[0], tuple) else units[0], crc32(packed)])
        return row


def played(programs):
    """Yield each program's name with its difference, or None; programs of SGLang have no geometry."""
    if "geometry" in programs[0]:
        return VLLM.played(programs, vllm_difference)
    return SglangPlayer.played(programs)


def main(paths):
    return players.main(paths, played)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
