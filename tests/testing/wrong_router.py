"""The plain router of the examples with one bug, as a process: python wrong_router.py BUG+BUG 16
URL=EVENTS+REPLAY...

Each bug is a function here that changes the router; its docstring describes the bug. Some functions are variants that
right routers may have; their docstrings say "No mistake".
"""

import asyncio
import json
import sys
from collections import Counter, defaultdict
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "router_process"))

import plain_router
from aiohttp import ClientConnectionError, ClientError, ClientTimeout, TCPConnector, web
from plain_router import Cache, Rank, Router, Worker, kept

from pytest_kvmock.wire import DIALECTS

plain_router.REPLAY_S = 0.8  # contracts give a wrong one 2 s

BUGS = {}
LATE_S = 0.02  # delay after which a batch is applied
REST_S = 0.3  # time for which a worker that refused a connection gets no request


def bug(change):
    BUGS[change.__name__] = change
    return change


# ------------------------------------------------------------------------------------------------------------- events


@bug
def hears_one_worker():
    """Reads the events of other workers and ignores them."""
    apply = Rank.apply
    first = []

    def deaf(self, number, batch):
        first.append(self) if not first else None
        if self is first[0]:
            apply(self, number, batch)

    Rank.apply = deaf


@bug
def subscribes_to_one_worker():
    """Subscribes only to the first worker."""
    use = Router.use

    def first_alone(self, sources):
        use(self, sources)
        for source in sources[1:]:
            for task in self.following[source]:
                task.cancel()

    Router.use = first_alone


@bug
def joins_without_a_replay():
    """Does not ask for batches published before its subscription."""
    follow, replay = Rank.follow, Rank.replay

    async def none(self):
        self.replay = partial(replay, self)

    async def late(self):
        self.replay = partial(none, self)
        await follow(self)

    Rank.follow = late


@bug
def ignores_gaps():
    """Does not ask for missing batches; blocks that continue them have no parent."""

    async def receive(self, number, payload):
        self.apply(number, self.decoded(payload))

    Rank.receive = receive


@bug
def drops_what_is_late():
    """Loses a skipped batch for good."""

    async def receive(self, number, payload):
        if number >= self.next:
            self.apply(number, self.decoded(payload))

    Rank.receive = receive


@bug
def takes_a_double_for_a_restart():
    """Empties the worker at a repeated number, whatever its time."""
    receive = Rank.receive

    async def forgets(self, number, payload):
        if number < self.next:
            self.cache.clear()
            self.apply(number, self.decoded(payload))
        else:
            await receive(self, number, payload)

    Rank.receive = forgets


@bug
def applies_doubles():
    """Applies a repeated batch twice."""
    receive = Rank.receive

    async def twice(self, number, payload):
        batch = self.decoded(payload)
        if batch is not None and number < self.next and batch[0] <= self.time:
            for event in batch[1]:
                self.cache.apply(event)
        else:
            await receive(self, number, payload)

    Rank.receive = twice


@bug
def dies_of_a_corrupt_batch():
    """Stops reading events at a corrupt batch."""

    def decoded(self, payload):
        return plain_router.msgspec.msgpack.decode(payload)

    Rank.decoded = decoded


@bug
def skips_a_corrupt_batch():
    """Does not ask for a corrupt batch again."""
    receive = Rank.receive

    async def skips(self, number, payload):
        if self.decoded(payload) is None:
            self.next = number + 1
        else:
            await receive(self, number, payload)

    Rank.receive = skips


@bug
def refuses_unknown_fields():
    """Stops reading events at the first unknown field."""
    apply = Cache.apply

    def strict(self, event):
        if "kvmock_field" in event:
            raise ValueError("unknown field")
        apply(self, event)

    Cache.apply = strict


@bug
def keeps_what_a_restart_has_lost():
    """Keeps the old blocks when the numbers start again."""
    receive = Rank.receive

    async def keeps(self, number, payload):
        batch = self.decoded(payload)
        if batch is not None and number < self.next and batch[0] > self.time:
            self.next = number
        await receive(self, number, payload)

    Rank.receive = keeps


@bug
def drops_what_comes_after_a_restart():
    """Takes all batches for old ones when the numbers start again."""
    receive = Rank.receive

    async def drops(self, number, payload):
        if number >= self.next:
            await receive(self, number, payload)

    Rank.receive = drops


def without_event(kind):
    apply = Cache.apply

    def ignores(self, event):
        if event["type"] != kind:
            apply(self, event)

    Cache.apply = ignores


@bug
def ignores_cleared():
    """Ignores each Cleared."""
    without_event("AllBlocksCleared")


@bug
def hashes_by_the_page():
    """Ignores events with blocks larger than the given size, as the plain router does itself."""


