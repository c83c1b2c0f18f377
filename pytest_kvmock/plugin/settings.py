"""The settings of a run, read from command line and ini file.

They are read and checked once, when pytest is configured, and kept as plain mappings that hold only given values, so
that 0, False and "" count as given. `precedence.py` decides which value wins.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from glob import glob
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pytest

from pytest_kvmock.plugin.options import OPTIONS, PROFILE_KEYS, Option, dest_of

if TYPE_CHECKING:
    from pytest_kvmock.engines.backends import EngineProfile
    from pytest_kvmock.engines.profiles import NamedProfile


class Settings(NamedTuple):
    """The values that were given on the command line and in the ini file, checked.

    Attributes:
        command_line: values by key of `OPTIONS`.
        ini: the same.
        profiles: the named engine profiles from the files that the ini file lists.
    """

    command_line: Mapping[str, Any]
    ini: Mapping[str, Any]
    profiles: Mapping[str, NamedProfile] = MappingProxyType({})

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key that neither marker nor fixture can set: command line over ini."""
        return self.command_line.get(key, self.ini.get(key, default))


UNJUDGED: Final = "kvmock.unjudged"
"""The property in the report of a test whose contract cannot judge all of its subject: the class, and what is
missing."""

SETTINGS: Final = pytest.StashKey[Settings]()


def read_settings(config: pytest.Config) -> Settings:
    """Read and check the settings on the command line and in the ini file.

    Raises:
        pytest.UsageError: an invalid value. The message names the given value, the allowed values and the place.
    """
    command_line, ini = read_options(config, OPTIONS)
    _check_ini_names(config)
    settings = Settings(command_line, ini, _named_profiles(config, ini))
    _check_profile(config, settings)
    _check_trace(config, settings)
    check_directory(config, settings.get("capture"), "--kv-capture")
    check_directory(config, settings.get("html"), "--kv-html")
    return settings


