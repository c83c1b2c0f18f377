"""The LoRA adapters of a served engine, which clients load and unload while it runs."""

from __future__ import annotations

from collections.abc import Iterable

from pytest_kvmock.servers.serve.request_checks import BadRequest

_INVALID = "InvalidUserInput"


class Adapters:
    """The adapters of one worker.

    vLLM names blocks by name and path, which events do not carry: loaded from the same path, old blocks are hit again.
    SGLang gives each load an id of its own, so that none is. What was unloaded stays in the cache until it is evicted.
    No path is looked at: each has an adapter. Sources: `entrypoints/openai/models/serving.py` of vLLM, whose text for
    the base model's name is that of its other frontend; `lora/lora_manager.py` and `lora_registry.py` of SGLang.

    Args:
        names: those that are there from the start.
        by_load: whether blocks are told apart by load, and not by path (SGLang).
    """

    __slots__ = ("_by_load", "_loads", "_paths")

    def __init__(self, names: Iterable[str], *, by_load: bool) -> None:
        self._by_load = by_load
        self._paths = dict.fromkeys(names, "")
        self._loads = dict.fromkeys(self._paths, 0)  # of each that was ever there

    @property
    def names(self) -> tuple[str, ...]:
        """Those that are there, in the order in which they were loaded."""
        return tuple(self._paths)

    def path_of(self, name: str | None) -> str:
        """By what blocks of an adapter are told from those of others of its name."""
        if name is None or name not in self._paths:
            return ""
        if self._by_load:
            return str(self._loads[name]) if self._loads[name] else ""
        return self._paths[name]

    def load(self, name: str, path: str, base: str, *, in_place: bool) -> bool:
        """Load an adapter; whether it has a new number.

        Raises:
            BadRequest: of vLLM: a field is empty, or it has the name of the base model; it is there, and not to be
                replaced.
        """
        is_new = name not in self._paths
        if self._by_load:
            if not is_new:
                raise BadRequest(f"Failed to load LoRA adapter {name} because it is already loaded")
        elif not name or not path:
            raise BadRequest("Both 'lora_name' and 'lora_path' must be provided.", None, _INVALID)
        elif name == base:
            raise BadRequest(f"The lora adapter name '{name}' conflicts with a served base model.", None, _INVALID)
        elif not is_new and not in_place:
            raise BadRequest(
                f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set "
                "'load_inplace' to True.",
                None,
                _INVALID,
            )
        self._paths[name] = path
        self._loads[name] = self._loads.get(name, -1) + 1
        return is_new

    def unload(self, name: str) -> None:
        """Forget an adapter.

        Raises:
            BadRequest: there is none of this name, or of vLLM it is empty.
        """
        if name in self._paths:
            del self._paths[name]
        elif self._by_load:
            raise BadRequest(f"LoRA with name {name} does not exist. Loaded LoRAs: {self._paths.keys()}")
        elif not name:
            raise BadRequest("'lora_name' needs to be provided to unload a LoRA adapter.", None, _INVALID)
        else:
            raise BadRequest(f"The lora adapter '{name}' cannot be found.", None, "NotFoundError", 404)

    def paths(self) -> dict[str, str]:
        """Of each that is there the path that it was loaded from."""
        return dict(self._paths)
