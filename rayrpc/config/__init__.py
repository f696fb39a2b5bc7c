"""The settings of rayrpc: what each means, what is valid, and where its value comes from.

Four layers, each over the one before it::

    defaults  <  YAML file  <  RAYRPC_* environment  <  arguments

The file is the one given, else the one that ``RAYRPC_CONFIG`` names. Key ``rpc_timeout`` is
``RAYRPC_RPC_TIMEOUT`` in the environment, where a mapping is written as YAML. Where a key's default
is None, the text ``none`` or none at all means None too, in every layer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import math
import os
import re
import reprlib
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, TypeAlias

from rayrpc.errors import ConfigError

__all__ = ["Settings", "WorkerResources", "configure", "load", "settings", "use"]

_PREFIX = "RAYRPC_"
_FILE_VARIABLE = "RAYRPC_CONFIG"
_INTERNAL_PREFIX = "RAYRPC_INTERNAL_"
_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")


@dataclass(frozen=True)
class _Place:
    """Where a value stands, so that an error about it can say so."""

    source: str
    key: str = ""
    optional: bool = False

    def inside(self, suffix: str, optional: bool = False) -> _Place:
        return _Place(self.source, self.key + suffix, optional)

    def wrong(self, value: object, valid: str) -> ConfigError:
        none = ", or none" if self.optional else ""
        shown = reprlib.repr(value)
        return ConfigError(f"{self.key} (from {self.source}) is {shown}; it must be {valid}{none}")

    def unknown(self, name: object, valid: Iterable[str]) -> ConfigError:
        spelling = {key.lower(): key for key in valid}
        nearest = difflib.get_close_matches(str(name).lower(), spelling, n=1, cutoff=0.0)[0]
        within = f"{self.key}: " if self.key else ""
        return ConfigError(
            f"{within}unknown key {str(name)!r} (from {self.source}); the nearest valid key is "
            f"{spelling[nearest]!r}. Valid keys: {', '.join(spelling.values())}"
        )


# A check gives back the value in its final form or raises the place's ConfigError.
_Check: TypeAlias = Callable[[Any, _Place], Any]


def _scalar(kind: type[Any], valid: str, fits: Callable[[Any], Any]) -> _Check:
    accepted = (int, float) if kind is float else (kind,)

    def check(value: Any, place: _Place) -> Any:
        # A bool is an int to Python, and never what a number's author meant.
        right_type = isinstance(value, accepted) and isinstance(value, bool) is (kind is bool)
        if not right_type or not fits(value):
            raise place.wrong(value, valid)
        return kind(value)

    return check


def _choice(*choices: str) -> _Check:
    spelling = {choice.lower(): choice for choice in choices}

    def check(value: Any, place: _Place) -> str:
        if not isinstance(value, str) or value.lower() not in spelling:
            raise place.wrong(value, f"one of {', '.join(spelling.values())}")
        return spelling[value.lower()]

    return check


def _mapping(valid: str, item: _Check) -> _Check:
    def check(value: Any, place: _Place) -> dict[str, Any]:
        # A YAML key whose entries are all commented out reads as None.
        value = {} if value is None else value
        if not isinstance(value, Mapping) or not all(isinstance(k, str) and k for k in value):
            raise place.wrong(value, f"a mapping from {valid}")
        return {k: item(v, place.inside(f"[{k!r}]")) for k, v in value.items()}

    return check


def _plain(value: Any, place: _Place) -> Any:
    # Settings travel to every rank and back into YAML: no modules or other live objects.
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, (list, tuple)):
        return [_plain(each, place.inside(f"[{i}]")) for i, each in enumerate(value)]
    if isinstance(value, Mapping):
        return {k: _plain(each, place.inside(f"[{k!r}]")) for k, each in value.items()}
    raise place.wrong(value, "plain data: text, numbers, true, false, none, lists, mappings")


def _amount(value: Any, place: _Place) -> Any:
    if place.key.endswith(("['CPU']", "['GPU']", "['memory']", "['object_store_memory']")):
        raise place.wrong(value, "left out: num_cpus, num_gpus and memory stand for these")
    return _QUANTITY(value, place)


def _worker(value: Any, place: _Place) -> WorkerResources:
    if isinstance(value, WorkerResources):
        return value
    if value is not None and not isinstance(value, Mapping):
        raise place.wrong(value, f"a mapping with keys of {', '.join(_fields(WorkerResources))}")
    return WorkerResources(**_checked(WorkerResources, value or {}, place))


_FLAG = _scalar(bool, "true or false", lambda _: True)
_TEXT = _scalar(str, "text, not empty", str.strip)
_COUNT = _scalar(int, "a whole number, 1 or more", lambda n: n >= 1)
_SECONDS = _scalar(float, "seconds, 0 or more", lambda n: 0 <= n < math.inf)
_SOME_SECONDS = _scalar(float, "seconds, more than 0", lambda n: 0 < n < math.inf)
_QUANTITY = _scalar(float, "a number, 0 or more", lambda n: 0 <= n < math.inf)
_GPUS = _scalar(
    float,
    "a number, 0 or more, and whole above 1",
    lambda n: 0 <= n < math.inf and (n <= 1 or n % 1 == 0),
)
_ADDRESS = _scalar(
    str,
    'host:port, ray://host:port, "auto" or "local"',
    re.compile(r"auto|local|[\w.+-]+://\S+|\S+:\d+").fullmatch,
)
_AMOUNTS = _mapping("resource name to amount", _amount)
_WORKERS = _mapping("worker name or glob pattern to its resources", _worker)
_RUNTIME_ENV = _mapping("the names of Ray's runtime_env to plain data", _plain)


def _yaml(text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as exc:
        raise ValueError(str(exc)) from exc


def _flag_word(text: str) -> bool | str:
    word = text.strip().lower()
    return word in _TRUE if word in _TRUE + _FALSE else text


def _key(default: Any, check: _Check, doc: str, parse: Callable[[str], Any] = str.strip) -> Any:
    """Declare a key: what it takes, what it means, and how to read it from environment text."""
    about = {"doc": doc, "check": check, "parse": parse}
    if default == {}:
        return field(default_factory=dict, metadata=about)
    return field(default=default, metadata=about)


def _fields(owner: type[Any]) -> dict[str, dataclasses.Field[Any]]:
    return {each.name: each for each in dataclasses.fields(owner)}


def _checked(owner: type[Any], values: Mapping[Any, Any], place: _Place) -> dict[str, Any]:
    fields = _fields(owner)
    result: dict[str, Any] = {}
    for name, value in values.items():
        if name not in fields:
            raise place.unknown(name, fields)
        optional = fields[name].default is None
        text = value.strip().lower() if isinstance(value, str) else None
        if optional and (value is None or text in ("", "none")):
            result[name] = None
            continue
        within = place.inside(f".{name}" if place.key else name, optional)
        result[name] = fields[name].metadata["check"](value, within)
    return result


def _check_own(instance: Any) -> None:
    for name, value in _checked(type(instance), vars(instance), _Place("arguments")).items():
        object.__setattr__(instance, name, value)


@dataclass(frozen=True)
class WorkerResources:
    """What Ray sets aside for one worker.

    Raises:
        ConfigError: a value is not valid.
    """

    num_cpus: float = _key(0.0, _QUANTITY, "CPUs set aside.")
    num_gpus: float = _key(0.0, _GPUS, "GPUs set aside; a part of one is allowed.")
    memory: int | None = _key(None, _COUNT, "Bytes of memory set aside.")
    resources: Mapping[str, float] = _key({}, _AMOUNTS, "Amounts of Ray's custom resources.")

    def __post_init__(self) -> None:
        _check_own(self)


@dataclass(frozen=True)
class Settings:
    """Every setting of rayrpc, checked; a key's meaning is its field's ``metadata["doc"]``.

    Raises:
        ConfigError: a value is not valid.
    """

    address: str | None = _key(
        None,
        _ADDRESS,
        "Ray cluster to join: `host:port`, `ray://host:port`, `auto`, or `local` to always start "
        "one here. None: `RAY_ADDRESS`, else a local cluster that starts by itself and ends with "
        "the run.",
    )
    namespace: str = _key("rayrpc", _TEXT, "Ray namespace of rayrpc's named actors.")
    group: str | None = _key(
        None,
        _TEXT,
        "Group to join when `init_method` names none; workers then need no `MASTER_ADDR`, "
        "`MASTER_PORT` or `RANK`.",
    )
    transport: Literal["auto", "direct", "ray"] = _key(
        "auto",
        _choice("auto", "direct", "ray"),
        "How calls travel. `direct`: on connections between the workers, large tensors by Ray's "
        "object store. `ray`: as actor calls. `auto`: directly where that is possible, else as "
        "actor calls.",
    )
    rpc_timeout: float = _key(
        60.0, _SECONDS, "Seconds until a call without a timeout of its own fails; 0: never.", float
    )
    num_worker_threads: int = _key(
        16, _COUNT, "Threads with which a worker runs the calls it receives.", int
    )
    fork_workers: int | None = _key(
        None,
        _COUNT,
        "Workers that `rayrpc.jit.fork` starts for its tasks. None: one for each CPU.",
        int,
    )
    init_timeout: float = _key(
        60.0, _SOME_SECONDS, "Seconds that `init_rpc` waits for the group's other members.", float
    )
    placement_timeout: float = _key(
        30.0, _SECONDS, "Seconds that a rank may wait for resources that others hold.", float
    )
    workers: Mapping[str, WorkerResources] = _key(
        {},
        _WORKERS,
        "Resources by worker name or glob pattern: any of `num_cpus`, `num_gpus`, `memory` "
        "(bytes) and `resources` (Ray's custom ones). The exact name wins, else the last "
        "pattern that matches, as a whole; without either, nothing is set aside.",
        _yaml,
    )
    placement_strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] | None = _key(
        None,
        _choice("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"),
        "How ranks spread over nodes, as one placement group: `PACK`, `SPREAD`, `STRICT_PACK` or "
        "`STRICT_SPREAD`. None: Ray places each rank by itself.",
    )
    runtime_env: Mapping[str, Any] | None = _key(
        None, _RUNTIME_ENV, "Ray's `runtime_env` for the workers that rayrpc starts.", _yaml
    )
    dashboard: bool = _key(False, _FLAG, "Whether a local cluster has a dashboard.", _flag_word)
    local_num_cpus: int | None = _key(
        None, _COUNT, "CPUs that a local cluster announces. None: this machine's.", int
    )
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = _key(
        "WARNING",
        _choice("DEBUG", "INFO", "WARNING", "ERROR"),
        "Least severe of rayrpc's messages to log: `DEBUG`, `INFO`, `WARNING` or `ERROR`.",
    )
    log_to_terminal: bool = _key(
        True, _FLAG, "Whether ranks' output reaches the terminal of `rayrpc run`.", _flag_word
    )

    def __post_init__(self) -> None:
        _check_own(self)

    def resources_for(self, name: str) -> WorkerResources:
        """Look up what to set aside for a worker.

        An entry under the exact name wins; else the last pattern that matches, as a whole (entries
        are not merged). Patterns are case-sensitive globs: ``*``, ``?``, ``[0-9]``.

        Args:
            name: the worker's name.

        Returns:
            The entry, or nothing at all set aside where none matches.
        """
        if name in self.workers:
            return self.workers[name]
        matching = [each for pattern, each in self.workers.items() if fnmatchcase(name, pattern)]
        return matching[-1] if matching else WorkerResources()

    def replace(self, **changes: Any) -> Settings:
        """Make settings that differ in some keys.

        Raises:
            ConfigError: a key is unknown or a value is not valid.
        """
        return dataclasses.replace(self, **_checked(Settings, changes, _Place("arguments")))

    def to_dict(self) -> dict[str, Any]:
        """Turn into plain data that pickles and that YAML can hold; `from_dict` reads it back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Settings:
        """Make settings from plain data; keys left out have their defaults.

        Raises:
            ConfigError: a key is unknown or a value is not valid.
        """
        return cls(**_checked(cls, values, _Place("Settings.from_dict")))