def read_options(config: pytest.Config, options: Iterable[Option]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read and check the values of these options on the command line and in the ini file, by key.

    Raises:
        pytest.UsageError: see `read_settings`.
    """
    command_line: dict[str, Any] = {}
    ini: dict[str, Any] = {}
    for option in options:
        if option.flag:
            value = config.getoption(dest_of(option))
            if value is not None:
                command_line[option.key] = _checked(option, value, option.flag)
        if option.ini:
            try:
                value = config.getini(option.ini)
            except (TypeError, ValueError, pytest.UsageError) as error:  # 8.4 to 9.1 raise the first two
                expected = {"int": "an integer", "bool": "true or false"}.get(option.ini_type, "a string")
                raise pytest.UsageError(f"{ini_place(config, option)}: {expected} is expected: {error}") from None
            if value is not None:
                ini[option.key] = _checked(option, value, ini_place(config, option))
    return command_line, ini


def _check_ini_names(config: pytest.Config) -> None:
    """Check the names of settings that begin like ours: pytest ignores unknown ones, or warns."""
    given = [(str(text).partition("=")[0], "-o") for text in config.getoption("override_ini", None) or ()]
    if config.inipath is not None:
        text = config.inipath.read_text(encoding="utf-8", errors="replace")
        if "kvmock_" in text:
            given += [(name, config.inipath.name) for name in _names_in(config.inipath, text)]
    known = [option.ini for option in OPTIONS if option.ini]
    for name, place in given:
        if name.startswith("kvmock_") and name not in known:
            try:
                config.getini(name)  # another plugin may have it
            except (KeyError, ValueError):
                from pytest_kvmock.values.checks import unknown_text

                raise pytest.UsageError(f"{place}: {unknown_text('setting', name, known)}") from None


def _names_in(path: Path, text: str) -> list[str]:
    """Return the names of the settings in an ini file of pytest."""
    if path.suffix == ".toml":
        import tomllib

        document = tomllib.loads(text)
        table = document.get("pytest") or document.get("tool", {}).get("pytest", {})
        return [*table, *table.get("ini_options", {})]
    found, section = [], ""
    for line in text.splitlines():
        if line.startswith("["):
            section = line.strip("[] \t")
        elif section in ("pytest", "tool:pytest") and line[:1].isalpha():  # an indented line continues a value
            found.append(line.replace(":", "=").partition("=")[0].strip())
    return found


def _checked(option: Option, value: object, place: str) -> Any:
    try:
        return option.check(value)
    except ValueError as error:
        raise pytest.UsageError(f"{place}: {error}") from None


def ini_place(config: pytest.Config, option: Option) -> str:
    """Return the place of an option's ini setting, for messages."""
    overrides = config.getoption("override_ini", None) or ()
    if any(str(text).startswith(f"{option.ini}=") for text in overrides):
        return f"-o {option.ini}"
    return option.ini if config.inipath is None else f"{config.inipath.name}: {option.ini}"


def _named_profiles(config: pytest.Config, ini: Mapping[str, Any]) -> Mapping[str, NamedProfile]:
    if "profiles" not in ini:
        return {}
    from pytest_kvmock.engines.profiles import read_profiles
    from pytest_kvmock.values.strict_yaml import YamlError

    home = _home(config)
    files: dict[Path, str] = {}  # by path, so that each file is read once; with the name for messages
    for pattern in ini["profiles"]:
        found = sorted(glob(os.path.join(home, pattern), recursive=True))  # noqa: PTH118, PTH207 - an absolute pattern too
        if not found:
            option = next(option for option in OPTIONS if option.key == "profiles")
            raise pytest.UsageError(f"{ini_place(config, option)}: no such file: {pattern!r}")
        for path in map(Path, found):
            files[path] = str(path.relative_to(home)) if path.is_relative_to(home) else str(path)
    try:
        return read_profiles(files.items())
    except YamlError as error:
        raise pytest.UsageError(str(error)) from None


def profile_name(value: object, profiles: Mapping[str, NamedProfile]) -> str:
    """Read the name of an existing profile."""
    if not isinstance(value, str):
        raise ValueError(f"got {value!r}; allowed: the name of a profile")  # noqa: TRY004 - one family of errors
    if value not in profiles:
        from pytest_kvmock.values.checks import did_you_mean

        known = ", ".join(f"{name} ({profile.place.file})" for name, profile in profiles.items())
        hint = f"known: {known}" if known else "none is known: ini kvmock_profiles names their files"
        raise ValueError(f"unknown profile {value!r}{did_you_mean(value, profiles, hint)}")
    return value


def base_profile(settings: Settings) -> EngineProfile:
    """Return the profile of the ini file: its named profile, overridden by its single fields."""
    name = settings.ini.get("profile")
    named = {} if name is None else settings.profiles[name].fields
    return profile_of({**named, **settings.ini})


def _check_profile(config: pytest.Config, settings: Settings) -> None:
    ini = settings.ini
    for option in OPTIONS:
        if option.key == "profile" and option.key in ini:
            try:
                profile_name(ini["profile"], settings.profiles)
            except ValueError as error:
                raise pytest.UsageError(f"{ini_place(config, option)}: {error}") from None
        if option.ini and option.key in PROFILE_KEYS and option.key in ini:
            try:
                profile_of({option.key: ini[option.key]})
            except ValueError as error:
                raise pytest.UsageError(f"{ini_place(config, option)}: {error}") from None
    for option in OPTIONS:
        if option.key in ("workers", "dp_size") and option.key in ini:  # valid alone, too large together
            try:
                base_profile(settings)
            except ValueError as error:
                raise pytest.UsageError(f"{ini_place(config, option)}: {error}") from None


def _check_trace(config: pytest.Config, settings: Settings) -> None:
    path = trace_path(config, settings)
    if path is not None and not path.is_file():
        option = next(option for option in OPTIONS if option.key == "trace")
        place = option.flag if "trace" in settings.command_line else ini_place(config, option)
        raise pytest.UsageError(f"{place}: no such file: {os.fspath(path)!r}")


def check_directory(config: pytest.Config, wanted: str | None, flag: str) -> None:
    """Check the directory for files to write; None if no files are written."""
    if wanted is None:
        return
    path = Path(config.invocation_params.dir, wanted)
    if not wanted or any(part.exists() and not part.is_dir() for part in (path, *path.parents)):
        raise pytest.UsageError(f"{flag}: got {wanted!r}; allowed: a directory, which need not exist yet")


def trace_path(config: pytest.Config, settings: Settings) -> Path | None:
    """Return the path of the trace, relative to the working directory, or to the ini file that names it; None if there
    is none.
    """
    if "trace" in settings.command_line:
        return Path(config.invocation_params.dir, settings.command_line["trace"])
    if "trace" not in settings.ini:
        return None
    return Path(_home(config), settings.ini["trace"])


def _home(config: pytest.Config) -> Path:
    """Return the folder that paths in the ini file are relative to."""
    return config.invocation_params.dir if config.inipath is None else config.inipath.parent


def profile_of(values: Mapping[str, Any]) -> EngineProfile:
    """Make a profile from the entries of `values` that are its fields.

    Raises:
        ValueError: a field is out of range.
    """
    from pytest_kvmock.engines.backends import EngineProfile

    return EngineProfile(**{key: values[key] for key in PROFILE_KEYS if key in values})