@bug
def clears_last():
    """Applies a Cleared at the end of its batch, even if it comes before a Stored."""
    apply = Rank.apply

    def sorted_apply(self, number, batch):
        events = sorted(batch[1], key=lambda event: event["type"] == "AllBlocksCleared")
        apply(self, number, [batch[0], events, *batch[2:]])

    Rank.apply = sorted_apply


@bug
def ignores_removed():
    """Ignores each Removed."""
    without_event("BlockRemoved")


@bug
def counts_no_copies():
    """Removes all copies of a block at its first Removed."""
    remove = Cache.remove

    def at_once(self, blocks):
        for block in blocks:
            if block in self.prefixes:
                self.copies[self.prefixes[block]] = 1
        remove(self, blocks)

    Cache.remove = at_once


@bug
def keeps_what_left_the_host():
    """Counts blocks stored on the host as the device's, and ignores their Removed."""
    apply = Cache.apply

    def both(self, event):
        if event["type"] == "BlockStored":
            event = {**event, "medium": "GPU"}
        apply(self, event)

    Cache.apply = both


@bug
def hears_removed_of_the_host():
    """Takes a Removed of the host for one of the device."""
    apply = Cache.apply

    def mixed(self, event):
        apply(self, {**event, "medium": "GPU"} if event["type"] == "BlockRemoved" else event)

    Cache.apply = mixed


@bug
def takes_every_group_for_attention():
    """Reads a Stored of a window as if it had a hash for each block of its tokens."""
    plain_router.ATTENTION = (None, "full_attention", "mla_attention", "sliding_window")


@bug
def removes_of_any_group():
    """Removes a block of the attention group at a Removed of a window."""
    apply = Cache.apply

    def any_group(self, event):
        if event["type"] == "BlockRemoved" and event.get("medium") in plain_router.DEVICE:
            self.remove(event["block_hashes"])
        else:
            apply(self, event)

    Cache.apply = any_group


@bug
def dies_of_a_stored_without_hashes():
    """Stops reading events at a Stored without hashes, as from a window that kept no block."""
    apply = Cache.apply

    def strict(self, event):
        if event["type"] == "BlockStored":
            event["block_hashes"][0]
        apply(self, event)

    Cache.apply = strict


@bug
def hears_one_rank():
    """Applies only the events of the first rank."""
    init = Worker.__init__

    def first(self, *given):
        init(self, *given)
        for rank in self.ranks[1:]:
            rank.apply = lambda number, batch: None

    Worker.__init__ = first


@bug
def mixes_ranks():
    """Keeps one cache for all ranks of a worker."""
    init = Worker.__init__

    def one_cache(self, *given):
        init(self, *given)
        for rank in self.ranks:
            rank.cache = self.ranks[0].cache

    Worker.__init__ = one_cache


@bug
def shares_blocks_between_salts():
    """Ignores the salt."""
    asked = Router.asked
    Router.asked = lambda self, body: asked(self, {**body, "cache_salt": None})
    Cache.root = lambda self, event: hash((event["lora_name"], None))


@bug
def shares_blocks_between_adapters():
    """Ignores the adapter."""
    asked = Router.asked
    root = Cache.root
    Router.asked = lambda self, body: asked(self, {**body, "model": "mock-model"})
    Cache.root = lambda self, event: root(
        self,
        {
            **event,
            "lora_name": None,
            "extra_keys": [[key for key in each or () if key != event["lora_name"]] for each in event["extra_keys"]],
        },
    )


# ------------------------------------------------------------------------------------------------------------ workers


def where_nobody_answers(act):
    """Do `act` when a worker cannot be reached."""
    send = Router.send

    async def sends(self, request, worker, *given):
        try:
            return await send(self, request, worker, *given)
        except ClientConnectionError:
            return await act(self, request, worker, *given)

    Router.send = sends


@bug
def gives_up_where_a_worker_is_down():
    """Reports a refused connection to the client without trying another worker."""

    async def gives_up(*_):
        raise web.HTTPBadGateway

    where_nobody_answers(gives_up)


@bug
def waits_for_a_worker_that_is_down():
    """Retries a refused connection while the client waits."""

    async def again(self, *given):
        await asyncio.sleep(0.05)
        return await self.send(*given)

    where_nobody_answers(again)


@bug
def never_uses_a_worker_again():
    """Never uses a worker again that refused a connection once."""
    pick = Router.pick
    gone = []

    async def notes(self, request, worker, *_):
        gone.append(worker)
        raise ClientConnectionError

    where_nobody_answers(notes)
    Router.pick = lambda self, root, tokens, tried: pick(self, root, tokens, [*tried, *gone])


@bug
def does_not_use_who_is_new():
    """Ignores notices of new workers."""

    async def use_workers(self, request):
        return web.json_response(len(self.workers))

    Router.use_workers = use_workers


@bug
def does_not_hear_who_is_new():
    """Uses a new worker without reading its events."""
    use = Router.use

    def deaf(self, sources):
        known = set(self.workers)
        use(self, sources)
        for source in sources if known else ():
            if source not in known:
                for task in self.following[source]:
                    task.cancel()

    Router.use = deaf


