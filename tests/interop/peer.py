"""The real thing: `dynamo._core` of ai-dynamo-runtime, where it is installed (extra `interop`)."""

from importlib import metadata

import pytest


def dynamo_core(*releases):
    """Return `dynamo._core`, or skip the module: it is not there, or of none of these releases ("1.2").

    Raises:
        pytest.skip.Exception: with the reason.
    """
    try:
        from dynamo import _core
    except ImportError as error:
        pytest.skip(f"needs dynamo._core of ai-dynamo-runtime (extra interop): {error}", allow_module_level=True)
    installed = metadata.version("ai-dynamo-runtime")
    if releases and ".".join(installed.split(".")[:2]) not in releases:
        wanted = " or ".join(releases)
        pytest.skip(f"needs ai-dynamo-runtime {wanted}, {installed} is installed", allow_module_level=True)
    return _core
