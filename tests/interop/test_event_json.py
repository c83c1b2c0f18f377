"""Our reader of Dynamo's JSON against Dynamo's own: any release from 1.2 on.

One difference is known and accepted: serde also reads an object from an array of its fields in order. No writer does
that.
"""

import copy
import json
import random

import pytest
from peer import dynamo_core

from pytest_kvmock import Cleared, KvCacheEvent, Removed, Stored

core = dynamo_core()

U64 = 2**64 - 1


def accepts(text):
    """Return whether Dynamo reads the text. The index may still refuse the event; that does not matter here."""
    try:
        core.RadixTree().apply_event(0, text.encode())
    except (ValueError, RuntimeError) as error:
        return not str(error).startswith("Failed to deserialize KvCacheEvent")
    return True


def we_accept(text):
    try:
        KvCacheEvent.from_json(text)
    except ValueError:
        return False
    return True


def mm_info(rnd):
    return {
        "mm_objects": [{"mm_hash": rnd.getrandbits(64), "offsets": [[0, 1], [5, 9]]} for _ in range(rnd.randrange(3))]
    }


def valid(rnd):
    """Return a document that both read."""
    kind = rnd.randrange(3)
    if kind == 0:
        count = rnd.randrange(4)
        infos = tuple(rnd.choice([None, mm_info(rnd)]) for _ in range(count))
        data = Stored(
            rnd.choice([None, 0, U64]),
            tuple(rnd.getrandbits(64) for _ in range(count)),
            tuple(rnd.getrandbits(64) for _ in range(count)),
            rnd.choice([None, 0, 2**32 - 1]),
            rnd.choice([None, infos]),
        )
    elif kind == 1:
        data = Removed(tuple(rnd.getrandbits(64) for _ in range(rnd.randrange(4))))
    else:
        data = Cleared()
    return KvCacheEvent(rnd.choice([0, 1, U64]), data, rnd.choice([0, 1, 2**32 - 1])).to_dict()


VALUES = [
    None,
    -1,
    0,
    1,
    2**32 - 1,
    2**32,
    2**63,
    U64,
    U64 + 1,
    0.0,
    1.5,
    1e30,
    "",
    "1",
    "cleared",
    True,
    {},
    float("nan"),
]
KEYS = ["event_id", "data", "dp_rank", "parent_hash", "blocks", "stored", "removed", "block_hash", "tokens_hash", "x"]


def places(value):
    """Yield every `(container, key)` in a document."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(entries):
        yield value, key
        yield from places(inner)


def corrupt(rnd, document):
    """Change one or two things, each of which may or may not matter."""
    for _ in range(rnd.randint(1, 2)):
        container, key = rnd.choice(list(places(document)) or [(document, "x")])
        kind = rnd.randrange(4)
        if kind == 0 and isinstance(container, dict):
            container.pop(key, None)
        elif kind == 1 and isinstance(container, dict):
            container[rnd.choice(KEYS)] = rnd.choice(VALUES)
        elif kind == 2 and isinstance(container, dict) and key in container:
            container[key.upper()] = container.pop(key)
        else:
            container[key] = rnd.choice(VALUES)
    return document


@pytest.mark.parametrize("seed", range(10))
def test_the_real_deserializer_reads_what_we_write(seed):
    rnd = random.Random(seed)
    texts = [json.dumps(valid(rnd)) for _ in range(100)]
    assert [text for text in texts if not accepts(text)] == []


@pytest.mark.parametrize("seed", range(10))
def test_a_corrupted_document_is_read_by_both_or_by_neither(seed):
    rnd = random.Random(seed)
    verdicts = set()
    for _ in range(200):
        text = json.dumps(corrupt(rnd, copy.deepcopy(valid(rnd))))
        verdict = accepts(text)
        verdicts.add(verdict)
        assert verdict == we_accept(text), text
    assert verdicts == {True, False}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        '{"event_id":0,"data":"cleared"} x',
        ' {"event_id":0,"data":"cleared"}\n',
        '\ufeff{"event_id":0,"data":"cleared"}',
        '{"event_id":0,"event_id":1,"data":"cleared"}',
        '{"event_id":0,"data":"cleared","data":"cleared"}',
        '{"event_id":0,"data":"cleared","x":1,"x":2}',
        '{"event_id":0,"data":"cleared","x":NaN}',
        '{"event_id":1e0,"data":"cleared"}',
        '{"event_id":0,"data":{"cleared":null}}',
        '{"event_id":0,"data":{"cleared":{}}}',
        '{"event_id":0,"data":{"removed":{"block_hashes":[]},"cleared":null}}',
        '{"event_id":0,"data":{"stored":{"blocks":[{"block_hash":1,"block_hash":2,"tokens_hash":3}]}}}',
        '{"event_id":0,"data":{"Stored":{"blocks":[]}}}',
        '{"event_id":0,"data":"cleared","dp_rank":null}',
        "[" * 3000,
    ],
)
def test_odd_text_is_read_by_both_or_by_neither(text):
    assert accepts(text) == we_accept(text)


def test_a_negative_hash_is_refused_by_both():
    text = '{"event_id":0,"data":{"removed":{"block_hashes":[-7]}},"dp_rank":0}'
    assert (accepts(text), we_accept(text)) == (False, False)
