"""Indexes that survive faults, and some that do not."""

from contextlib import suppress

from pytest_kvmock.oracle import RadixIndex, RadixIndexError, RouterCursor


class AsksTheWorker:
    """Applies events in order of their ids; at any other id it asks the worker for all events ever published.

    `journal` holds the events that workers published, from the tap on.
    """

    def __init__(self):
        self.tree = RadixIndex()
        self.journal = {}
        self.due = {}
        self.recoveries = 0

    def listen(self, worker):
        journal = self.journal

        class Tap:
            def publish(self, event):
                events = journal.setdefault(event.key, [])
                if event.event_id == 0:
                    events.clear()
                events.append(event)

        recorder = worker._recorder
        inner, tap = recorder.sink, Tap()

        class Both:
            def publish(self, event):
                tap.publish(event)
                inner.publish(event)

        recorder.sink = Both()

    def apply(self, event):
        key, event_id = (event.worker_id, event.event.dp_rank), event.event.event_id
        known = self.journal[key]
        sound = event_id < len(known) and known[event_id].event == event.event
        if sound and event_id == self.due.get(key, 0) and event_id == len(known) - 1:
            self.due[key] = event_id + 1
            self.tree.apply(event)
        else:
            self.recover(key, known)

    def recover(self, key, known):
        self.recoveries += 1
        self.tree.remove_worker_dp_rank(*key)
        for event in known:
            self.tree.apply(event)
        self.due[key] = len(known)

    def find_matches(self, local_hashes):
        return self.tree.find_matches(local_hashes)


class ByWorker(AsksTheWorker):
    def find_matches(self, local_hashes):
        out = {}
        for (worker, _), blocks in self.tree.find_matches(local_hashes).scores.items():
            out[worker] = max(blocks, out.get(worker, 0))
        return out


class AsyncAsksTheWorker(AsksTheWorker):
    async def apply(self, event):
        super().apply(event)


class AsksByCursor:
    """Queries a `Recovery` when its `RouterCursor` says so."""

    def __init__(self, recovery):
        self.ask, self.tree, self.cursor = recovery, RadixIndex(), RouterCursor()

    def apply(self, event):
        key = (event.worker_id, event.event.dp_rank)
        step = self.cursor.observe(event)
        self.take(key, step)
        while step.ask is not None:
            step = self.cursor.answered(step.ask, self.ask(*step.ask))
            self.take(key, step)

    def take(self, key, step):
        if step.replace:
            self.tree.remove_worker_dp_rank(*key)
        for event in step.apply:
            with suppress(RadixIndexError):
                self.tree.apply(event)

    def find_matches(self, local_hashes):
        return self.tree.find_matches(local_hashes)


class WaitsForLateEvents:
    """Holds back events that come too early, and drops repeated ones."""

    def __init__(self):
        self.tree = RadixIndex()
        self.due = {}
        self.early = {}

    def apply(self, event):
        key = (event.worker_id, event.event.dp_rank)
        early = self.early.setdefault(key, {})
        early[event.event.event_id] = event
        while (due := self.due.get(key, 0)) in early:
            self.tree.apply(early.pop(due))
            self.due[key] = due + 1

    def find_matches(self, local_hashes):
        return self.tree.find_matches(local_hashes)


class TakesWhatComes:
    """Applies every event as it comes; survives no fault and never raises."""

    def __init__(self):
        self.tree = RadixIndex()

    def apply(self, event):
        with suppress(RadixIndexError):
            self.tree.apply(event)

    def find_matches(self, local_hashes):
        return self.tree.find_matches(local_hashes)