# ----------------------------------------------------------------------------------------------------- what it passes
# on


def changing(change):
    """Let `change` read an upstream answer and return the client's answer."""
    Router.passed_on = change


async def send(request, status, parts, headers=()):
    answer = web.StreamResponse(status=status, headers=dict(headers))
    await answer.prepare(request)
    async for part in parts:
        await answer.write(part)
    return answer


@bug
def buffers_streams():
    """Reads an answer to its end before it sends any of it."""

    async def whole(self, request, upstream):
        try:
            body = await upstream.read()
        except ClientError:
            self.cut(request)
            body = b""
        return web.Response(status=upstream.status, headers=kept(upstream.headers), body=body)

    changing(whole)


@bug
def changes_what_was_generated():
    """Changes letters of an answer."""

    async def loud(self, request, upstream):
        async def parts():
            async for part in upstream.content.iter_any():
                yield part.replace(b'"text":"', b'"text":" ')

        return await send(request, upstream.status, parts(), kept(upstream.headers))

    changing(loud)


def with_status(change):
    async def answer(self, request, upstream):
        return await send(request, change(upstream.status), upstream.content.iter_any(), kept(upstream.headers))

    changing(answer)


@bug
def answers_200_for_a_refusal():
    """Answers 200 whenever a worker refuses a request."""
    with_status(lambda status: 200 if 400 <= status < 500 else status)


@bug
def answers_200_for_a_limit():
    """Answers 200 for a 429."""
    with_status(lambda status: 200 if status == 429 else status)


@bug
def answers_200_for_an_error():
    """Answers 200 for a 500."""
    with_status(lambda status: 200 if status >= 500 else status)


@bug
def answers_502_for_a_refusal():
    """Answers a 400 with an error of the router."""
    with_status(lambda status: 502 if status == 400 else status)


@bug
def drops_the_headers_of_an_answer():
    """Does not pass on Retry-After."""

    async def bare(self, request, upstream):
        headers = {"Content-Type": upstream.headers["Content-Type"]}
        return await send(request, upstream.status, upstream.content.iter_any(), headers)

    changing(bare)


@bug
def says_errors_in_its_own_words():
    """Keeps the status of an error and replaces its message."""
    passed_on = Router.passed_on

    async def own(self, request, upstream):
        if upstream.status >= 400:
            return web.json_response({"error": "upstream failed"}, status=upstream.status)
        return await passed_on(self, request, upstream)

    changing(own)


@bug
def ends_a_stream_that_was_cut():
    """Ends a stream whose worker died as if it were complete."""
    Router.cut = lambda self, request: None


@bug
def finishes_a_stream_that_was_cut():
    """Gives a stream whose worker died the end of a complete one."""

    async def done(self, request, upstream):
        async def parts():
            try:
                async for part in upstream.content.iter_any():
                    yield part
            except ClientError:
                yield b"data: [DONE]\n\n"

        return await send(request, upstream.status, parts(), kept(upstream.headers))

    changing(done)


@bug
def begins_a_stream_again():
    """Requests a stream whose worker died again, and appends its chunks to those already sent."""

    async def again(self, request, upstream):
        async def parts():
            answer, headers = upstream, {"Content-Type": "application/json"}
            while True:
                try:
                    async for part in answer.content.iter_any():
                        yield part
                except ClientError:
                    other = next(each for each in self.workers.values() if not str(answer.url).startswith(each.url))
                    answer = await self.send(request, other, headers, await request.read())
                else:
                    return

        return await send(request, upstream.status, parts(), kept(upstream.headers))

    changing(again)


@bug
def answers_200_where_nobody_answered():
    """Answers an empty success when a worker dies before its answer."""

    async def empty(*_):
        raise web.HTTPOk(text='{"choices": []}')

    where_nobody_answers(empty)


@bug
def asks_another_one_where_its_client_went():
    """Takes a disconnected client for an unreachable worker."""
    complete = Router.complete

    async def again(self, request):
        try:
            return await complete(self, request)
        except asyncio.CancelledError:
            other = min(self.workers.values(), key=lambda each: each.picked)
            task = asyncio.create_task(self.send(request, other, kept(request.headers), await request.read()))
            task.add_done_callback(lambda done: done.result().close())
            self.tasks = task
            raise

    Router.complete = again


@bug
def goes_on_without_its_client():
    """Does not notice a disconnected client, and continues its request."""
    complete = Router.complete

    async def shielded(self, request):
        return await asyncio.shield(asyncio.ensure_future(complete(self, request)))

    Router.complete = shielded


