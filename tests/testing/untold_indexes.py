"""Indexes that misread what no event shows: the block size, and the reload of an adapter."""

from contract_runs import Mutants

from pytest_kvmock import RadixIndex, Stored
from pytest_kvmock.testing import IndexContract

UNTOLD = Mutants(IndexContract)


class DropsLargerBlocks(RadixIndex):
    """Silently ignores a Stored with blocks of another size than the page, like Dynamo's client."""

    def __init__(self, block_size):
        super().__init__()
        self.block_size = block_size

    def apply(self, event):
        if isinstance(event.event.data, Stored) and any(len(each) != self.block_size for each in event.token_ids):
            return
        super().apply(event)


class DropsOnReload(RadixIndex):
    """Drops the blocks of an adapter that is loaded from another path."""

    def __init__(self):
        super().__init__()
        self.paths, self.blocks = {}, {}

    def apply(self, event):
        if isinstance(event.event.data, Stored) and event.extra:
            key = (event.worker_id, event.event.dp_rank)
            self.blocks.setdefault(event.extra.get("lora_name"), {}).update(
                dict.fromkeys(event.event.data.block_hashes, key)
            )
        super().apply(event)

    def adapter_loaded(self, name, path):
        if self.paths.get(name) not in (None, path):
            self.drop(name)
        self.paths[name] = path

    def drop(self, name):
        for block, key in self.blocks.pop(name, {}).items():
            self.remove(*key, [block])


class KeepsAll(DropsOnReload):
    def drop(self, name):
        pass


class DropsAllAdapters(DropsOnReload):
    def drop(self, name):
        for each in list(self.blocks):
            super().drop(each)


@UNTOLD.breaks("test_a_block_of_several_pages_is_found")
class GoesByThePage(IndexContract):
    block_size, dcp = 64, 4

    def make_index(self, block_size):
        return DropsLargerBlocks(block_size)


@UNTOLD.breaks("test_an_adapter_of_another_path_promises_nothing_of_before")
class KeepsWhatAnAdapterHad(IndexContract):
    def make_index(self):
        return KeepsAll()
