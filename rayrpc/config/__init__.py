"""The settings of rayrpc, and where their values come from.

Four layers, each overrides the one before it::

    defaults  <  YAML file  <  RAYRPC_* environment  <  arguments

The file is the one given, else the one that ``RAYRPC_CONFIG`` names. Key ``rpc_timeout`` is
``RAYRPC_RPC_TIMEOUT`` in the environment, where a mapping is written as YAML. Where a key's default
is None, the text ``none`` and empty text mean None too, in every layer.

- ``keys``: ``Settings``, what each key means, its default and what is valid.
- ``checks``: how a value is checked, and the errors.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rayrpc.config.checks import Place, checked, fields_of
from rayrpc.config.keys import Settings, WorkerResources, parse_yaml
from rayrpc.errors import ConfigError

__all__ = ["Settings", "WorkerResources", "configure", "load", "settings", "use"]

_PREFIX = "RAYRPC_"
_FILE_VARIABLE = "RAYRPC_CONFIG"
_INTERNAL_PREFIX = "RAYRPC_INTERNAL_"


def _from_file(path: Path, source: str) -> dict[str, Any]:
    try:
        values = parse_yaml(path.expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise ConfigError(f"cannot read {source}: {exc}") from exc
    if values is not None and not isinstance(values, Mapping):
        raise ConfigError(f"{source} must hold a mapping, `key: value` on each line")
    return checked(Settings, values or {}, Place(source))


def _from_environ(environ: Mapping[str, str]) -> dict[str, Any]:
    fields = {_PREFIX + name.upper(): each for name, each in fields_of(Settings).items()}
    values: dict[str, Any] = {}
    for variable, text in environ.items():
        ours = variable.startswith(_PREFIX) and not variable.startswith(_INTERNAL_PREFIX)
        if not ours or variable == _FILE_VARIABLE:
            continue
        if variable not in fields:
            raise Place("the environment").unknown(variable, [*fields, _FILE_VARIABLE])
        declared = fields[variable]
        value: Any = text
        # What does not parse stays text, for the check to take as none or refuse in its words.
        with contextlib.suppress(ValueError):
            value = declared.metadata["parse"](text)
        place = Place(f"environment variable {variable}")
        values |= checked(Settings, {declared.name: value}, place)
    return values


def load(
    path: str | os.PathLike[str] | None = None,
    environ: Mapping[str, str] | None = None,
    **overrides: object,
) -> Settings:
    """Read settings from the file, the environment and arguments; each overrides the one before.

    Args:
        path (str | PathLike, optional): YAML file; None: the one that ``RAYRPC_CONFIG`` names.
        environ (dict[str, str], optional): the environment; None: ``os.environ``.
        overrides: values by key; None is a value, too.

    Returns:
        Settings: all of them; the process's current ones stay what they were.

    Raises:
        ConfigError: the file can't be read, a key is unknown or a value is not valid.
    """
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    if path is not None:
        values |= _from_file(Path(path), f"file {os.fspath(path)}")
    elif named := environ.get(_FILE_VARIABLE):
        values |= _from_file(Path(named), f"file {named}, named by {_FILE_VARIABLE}")
    values |= _from_environ(environ)
    values |= checked(Settings, overrides, Place("arguments"))
    return Settings(**values)


_lock = threading.RLock()
_current: Settings | None = None


def settings() -> Settings:
    """Return this process's current settings, loaded on first use.

    Raises:
        ConfigError: the first use failed to load them; see ``load``.

    Source: rayrpc's own.
    """
    with _lock:
        result = use(load()) if _current is None else _current
    return result


def configure(path: str | os.PathLike[str] | None = None, **overrides: object) -> Settings:
    """Load settings and make them this process's current ones.

    Groups and workers that exist keep theirs; call it before ``init_rpc``.

    Args:
        path (str | PathLike, optional): YAML file; None: the one that ``RAYRPC_CONFIG`` names.
        overrides: values by key, such as ``rpc_timeout=10`` (seconds); they override the
            environment, which overrides the file.

    Returns:
        Settings: the current ones from now on.

    Raises:
        ConfigError: the file can't be read, a key is unknown or a value is not valid; the current
            settings stay what they were.

    Example:
        >>> rayrpc.configure("configs/local.yaml", rpc_timeout=10).rpc_timeout
        10.0

    Source: rayrpc's own.
    """
    return use(load(path, None, **overrides))


def use(new: Settings) -> Settings:
    """Make settings this process's current ones; no file or environment is read.

    Args:
        new (Settings): the current ones from now on.

    Returns:
        Settings: the same.
    """
    global _current
    with _lock:
        _current = new
    return new
