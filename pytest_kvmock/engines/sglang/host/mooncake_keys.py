"""Keys of the objects that SGLang's HiCache keeps in Mooncake's store, and the objects of each page."""

from __future__ import annotations

from dataclasses import dataclass

# Theory of operation
#
# Per rank, a page is one object with K and one with V, or a single object with MLA; with split heads, a pair per share.
# A rank asks for its own objects; a page is stored if the objects of all ranks are. A reader with another layout finds
# nothing, without an error. (`mem_cache/storage/mooncake_store/mooncake_store.py` of SGLang 0.5.23)


@dataclass(frozen=True, slots=True)
class MooncakeLayout:
    """The division of a page into objects by one server of SGLang.

    Attributes:
        tp: tensor-parallel ranks.
        pp: pipeline stages.
        dcp: ranks of decode context parallelism; more than 1 requires `is_mla`.
        is_mla: whether K and V are one object (MLA).
        shares: shares into which the heads of all ranks are split (`tp_lcm_size`); None: one share per rank.
        page_size: tokens per page.
        tag: extra backend tag; an empty one counts, None does not.
        model: name of the model; None: no name (every real server has one).

    Raises:
        ValueError: sizes that do not fit each other.
    """

    tp: int = 1
    pp: int = 1
    dcp: int = 1
    is_mla: bool = False
    shares: int | None = None
    page_size: int = 64
    tag: str | None = None
    model: str | None = None

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "dcp", "page_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"MooncakeLayout: {name} must be at least 1, got {getattr(self, name)!r}")
        if self.dcp > 1 and not self.is_mla:
            raise ValueError(f"MooncakeLayout: dcp={self.dcp} goes with is_mla=True, got {self.is_mla!r}")
        if self.tp % self.dcp:
            raise ValueError(f"MooncakeLayout: tp must be a multiple of dcp={self.dcp}, got {self.tp}")
        if self.shares is not None and (self.is_mla or self.shares % self.tp):
            raise ValueError(
                f"MooncakeLayout: shares must be a multiple of tp={self.tp}, of a model whose heads are split "
                f"(is_mla=False), got {self.shares} and is_mla={self.is_mla}"
            )

    @property
    def prefix(self) -> str | None:
        """Prefix of each key; None if there is none."""
        parts = [] if self.tag is None else [self.tag]
        if self.model is not None:
            parts.append(self.model.replace("/", "-"))
        if self.dcp > 1:
            parts += [f"tp{self.tp}", f"dcp{self.dcp}", f"page{self.page_size}", f"pp{self.pp}", "cp1"]
        return "_".join(parts) if parts else None

    def keys_of_rank(self, page_hash: str, rank: int, stage: int = 0) -> list[str]:
        """Return the keys of a page that one rank of one stage reads and writes, in order.

        Args:
            page_hash: the full digest of the page, in hex.
            rank: tensor-parallel rank, from 0.
            stage: pipeline stage, from 0.
        """
        behind = [str(stage)] if self.pp > 1 else []
        if self.dcp > 1:
            suffixes = [["dcp" + str(rank % self.dcp), "cp0", *behind, "k"]]
        elif self.is_mla:
            suffixes = [[*(behind or [""]), "k"]]
        else:
            each = 1 if self.shares is None else self.shares // self.tp
            suffixes = [
                [str(share), *behind, half] for share in range(rank * each, (rank + 1) * each) for half in ("k", "v")
            ]
        before = [] if self.prefix is None else [self.prefix]
        return ["_".join([*before, page_hash, *suffix]) for suffix in suffixes]

    def keys(self, page_hash: str) -> list[str]:
        """Return all keys of a page; the page is stored if each of them is in the store."""
        ranks = ((rank, stage) for stage in range(self.pp) for rank in range(self.tp))
        return [*dict.fromkeys(key for rank, stage in ranks for key in self.keys_of_rank(page_hash, rank, stage))]