def leaking(is_leak):
    """Let a request count as open for ever, depending on its end: its status, or the exception it raised."""
    passed_on, send = Router.passed_on, Router.send

    async def sends(self, request, worker, *given):
        request["worker"] = worker
        try:
            return await send(self, request, worker, *given)
        except BaseException as error:
            worker.open += is_leak(None, error)
            raise

    async def leaks(self, request, upstream):
        try:
            answer = await passed_on(self, request, upstream)
        except BaseException as error:
            request["worker"].open += is_leak(None, error)
            raise
        was_cut = request.transport is None or request.transport.is_closing()
        request["worker"].open += is_leak("cut" if was_cut else answer.status, None)
        return answer

    Router.send, Router.passed_on = sends, leaks


@bug
def counts_those_whose_client_went():
    """Counts a request as open for ever if its client disconnected."""
    leaking(lambda status, error: isinstance(error, asyncio.CancelledError))


@bug
def counts_those_that_were_refused():
    """Counts a request as open for ever if it was answered with an error."""
    leaking(lambda status, error: isinstance(status, int) and status >= 400)


@bug
def counts_those_that_were_cut():
    """Counts a stream as open for ever if its worker died."""
    leaking(lambda status, error: status == "cut")


@bug
def counts_those_that_ended_well():
    """Counts a request as open for ever if it was completed."""
    leaking(lambda status, error: status == 200)


def counting(cost):
    """Let `cost` choose the worker of a prompt by its overlap and by all prompts ever sent there, with their overlap
    at that time.
    """
    counted = defaultdict(list)
    choosing(lambda worker, root, tokens: (cost(worker.overlap(root, tokens)[0], counted[worker]), worker.picked))
    pick = Router.pick

    def counts(self, root, tokens, tried):
        worker = pick(self, root, tokens, tried)
        size = self.block_size
        chain = [tokens[:end] for end in range(size, len(tokens) + 1, size)]
        if worker is not None:
            counted[worker].append((chain, worker.overlap(root, tokens)[0]))
        return worker

    Router.pick = counts


@bug
def frees_no_blocks():
    """Counts load in blocks, shared ones once, and never frees those of ended requests."""
    counting(lambda overlap, sent: (-overlap, len({block for chain, _ in sent for block in chain})))


@bug
def frees_no_prefill():
    """Counts load in blocks that are not cached, and never frees them."""
    counting(lambda overlap, sent: (-overlap, sum(len(chain) - held for chain, held in sent)))


@bug
def weighs_what_it_never_frees():
    """Counts against a worker all uncached blocks ever sent to it, which finally outweigh the blocks that it
    holds.
    """
    counting(lambda overlap, sent: sum(len(chain) - held for chain, held in sent) - 2 * overlap)


def sending(change):
    """Change what is sent to a worker: headers, and the body as an object."""
    send = Router.send

    async def changed(self, request, worker, headers, data):
        headers, body = change(headers, json.loads(data))
        return await send(self, request, worker, headers, json.dumps(body).encode())

    Router.send = changed


@bug
def drops_the_salt():
    """Does not pass on the salt."""
    sending(lambda headers, body: (headers, {name: value for name, value in body.items() if name != "cache_salt"}))


@bug
def drops_the_adapter():
    """Requests the base model every time."""
    sending(lambda headers, body: (headers, {**body, "model": "mock-model"}))


@bug
def drops_images():
    """Passes on only the texts of a chat."""

    def texts(headers, body):
        for message in body.get("messages", ()):
            message["content"] = [each for each in message["content"] if each["type"] == "text"]
        return headers, body

    sending(texts)


@bug
def drops_what_it_does_not_know():
    """Passes on only known fields of a body."""
    known = {"model", "prompt", "messages", "max_tokens", "stream", "cache_salt"}
    sending(lambda headers, body: (headers, {name: value for name, value in body.items() if name in known}))


@bug
def drops_headers():
    """Passes on only the content type of a request."""
    sending(lambda headers, body: ({"Content-Type": "application/json"}, body))


# ---------------------------------------------------------------------------------------------------------- where it
# sends


def choosing(key):
    def pick(self, root, tokens, tried):
        left = [each for each in self.workers.values() if each not in tried]
        self.picks += 1
        worker = min(left, key=lambda each: key(each, root, tokens), default=None)
        if worker is not None:
            worker.picked = self.picks
        return worker

    Router.pick = pick


@bug
def reads_no_token_ids():
    """Ignores prompts given as token ids."""
    asked = Router.asked

    def text_alone(self, body):
        root, tokens = asked(self, body)
        return root, tokens if isinstance(tokens, bytes) else b""

    Router.asked = text_alone


@bug
def takes_the_first_of_equals():
    """Sends everything to the first of equal workers."""
    choosing(lambda worker, root, tokens: (-worker.overlap(root, tokens)[0], worker.open))


@bug
def goes_in_turn():
    """Ignores overlaps."""
    choosing(lambda worker, root, tokens: worker.picked)


