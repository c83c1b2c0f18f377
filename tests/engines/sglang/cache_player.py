"""Play the operations common to all recordings of SGLang's caches, as its scheduler calls a cache."""

import json
import zlib
from random import Random

from players import first_of, in_lines, name_of, unlike

from pytest_kvmock import Prompt, Removed, Stored


class CachePlayer:
    """Plays the operations of one program.

    Attributes:
        names: the number of each page in the recording, by its name in events.
        requests: the running requests, by name.
        waiting: the requests that wait for their storage, by name.
        as_rows: whether a recorded tree consists of its rows, instead of their CRC.
    """

    as_rows = False

    def __init__(self, program):
        self.size = program["page_size"]
        self.names = {name: number for number, name in enumerate(program["names"])}
        self.requests, self.waiting = {}, {}
        self.rng = Random(0)
        self.manager = self.make_manager(program)

    def make_manager(self, program):
        """Return the cache of a program."""
        raise NotImplementedError

    def add(self, request, limit, held):
        """Try to admit a request and compute at most `limit` of its tokens at once; 0: all.

        `held` counts the pages, pages of windows, and slots that the batch has taken so far. Returns the
        answer, the token up to which the request is computed, and what it takes, in the form of `held`.
        """
        raise NotImplementedError

    def sizes(self):
        """Return the free, evictable and protected sizes in the form of the recordings."""
        raise NotImplementedError

    def row(self, node):
        """Return a node of the tree in the form of the recordings."""
        raise NotImplementedError

    def tokens(self, node):
        """Return the tokens of a node, page by page; children are sorted by them."""
        raise NotImplementedError

    def answer(self, number, step):
        """Return the answer of our cache to a step, with the fields of the recordings."""
        raise NotImplementedError

    # ---------------------------------------------------------------------------------------------- operations

    def play(self, operation):
        kind, *arguments = operation
        return getattr(self, f"play_{kind}")(*arguments)

    def request(self, tokens):
        return self.manager.request(Prompt(tokens), self.rng)

    def play_new(self):
        return {}

    def play_reset(self):
        return {"ok": not self.waiting and self.manager.clear()}

    def play_evict(self, *units):
        return {"evicted": [*self.manager.evict(*units)]}

    def play_add(self, batch):
        answers, admitted, held = [], [], (0, 0, 0)
        for name, tokens, limit in batch:
            request = self.waiting.get(name) or self.request(tokens)
            answer, upto, needs = self.add(request, limit, held)
            answers.append(answer)
            if answer["ok"]:
                held = tuple(map(sum, zip(held, needs, strict=True)))
                self.waiting.pop(name, None)
                self.requests[name] = request
                admitted.append((request, upto))
        if admitted:
            self.compute(admitted)
        return {"reqs": answers}

    def cut(self, start, end, limit):
        return start + limit // self.size * self.size if limit and end - start > limit else end

    def compute(self, admitted):
        self.manager.prefill(admitted)
        for request, _ in admitted:
            self.checkpoint(request)
        self.end_pass()

    def checkpoint(self, request):
        self.manager.checkpoint(request)

    def end_pass(self):
        """Do what follows a pass of the model."""

    def play_chunk(self, name, limit):
        request = self.requests[name]
        upto = self.cut(request.computed, len(request), limit)
        if self.manager.lacking(request, upto):
            return {"ok": False}
        self.compute([(request, upto)])
        return {"ok": True}

    def play_decode(self, names, rows):
        return {"done": self.steps(names, rows, self.manager.begin_step, self.manager.end_step)}

    def play_verify(self, names, rows):
        done = self.steps(names, rows, self.manager.begin_verify, self.manager.end_verify)
        lengths = [[each.computed, self.manager.slots(each)] for each in map(self.requests.get, names)]
        return {"done": done, "lengths": lengths}

    def steps(self, names, rows, begin, end):
        """Make a step for each row while there is room; returns the number of steps."""
        requests = [self.requests[name] for name in names]
        done = 0
        for row in rows:
            if not begin(requests):
                break
            for request, given in zip(requests, row, strict=True):
                end(request, given)
            done += 1
        self.end_pass()
        return done

    def play_finish(self, name, outputs=None):
        self.manager.finish(self.requests.pop(name), outputs)
        self.end_pass()
        return {}

    def play_retract(self, name):
        self.manager.retract(self.requests.pop(name))
        return {}

    # -------------------------------------------------------------------------------------------------- answers

    def events(self):
        return [self.row_of(event) for event in self.manager.take_events()]

    def row_of(self, event):
        """Return an event in the form of the recordings."""
        data = event.data
        if isinstance(data, Stored):
            parent = None if data.parent_hash is None else self.names.get(data.parent_hash)
            return ["S", parent, self.numbers(data.block_hashes), sum(map(len, event.token_ids)), self.size]
        return ["R", self.numbers(data.block_hashes)] if isinstance(data, Removed) else ["C"]

    def numbers(self, names):
        return [self.names.get(name, name) for name in names]

    def tree(self):
        rows = self.shape(self.manager._tree.root)
        return rows if self.as_rows else zlib.crc32(json.dumps(rows, separators=(",", ":")).encode())

    def shape(self, node):
        return [self.row(child) for child in sorted(node.children.values(), key=self.tokens)]

    # ---------------------------------------------------------------------------------------------- differences

    @classmethod
    def differences(cls, program):
        """Play a program; yield the number of each step that differs, with its fields: name, recorded, ours."""
        player = cls(program)
        for number, step in enumerate(program["steps"]):
            try:
                wrong = unlike(step, {"op": step["op"], **player.answer(number, step)})
            except Exception as error:  # noqa: BLE001 - a program that cannot be played counts as different
                yield number, [("error", None, repr(error))]
                return
            if wrong:
                yield number, wrong

    @classmethod
    def played(cls, programs):
        """Yield each program's name with the differences in its first different steps, or None."""
        for program in programs:
            texts = (
                in_lines(f"step {number} {program['steps'][number]['op'][0]}:", rows)
                for number, rows in cls.differences(program)
            )
            yield f"{program['kind']} {name_of(program)}", first_of(texts)
