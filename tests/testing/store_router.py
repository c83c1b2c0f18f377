"""The plain router of the examples with an index of a store that the first two workers share, as a process:
python store_router.py DESIGN 16 URL=EVENTS+REPLAY...

Each design is a function here; its docstring names its bug, or says "No mistake".
"""

import asyncio
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "router_process"))

import plain_router
from aiohttp import web
from plain_router import Cache, Router, Worker

DESIGNS = {}
MEDIA = {"STORAGE"}  # media of the store
WORTH = 0.5  # value of a block in the store, compared with one on a device


def design(change):
    DESIGNS[change.__name__] = change
    return change


class Store:
    """The store according to event streams."""

    def __init__(self):
        self.caches = []  # caches of its workers
        self.all_caches = []
        self.missed = set()

    def blocks_of(self, cache):
        """Return the prefixes that the worker of a cache can load."""
        if cache not in self.caches:
            return set()
        return set().union(*(each.stored for each in self.caches)) - self.missed


store = Store()
names_of = {}  # prefixes by the engine's name of a block, from any publisher


def prefixes(root, tokens, size):
    for at in range(0, len(tokens) - size + 1, size):
        root = hash((root, tuple(tokens[at : at + size])))
        yield root


def promised(worker, root, tokens):
    """Return the number of blocks of a prompt that a worker can load from the store after those on its device."""
    cache = worker.ranks[0].cache
    held, there = cache.overlap(root, tokens), store.blocks_of(cache)
    count = 0
    for each in [*prefixes(root, tokens, cache.block_size)][held:]:
        if each not in there:
            break
        count += 1
    return count


@design
def counts_a_store():
    """No mistake: all workers of the store can load the blocks that any of them has announced."""
    apply, clear, overlap, use, blocks = Cache.apply, Cache.clear, Worker.overlap, Router.use, Router.blocks

    def cleared(self):
        clear(self)
        self.stored = getattr(self, "stored", set())

    def applied(self, event):
        size = self.block_size
        if event["type"] == "BlockStored" and event.get("token_ids"):
            parent, tokens = event["parent_block_hash"], event["token_ids"]
            prefix = self.root(event) if parent is None else names_of.get(parent)
            for at, block in enumerate(event["block_hashes"] if prefix is not None else ()):
                names_of[block] = prefix = hash((prefix, tuple(tokens[at * size : (at + 1) * size])))
        if event.get("medium") in MEDIA:
            self.stored.update(names_of[block] for block in event["block_hashes"] if block in names_of)
        apply(self, event)

    def used(self, sources):
        use(self, sources)
        store.all_caches = [worker.ranks[0].cache for worker in self.workers.values()]
        store.caches = store.all_caches[:2]

    def with_store(self, root, tokens):
        held, rank = overlap(self, root, tokens)
        return held + WORTH * promised(self, root, tokens), rank

    async def by_owner(self, request):
        body = await request.json()
        if not body.get("by_owner"):
            return await blocks(self, request)
        root, tokens = self.asked(body)
        return web.json_response([promised(worker, root, tokens) for worker in self.workers.values()])

    Cache.clear, Cache.apply, Worker.overlap = cleared, applied, with_store
    Router.use, Router.blocks = used, by_owner


@design
def leaves_stores_out():
    """No mistake: blocks of a store count for nothing."""
    counts_a_store()
    store.blocks_of = lambda cache: set()


@design
def lowers_after_a_miss():
    """No mistake: blocks that were promised and not reused are promised to no worker again."""
    counts_a_store()
    complete = Router.complete

    async def completes(self, request):
        data = await request.json()
        root, tokens = self.asked(data)
        request["asked"] = {*prefixes(root, tokens, self.block_size)}
        return await complete(self, request)

    async def reads(self, request, upstream):
        body = await upstream.json()
        found = body["usage"]["prompt_tokens_details"]["cached_tokens"]
        there = set().union(*(each.stored for each in store.caches))
        if not found:
            store.missed.update(request["asked"] & there)
        return web.json_response(body)

    Router.complete, Router.passed_on = completes, reads


@design
def credits_the_publisher():
    """Credits a block of a store to its publisher."""
    counts_a_store()
    store.blocks_of = lambda cache: cache.stored


@design
def credits_all():
    """All workers can load from a store."""
    counts_a_store()
    store.blocks_of = lambda cache: set().union(*(each.stored for each in store.all_caches))


@design
def takes_a_store_for_the_device():
    """Takes an unknown medium for the device."""
    counts_a_store()
    apply = Cache.apply

    def on_device(self, event):
        apply(self, {**event, "medium": "GPU"} if event.get("medium") in MEDIA else event)

    Cache.apply = on_device


@design
def counts_mooncake():
    """No mistake: the store is Mooncake's, whose medium is `cpu` in lower case."""
    MEDIA.add("cpu")
    counts_a_store()


@design
def takes_mooncake_for_the_device():
    """Takes an unknown medium for the device."""
    MEDIA.add("cpu")
    takes_a_store_for_the_device()


@design
def clears_a_store_with_a_worker():
    """Clears the announced blocks of a worker when the worker is cleared."""
    counts_a_store()
    clear = Cache.clear

    def all_of_it(self):
        clear(self)
        self.stored = set()

    Cache.clear = all_of_it


@design
def jumps_holes():
    """Promises a whole prompt if the store has one block of it."""
    counts_a_store()

    def whole(worker, root, tokens):
        cache = worker.ranks[0].cache
        found = [*prefixes(root, tokens, cache.block_size)]
        there = store.blocks_of(cache).intersection(found)
        return len(found) - cache.overlap(root, tokens) + 1 if there else 0

    globals()["promised"] = whole


if __name__ == "__main__":
    name, size, *sources = sys.argv[1:]
    DESIGNS[name]()
    asyncio.run(plain_router.main(Router(int(size)), sources))
