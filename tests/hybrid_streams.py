"""Recorded streams of vLLM's hybrid models and of its offloading: the bytes of each step, and the lookups.

A recording of a hybrid model has only the first token id of a Stored and their number. The ids are those of the
request, from the place where the hash of the tokens before them is the parent.
"""

import gzip
import json
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import msgspec

from pytest_kvmock.engines import VllmHasher
from pytest_kvmock.engines.vllm.hashes import ExtraKeys

DENSE = ("full_attention", "mla_attention")
DEFAULTS = ("extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window")
"""Fields of these recordings that a map omits if they are None; later fields are omitted in the same way."""


@dataclass
class Prompt:
    """The tokens of a request so far, and the salt of its tenant."""

    tokens: list
    salt: str | None = None

    def names(self, unit):
        """Return the name of each prefix of whole units, by its number of units."""
        hasher = VllmHasher(keys=None if self.salt is None else ExtraKeys(cache_salt=self.salt))
        return dict(enumerate(map(hasher.name, hasher.digests(self.tokens, unit, 0, None)), 1))


@dataclass
class Look:
    """A lookup of a prompt after all events before it, and how many tokens the engine would reuse."""

    prompt: Prompt
    computed_tokens: int


@dataclass
class Stream:
    """One program: its groups, and batches (lists of events as maps of the wire) and lookups in their order."""

    name: str
    groups: list
    kinds: list
    unit: int
    alignment: int
    num_blocks: int
    parts: list = field(default_factory=list)

    @property
    def attention(self):
        """The number of the attention group, and its block size; None and None without one."""
        found = ((i, self.groups[i]["block_size"]) for i, (kind, _) in enumerate(self.kinds) if kind in DENSE)
        return next(found, (None, None))

    @property
    def batches(self):
        return [part for part in self.parts if isinstance(part, list)]


def read(path):
    return json.loads(gzip.decompress(Path(path).read_bytes()))


def hybrid_streams(path_or_programs):
    """Return the streams of a recording of hybrid models."""
    programs = path_or_programs if isinstance(path_or_programs, list) else read(path_or_programs)
    return [hybrid_stream(program) for program in programs]


def hybrid_stream(program):
    facts = program["facts"]
    stream = Stream(
        f"{program['geometry']} {program['seed']}",
        program["groups"],
        facts["kinds"],
        facts["hash_block_size"],
        facts["hit_alignment"],
        program["num_blocks"],
        [[]],
    )
    prompts = {}
    for step in program["steps"]:
        op, *arguments = step["op"]
        if op == "step":
            stream.parts.append([])
        elif op == "new":
            prompts[arguments[0]] = Prompt([*runs(arguments[1])], arguments[2])
        elif op == "look":
            stream.parts += [Look(Prompt([*runs(arguments[0])], arguments[1]), step["computed_tokens"]), []]
        elif op == "out" and arguments[2] is not None:
            prompts[arguments[0]].tokens.append(arguments[2])
        request = prompts.get(arguments[0]) if op in ("admit", "run", "out") else None
        if op == "admit":
            look = Look(Prompt(request.tokens.copy(), request.salt), step["computed_tokens"])
            stream.parts += [look, []]
        stream.parts[-1] += [wire_event(stream, event, request) for event in step["events"]]
    stream.parts = [part for part in stream.parts if part != []]
    return stream


def runs(runs):
    return chain.from_iterable(range(first, first + count) for first, count in runs)


def wire_event(stream, event, prompt):
    """Return an event as on the wire; its parent determines the place of its token ids in the prompt."""
    if event[0] == "C":
        return {"type": "AllBlocksCleared"}
    if event[0] == "R":
        return {"type": "BlockRemoved", "block_hashes": event[2], "medium": "GPU", "group_idx": event[1]}
    _, group, parent, hashes, size, count, first, *keys = event
    names = prompt.names(stream.unit)
    start = 0 if parent is None else next(n for n, name in names.items() if name == parent) * stream.unit
    tokens = prompt.tokens[start : start + count]
    assert (count, first) == (len(tokens), tokens[0])
    ends = [names[end // stream.unit] for end in range(start + size, start + count + 1, size)]
    assert [*hashes] == [name for name in ends if name in hashes]  # in order, and each at the end of a block
    kind, window = stream.kinds[group]
    stored = {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": size,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": keys[0] if keys else [None] * len(hashes) or None,
        "group_idx": group,
        "kv_cache_spec_kind": kind,
        "kv_cache_spec_sliding_window": window,
    }
    return written(stored)


def written(event):
    """Return an event without the fields that a map omits."""
    always = ("type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name")
    return {key: value for key, value in event.items() if key in always or value is not None}


def offload_streams(path_or_value):
    """Yield the name and the batches of each program of a recording of offloading; a batch is a list of wire events."""
    value = path_or_value if isinstance(path_or_value, (list, dict)) else read(path_or_value)
    programs = value if isinstance(value, list) else [*value["programs"], *value.get("scenarios", ())]
    for number, program in enumerate(programs):
        steps = [entry[1].get("events", []) for entry in program["log"] if entry[0] == "step"]
        fields = {} if isinstance(value, list) else value["fields"]
        batches = [[written(named(event, fields)) for event in events] for events in steps if events]
        yield program.get("name", f"program {number}"), batches


def named(event, fields):
    if isinstance(event, dict):
        return event
    tag = {"S": "BlockStored", "R": "BlockRemoved", "C": "AllBlocksCleared"}[event[0]]
    return {"type": tag, **dict(zip(fields[tag], event[1:], strict=True))}


def payload(events, dialect="vllm-0.33"):
    """Return a batch as vLLM writes it: events as maps, or as arrays with every field of the dialect."""
    from pytest_kvmock.wire import DIALECTS
    from pytest_kvmock.wire.codec.structs import structs_of

    structs = structs_of(DIALECTS[dialect])
    kinds = {tag: kind for kind, tag in structs.tags.items()}
    made = []
    for event in events:
        kind = kinds[event["type"]]
        made.append(kind(**{key: event.get(key) for key in kind.__struct_fields__}))
    return msgspec.msgpack.encode((1.5, made, 0))