@bug
def goes_where_least_is():
    """Sends a prompt to the worker that holds least of it."""
    choosing(lambda worker, root, tokens: (worker.overlap(root, tokens)[0], worker.open, worker.picked))


@bug
def counts_no_open_requests():
    """Ignores open requests."""
    choosing(lambda worker, root, tokens: (-worker.overlap(root, tokens)[0], worker.picked))


# ------------------------------------------------------------------------------------------------------------------ its
# end


@bug
def ignores_sigterm():
    """Ignores SIGTERM."""
    plain_router.asyncio.Event.set = lambda self: None


@bug
def ends_with_an_error():
    """Ends with a failure status."""
    main = plain_router.main

    async def fails(*given):
        await main(*given)
        sys.exit(1)

    plain_router.main = fails


@bug
def never_ends_while_requests_are_open():
    """Never ends once a request was open."""
    complete = Router.complete
    cleanup = web.AppRunner.cleanup
    opened = []

    async def notes(self, request):
        opened.append(request)
        return await complete(self, request)

    async def waits(self):
        if opened:
            await asyncio.get_running_loop().create_future()
        await cleanup(self)

    Router.complete = notes
    web.AppRunner.cleanup = waits


@bug
def an_unknown_kind_ends_the_batch():
    """Ignores the rest of a batch after an event of an unknown kind."""
    apply = Rank.apply

    def until_unknown(self, number, batch):
        known = ("BlockStored", "BlockRemoved", "AllBlocksCleared")
        at = next((at for at, event in enumerate(batch[1]) if event["type"] not in known), len(batch[1]))
        apply(self, number, [batch[0], batch[1][:at], *batch[2:]])

    Rank.apply = until_unknown


@bug
def an_unknown_medium_ends_the_batch():
    """Ignores a batch with an unknown medium."""
    apply = Rank.apply

    def all_known(self, number, batch):
        known = all(event.get("medium") in (None, "GPU", "CPU") for event in batch[1])
        apply(self, number, batch if known else [batch[0], [], *batch[2:]])

    Rank.apply = all_known


@bug
def takes_any_medium_for_the_device():
    """Counts every block that is not on the host as the device's."""
    apply = Cache.apply

    def on_device(self, event):
        apply(self, event if event.get("medium") == "CPU" else {**event, "medium": "GPU"})

    Cache.apply = on_device


@bug
def asks_once_for_what_is_missing():
    """Gives up batches that a replay did not have."""
    plain_router.REPLAYS = 1


@bug
def waits_for_the_end_of_a_replay():
    """Waits for ever for a replay without an end."""
    plain_router.REPLAY_S = 10.0**6


@bug
def applies_what_a_replay_had():
    """Applies batches of a replay again when they arrive by themselves."""

    async def receive(self, number, payload):
        due, batch = self.next, self.decoded(payload)
        await receives(self, number, payload)
        for event in batch[1] if batch is not None and number > due else ():
            self.cache.apply(event)

    receives, Rank.receive = Rank.receive, receive


class LowByteFirst(int):
    """A number that is written in little-endian order."""

    def to_bytes(self, length):
        return int(self).to_bytes(length, "little")


@bug
def reads_numbers_low_byte_first():
    """Reads and requests numbers of batches in little-endian order."""
    apply = Rank.apply

    async def receive(self, number, payload):
        await receives(self, int.from_bytes(number.to_bytes(8), "little"), payload)

    def noted(self, number, batch):
        apply(self, number, batch)
        self.next = LowByteFirst(self.next)

    receives, Rank.receive, Rank.apply = Rank.receive, receive, noted


@bug
def knows_an_id_at_its_first_address():
    """Keeps reading a worker with a known id at its old address."""
    use = Router.use
    of_id = {}

    def by_id(self, sources):
        ids = [int(each.partition("#")[2]) for each in sources]
        use(self, [of_id.setdefault(each, source.partition("#")[0]) for each, source in zip(ids, sources, strict=True)])

    Router.use = by_id


@bug
def keeps_what_an_id_held():
    """Keeps the blocks of a worker by its id, at whatever address."""
    use, of_id = Router.use, {}

    def by_id(self, sources):
        ids = {each.partition("#")[0]: int(each.partition("#")[2]) for each in sources}
        use(self, [*ids])
        for source, each in ids.items():
            for rank, cache in zip(self.workers[source].ranks, of_id.get(each, ()), strict=False):
                rank.cache = cache
            of_id[each] = [rank.cache for rank in self.workers[source].ranks]

    Router.use = by_id


@bug
def gives_hosts_no_weight():
    """Ignores blocks on hosts."""


@bug
def takes_every_name_for_plain():
    """Takes names with look ahead for plain ones."""


@bug
def sends_no_rank():
    """Lets the engine choose the rank of a prompt."""
    sends = Router.send

    def send(self, request, worker, headers, data):
        headers.pop("X-data-parallel-rank", None)
        return sends(self, request, worker, headers, data)

    Router.send = send