def _from_file(path: Path, source: str) -> dict[str, Any]:
    try:
        values = _yaml(path.expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise ConfigError(f"cannot read {source}: {exc}") from exc
    if values is not None and not isinstance(values, Mapping):
        raise ConfigError(f"{source} must hold a mapping, `key: value` on each line")
    return _checked(Settings, values or {}, _Place(source))


def _from_environ(environ: Mapping[str, str]) -> dict[str, Any]:
    fields = {_PREFIX + name.upper(): key for name, key in _fields(Settings).items()}
    values: dict[str, Any] = {}
    for variable, text in environ.items():
        ours = variable.startswith(_PREFIX) and not variable.startswith(_INTERNAL_PREFIX)
        if not ours or variable == _FILE_VARIABLE:
            continue
        if variable not in fields:
            raise _Place("the environment").unknown(variable, [*fields, _FILE_VARIABLE])
        key = fields[variable]
        value: Any = text
        # What does not parse stays text, for the check to take as none or refuse in its words.
        with contextlib.suppress(ValueError):
            value = key.metadata["parse"](text)
        place = _Place(f"environment variable {variable}")
        values |= _checked(Settings, {key.name: value}, place)
    return values


def load(
    path: str | os.PathLike[str] | None = None,
    environ: Mapping[str, str] | None = None,
    **overrides: Any,
) -> Settings:
    """Read settings: defaults, under the file, under the environment, under `overrides`.

    Args:
        path: YAML file; None: the one that ``RAYRPC_CONFIG`` names, if any.
        environ: the environment; None: ``os.environ``.
        overrides: values by key. One that is given counts, be it None.

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
    values |= _checked(Settings, overrides, _Place("arguments"))
    return Settings(**values)


_lock = threading.RLock()
_current: Settings | None = None


def settings() -> Settings:
    """Give this process's current settings, loaded on first use.

    Raises:
        ConfigError: they were not loaded yet, and can't be.
    """
    with _lock:
        return use(load()) if _current is None else _current


def configure(path: str | os.PathLike[str] | None = None, **overrides: Any) -> Settings:
    """Load settings and make them this process's current ones.

    Args:
        path: YAML file, as for `load`.
        overrides: values by key, as for `load`.

    Raises:
        ConfigError: as for `load`; the current settings stay what they were.
    """
    return use(load(path, **overrides))


def use(new: Settings) -> Settings:
    """Make `new` this process's current settings; no file or environment is read."""
    global _current
    with _lock:
        _current = new
    return new
