"""The programs beside tests that play whole recordings, as modules: two of them have one name, each in a folder of its own."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path


def player(path):
    """The module of a path below `tests`."""
    name = path.removesuffix(".py").replace("/", "_")
    if name not in sys.modules:
        spec = spec_from_file_location(name, Path(__file__).parent / path)
        sys.modules[name] = module = module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]