@bug
def sends_rank_0():
    """Sends each prompt to rank 0."""
    sends = Router.send

    def send(self, request, worker, headers, data):
        return sends(self, request, worker, {**headers, "X-data-parallel-rank": "0"}, data)

    Router.send = send


@bug
def names_ranks_as_events_do():
    """Names a rank by the number in its events instead of its position behind the port."""
    apply, send = Rank.apply, Router.send

    def applied(self, number, batch):
        self.number = batch[2]
        apply(self, number, batch)

    def sends(self, request, worker, headers, data):
        at = int(headers.get("X-data-parallel-rank", 0))
        rank = getattr(worker.ranks[at], "number", at)
        return send(self, request, worker, {**headers, "X-data-parallel-rank": str(rank)}, data)

    Rank.apply, Router.send = applied, sends


@bug
def is_ready_always():
    """Reports health as soon as the process runs."""

    async def health(self, _):
        return web.Response()

    Router.health = health


@bug
def is_ready_once_and_for_all():
    """Reports health for ever once an engine was there."""
    health, was = Router.health, []

    async def once(self, request):
        if not was and (await health(self, request)).status == 200:
            was.append(True)
        return web.Response(status=200 if was else 503)

    Router.health = once


@bug
def takes_bodies_of_a_mebibyte():
    """Refuses bodies larger than a mebibyte, like aiohttp by default."""
    made = web.Application
    plain_router.web.Application = lambda **_: made()


@bug
def reads_bytes_as_characters():
    """Takes each character for a token: text that is not ASCII becomes another prompt."""
    asked = Router.asked

    def by_characters(self, body):
        root, _ = asked(self, body)
        prompt = body.get("prompt")
        return root, prompt.encode("latin-1", "replace") if isinstance(prompt, str) else b""

    Router.asked = by_characters


@bug
def refuses_what_is_not_ascii():
    """Refuses bodies that are not ASCII."""
    complete = Router.complete

    async def of_ascii(self, request):
        data = await request.read()
        if data.isascii() and rb"\u" not in data:
            return await complete(self, request)
        return web.json_response({"error": {"message": "no ASCII", "code": 400}}, status=400)

    Router.complete = of_ascii


@bug
def takes_posts_alone():
    """Refuses all methods except POST."""
    complete = Router.complete

    async def of_posts(self, request):
        return await complete(self, request) if request.method == "POST" else web.Response(status=405)

    Router.complete = of_posts


@bug
def does_not_know_queries():
    """Refuses a path with a query."""
    complete = Router.complete

    async def without(self, request):
        return web.Response(status=404) if request.query_string else await complete(self, request)

    Router.complete = without


@bug
def has_a_limit_of_a_second():
    """Gives up an answer after one second."""
    plain_router.ClientTimeout = lambda *_: ClientTimeout(1)


@bug
def has_a_hundred_connections():
    """Lets requests beyond a hundred wait."""
    plain_router.TCPConnector = lambda **_: TCPConnector(force_close=True, limit=100)


@bug
def is_not_ready_under_load():
    """Reports no health when it has much to do."""
    health = Router.health

    async def idle(self, request):
        load = sum(worker.open for worker in self.workers.values())
        return web.Response(status=503) if load > 50 else await health(self, request)

    Router.health = idle


@bug
def goes_on_sending_to_who_fails():
    """Keeps sending prompts to the engine that holds them, even if it fails."""
    plain_router.GIVES_UP = 10**9


def rests_who_refused():
    """No mistake: it rests a worker that refused a connection, and picks the last picked worker among equals."""
    send = Router.send
    until = {}

    async def notes(self, request, worker, headers, data):
        try:
            return await send(self, request, worker, headers, data)
        except ClientConnectionError:
            until[worker] = asyncio.get_running_loop().time() + REST_S
            raise

    def pick(self, root, tokens, tried):
        now = asyncio.get_running_loop().time()
        left = [each for each in self.workers.values() if each not in tried and until.get(each, now) <= now]
        worker = min(left, key=lambda each: (-each.overlap(root, tokens)[0], -each.picked), default=None)
        if worker is not None:
            self.picks += 1
            worker.picked = self.picks
        return worker

    Router.send, Router.pick = notes, pick


def applies_late():
    """No mistake: it applies a batch some time after its arrival."""
    receive = Rank.receive

    async def late(self, number, payload):
        await asyncio.sleep(LATE_S)
        await receive(self, number, payload)

    Rank.receive = late


def counts_two_late():
    """No mistake: twice it counts an answer only after the client's next request, so that this prompt goes
    elsewhere.
    """
    pick = Router.pick

    def elsewhere(self, root, tokens, tried):
        worker = pick(self, root, tokens, tried)
        others = [each for each in self.workers.values() if each is not worker]
        return others[0] if self.picks in (5, 12) and others else worker

    Router.pick = elsewhere


