"""A reader of the vectors of hybrid models, for a port to any language: it counts the blocks of the attention group."""

import json
from collections import Counter
from pathlib import Path

import msgspec

ATTENTION = ("full_attention", "mla_attention")


class Worker:
    """The blocks of one worker."""

    def __init__(self, block_size):
        self.size, self.group = block_size, None  # the number of its attention group
        self.prefix = {}  # by block name: all tokens of the prompt up to the end of the block
        self.copies = Counter()  # by these tokens, in the attention group only

    def apply(self, event):
        if event["type"] == "BlockStored":
            if event["kv_cache_spec_kind"] not in ATTENTION or event["block_size"] != self.size:
                return  # another group, or a prompt's tail
            self.group = event["group_idx"]
            prefix = self.prefix.get(event["parent_block_hash"], ())
            for number, name in enumerate(event["block_hashes"]):
                prefix += tuple(event["token_ids"][number * self.size : (number + 1) * self.size])
                self.prefix[name] = prefix
                self.copies[prefix] += 1
        elif event["type"] == "BlockRemoved":
            if event["group_idx"] == self.group:
                self.copies.subtract(self.prefix[name] for name in event["block_hashes"] if name in self.prefix)
        else:
            self.copies.clear()  # AllBlocksCleared is about all groups

    def blocks(self, tokens):
        ends = range(self.size, len(tokens) + 1, self.size)
        return next((n for n, end in enumerate(ends) if self.copies[tuple(tokens[:end])] < 1), len(ends))


def wrong_answers(folder, block_size):
    folder, wrong = Path(folder), []
    batches = [json.loads(line) for line in (folder / "batches.jsonl").read_text(encoding="utf-8").splitlines()]
    queries = [json.loads(line) for line in (folder / "queries.jsonl").read_text(encoding="utf-8").splitlines()]
    workers = {worker: Worker(block_size) for worker in ("0", "1")}
    for number, batch in enumerate(batches, 1):
        payload = (folder / batch["file"]).read_bytes()[batch["offset"] : batch["offset"] + batch["size"]]
        for event in msgspec.msgpack.decode(payload)[1]:
            workers[str(batch["worker"])].apply(event)
        for query in queries:
            for worker, index in workers.items() if query["after"] == number else ():
                least, most = query["reusable"].get(worker, 0) // block_size, query["overlap"].get(worker, 0)
                if not least <= index.blocks(query["tokens"]) <= most:
                    wrong.append((query["after"], worker))
    return wrong
