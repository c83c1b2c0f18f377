"""The LoRA adapters of a served engine. Clients load and unload them while it runs."""

from __future__ import annotations

from collections.abc import Iterable

from pytest_kvmock.servers.serve.request_checks import BadRequest

_INVALID = "InvalidUserInput"


class Adapters:
    """The adapters of one worker.

    vLLM's block names cover an adapter's name and path (events do not have the path), so old blocks are hit again after
    a reload from the same path. SGLang gives each load a new id, so old blocks are not hit. Blocks of unloaded adapters
    stay in the cache until they are evicted. Paths are not read: every path counts as valid. Sources:
    `entrypoints/openai/models/serving.py` of vLLM (the message about the base model's name is that of vLLM's other
    frontend); `lora/lora_manager.py` and `lora_registry.py` of SGLang.

    Args:
        names: the initial adapters.
        by_load: whether blocks are distinguished by load (SGLang); False: by path.
    """

    __slots__ = ("_by_load", "_loads", "_paths")

    def __init__(self, names: Iterable[str], *, by_load: bool) -> None:
        self._by_load = by_load
        self._paths = dict.fromkeys(names, "")
        self._loads = dict.fromkeys(self._paths, 0)  # of all adapters so far

    @property
    def names(self) -> tuple[str, ...]:
        """The loaded adapters, in the order of loading."""
        return tuple(self._paths)

    def path_of(self, name: str | None) -> str:
        """Return what distinguishes the blocks of an adapter from those of others with its name."""
        if name is None or name not in self._paths:
            return ""
        if self._by_load:
            return str(self._loads[name]) if self._loads[name] else ""
        return self._paths[name]

    def load(self, name: str, path: str, base: str, *, in_place: bool) -> bool:
        """Load an adapter; return whether it was not loaded before.

        Raises:
            BadRequest: the adapter is already loaded and may not be replaced; or, in vLLM, a field is empty or the name
                is that of the base model.
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
        """Unload an adapter.

        Raises:
            BadRequest: the name is not loaded, or, in vLLM, is empty.
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
        """Return the path of each loaded adapter, by name."""
        return dict(self._paths)