def reads_salts_of_headers():
    """No mistake: it reads a tenant's salt from a header and passes it on in the body."""
    complete = Router.complete

    async def salted(self, request):
        salt = request.headers.get("X-Cache-Salt")
        if salt is not None:
            body = {**json.loads(await request.read()), "cache_salt": salt}
            request._read_bytes = json.dumps(body).encode()
        return await complete(self, request)

    Router.complete = salted


def reads_arrays(dialect):
    """No mistake: it reads events in the form of an older release, as arrays that begin with the tag."""
    names = {
        "BlockStored": [field.name for field in dialect.stored],
        "BlockRemoved": [field.name for field in dialect.removed],
        "AllBlocksCleared": [],
    }
    decoded = Rank.decoded

    def read(self, payload):
        batch = decoded(self, payload)
        return batch and [batch[0], [of_array(each) for each in batch[1]], *batch[2:]]

    def of_array(event):
        tag, *values = event
        of_tag = names.get(tag, [])
        event = {"type": tag, **dict(zip(of_tag, values, strict=False))}
        for more in values[len(of_tag) :]:  # metadata of SGLang
            event |= more if isinstance(more, dict) else {}
        return event

    Rank.decoded = read


def rests_who_failed():
    """No mistake: it rests a worker that answered with an error or cut a stream."""
    send, passed_on, pick = Router.send, Router.passed_on, Router.pick
    until = defaultdict(float)

    def rests(worker):
        until[worker] = asyncio.get_running_loop().time() + REST_S

    async def notes(self, request, worker, headers, data):
        try:
            upstream = await send(self, request, worker, headers, data)
        except ClientConnectionError:
            rests(worker)
            raise
        if upstream.status >= 500:
            rests(worker)
        upstream.kvmock_worker = worker
        return upstream

    async def watches(self, request, upstream):
        cut = self.cut

        def noted(request):
            rests(upstream.kvmock_worker)
            cut(request)

        self.cut = noted
        try:
            return await passed_on(self, request, upstream)
        finally:
            self.cut = cut

    def rested(self, root, tokens, tried):
        now = asyncio.get_running_loop().time()
        resting = [each for each in self.workers.values() if until[each] > now]
        return pick(self, root, tokens, [*tried, *resting])

    Router.send, Router.passed_on, Router.pick = notes, watches, rested


def weighing(weight):
    """Choose by the tokens that a prompt adds, plus those of open requests, in one unit."""
    send = Router.send
    open_tokens = Counter()

    def pick(self, root, tokens, tried):
        def cost(worker):
            held = worker.overlap(root, tokens)[0] * self.block_size
            return open_tokens[worker] + weight(len(tokens), held), worker.picked

        left = [each for each in self.workers.values() if each not in tried]
        worker = min(left, key=cost, default=None)
        if worker is not None:
            self.picks += 1
            worker.picked = self.picks
        return worker

    complete = Router.complete

    async def weighs(self, request):
        request["weighed"] = []
        try:
            return await complete(self, request)
        finally:
            for worker, tokens in request["weighed"]:
                open_tokens[worker] -= tokens

    async def notes(self, request, worker, headers, data):
        root, tokens = self.asked(json.loads(data) if data else {})
        added = weight(len(tokens), worker.overlap(root, tokens)[0] * self.block_size)
        open_tokens[worker] += added
        request["weighed"].append((worker, added))
        return await send(self, request, worker, headers, data)

    Router.pick, Router.complete, Router.send = pick, weighs, notes


def weighs_what_is_computed():
    """No mistake: it counts load in tokens that are not cached."""
    weighing(lambda tokens, held: max(tokens - held, 1))


def weighs_prompts_and_what_is_computed():
    """No mistake: it counts load in prompt tokens plus tokens that are not cached."""
    weighing(lambda tokens, held: tokens + max(tokens - held, 1))


def reads_chats():
    """No mistake: it computes the tokens of a chat by the engine's template."""
    asked = Router.asked

    def by_template(self, body):
        root, tokens = asked(self, body)
        if "messages" in body:
            shown = "".join(
                f"<{each['role']}>{each['content']}</>" for each in body["messages"] if isinstance(each["content"], str)
            )
            tokens = f"{shown}<assistant>".encode()
        return root, tokens

    Router.asked = by_template


def learns_the_block():
    """No mistake: it hashes by the block size of events, whatever size it was given."""
    store = Cache.store

    def by_the_block(self, event):
        if event.get("kv_cache_spec_kind") in plain_router.ATTENTION and event["block_size"] > self.block_size:
            self.block_size = event["block_size"]
        store(self, event)

    Cache.store = by_the_block


