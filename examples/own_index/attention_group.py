"""A filter that an index needs for vLLM's hybrid models: which events are about the blocks that a router looks up."""

from pytest_kvmock import Removed, Stored
from pytest_kvmock.values import SparseStored

ATTENTION = ("full_attention", "mla_attention")


class AttentionGroup:
    """Separates the events of the attention group of each worker and rank from those of the other cache groups.

    A Stored has the kind that identifies the group; a Removed has only its number.
    """

    def __init__(self, block_size):
        self.block_size = block_size
        self.numbers = {}

    def has(self, event):
        """Whether an event is about whole blocks of the attention group, or a Cleared."""
        data, extra = event.event.data, event.extra or {}
        key, number = (event.worker_id, event.event.dp_rank), extra.get("group_idx", 0)
        if isinstance(data, Removed):
            return number == self.numbers.get(key, 0)
        if not isinstance(data, Stored):
            return True
        if isinstance(data, SparseStored) or extra.get("kv_cache_spec_kind", ATTENTION[0]) not in ATTENTION:
            return False
        self.numbers[key] = number
        return not event.token_ids or len(event.token_ids[0]) == self.block_size  # a prompt's tail is no block