def reads_look_ahead():
    """No mistake: it reads names that also cover the next tokens, and pairs, each of which has two tokens."""
    store = Cache.store

    def stored(self, event):
        size, tokens, ahead = self.block_size, event["token_ids"], event.get("lookahead_token_ids")
        if tokens and isinstance(tokens[0], list):  # of pairs, the second token of the last one is look ahead
            firsts = [first for first, _ in tokens]
            ahead = [[tokens[end - 1][1]] for end in range(size, len(tokens) + 1, size)]
            event = {**event, "token_ids": firsts}
        parent = event["parent_block_hash"]
        if not ahead:
            store(self, event)
            return
        self.ahead = len(ahead[0])
        prefix = self.root(event) if parent is None else self.prefixes.get(parent)
        for at, block in enumerate(event["block_hashes"] if prefix is not None else ()):
            own = tuple(event["token_ids"][at * size : (at + 1) * size])
            self.prefixes[block] = prefix = hash((prefix, own, tuple(ahead[at])))
            self.copies[prefix] += 1

    def overlap(self, prefix, tokens):
        size, ahead, count = self.block_size, getattr(self, "ahead", 0), 0
        if not ahead:
            return plain(self, prefix, tokens)
        for at in range(0, len(tokens) - size - ahead + 1, size):
            own, after = tuple(tokens[at : at + size]), tuple(tokens[at + size : at + size + ahead])
            prefix = hash((prefix, own, after))
            if prefix not in self.copies:
                break
            count += 1
        return count

    plain, Cache.overlap, Cache.store = Cache.overlap, overlap, stored


def hears_of_adapters(forgets):
    """Handle messages that name an adapter loaded by engines."""
    clear, store, complete = Cache.clear, Cache.store, Router.complete

    def cleared(self):
        clear(self)
        self.of_adapter = defaultdict(list)

    def stored(self, event):
        self.of_adapter[event.get("lora_name")] += event["block_hashes"]
        store(self, event)

    async def told(self, request):
        if request.path != "/adapters":
            return await complete(self, request)
        name = (await request.json())["name"]
        for cache in (rank.cache for worker in self.workers.values() for rank in worker.ranks) if forgets else ():
            for block in cache.of_adapter.pop(name, ()):
                cache.copies.pop(cache.prefixes.pop(block, None), None)
        return web.json_response(name)

    Cache.clear, Cache.store, Router.complete = cleared, stored, told


def forgets_reloaded_adapters():
    """No mistake: it drops the blocks of an adapter when it is notified of a reload."""
    hears_of_adapters(forgets=True)


@bug
def keeps_what_a_reloaded_adapter_had():
    """Keeps the old blocks of an adapter that was loaded from another path."""
    hears_of_adapters(forgets=False)


def weighs_hosts():
    """No mistake: it counts a block on the host after the device's blocks as half a block."""
    apply, clear, overlap = Cache.apply, Cache.clear, Worker.overlap

    def cleared(self):
        clear(self)
        self.names, self.hosted = getattr(self, "names", {}), getattr(self, "hosted", Counter())

    def applied(self, event):
        names, size = self.names, self.block_size
        if event["type"] == "BlockStored" and event.get("token_ids"):
            parent, tokens = event["parent_block_hash"], event["token_ids"]
            prefix = self.root(event) if parent is None else names.get(parent)
            for at, block in enumerate(event["block_hashes"] if prefix is not None else ()):
                names[block] = prefix = hash((prefix, tuple(tokens[at * size : (at + 1) * size])))
        if event.get("medium") == "CPU" and event["type"] != "AllBlocksCleared":
            change = 1 if event["type"] == "BlockStored" else -1
            for block in event["block_hashes"]:
                self.hosted[names.get(block)] += change
        apply(self, event)

    def with_host(self, root, tokens):
        held, rank = overlap(self, root, tokens)
        cache, size, prefix, more = self.ranks[rank].cache, self.ranks[rank].cache.block_size, root, 0
        for at in range(0, len(tokens) - size + 1, size):
            prefix = hash((prefix, tuple(tokens[at : at + size])))
            if at >= held * size:
                if cache.hosted[prefix] < 1:
                    break
                more += 1
        return held + more / 2, rank

    Cache.clear, Cache.apply, Worker.overlap = cleared, applied, with_host


RIGHT = {
    each.__name__: each
    for each in (
        rests_who_refused,
        rests_who_failed,
        applies_late,
        counts_two_late,
        reads_salts_of_headers,
        reads_chats,
        learns_the_block,
        forgets_reloaded_adapters,
        weighs_hosts,
        reads_look_ahead,
        weighs_what_is_computed,
        weighs_prompts_and_what_is_computed,
    )
}
RIGHT |= {
    f"reads_{name}": partial(reads_arrays, dialect) for name, dialect in DIALECTS.items() if dialect.form == "array"
}


if __name__ == "__main__":
    names, size, *sources = sys.argv[1:]
    for name in names.split("+"):
        (BUGS | RIGHT)[name]()
    asyncio.run(plain_router.main(Router(int(size)), sources))
