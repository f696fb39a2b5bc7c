"""The keys of the settings: what each means, what is valid, and its default."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from rayrpc.config.checks import (
    ADDRESS,
    AMOUNTS,
    COUNT,
    FLAG,
    GPUS,
    PEER_SECONDS,
    PORTS,
    POSITIVE_SECONDS,
    QUANTITY,
    RUNTIME_ENV,
    SECONDS,
    TEXT,
    TEXTS,
    Place,
    check_fields,
    checked,
    choice,
    fields_of,
    key,
    mapping,
)

__all__ = ["Settings", "WorkerResources", "parse_yaml"]
_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")


def _worker(value: Any, place: Place) -> WorkerResources:
    if isinstance(value, WorkerResources):
        return value
    if value is not None and not isinstance(value, Mapping):
        raise place.wrong(value, f"a mapping with keys of {', '.join(fields_of(WorkerResources))}")
    return WorkerResources(**checked(WorkerResources, value or {}, place))


_WORKERS = mapping("worker name or glob pattern to its resources", _worker)


def parse_yaml(text: str) -> Any:
    """Parse YAML.

    Raises:
        ValueError: it is none.
    """
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as exc:
        raise ValueError(str(exc)) from exc


def _flag_word(text: str) -> bool | str:
    word = text.strip().lower()
    return word in _TRUE if word in _TRUE + _FALSE else text


@dataclass(frozen=True)
class WorkerResources:
    """What Ray sets aside for one worker.

    Args:
        num_cpus (float): CPUs.
        num_gpus (float): GPUs; a part of one is allowed.
        memory (int, optional): bytes; None: nothing is set aside.
        resources (dict[str, float]): amounts of Ray's custom resources by name.

    Raises:
        ConfigError: a value is not valid.
        TypeError: a key is unknown.

    Source: rayrpc's own.
    """

    num_cpus: float = key(0.0, QUANTITY, "CPUs set aside.")
    num_gpus: float = key(0.0, GPUS, "GPUs set aside; a part of one is allowed.")
    memory: int | None = key(None, COUNT, "Bytes of memory set aside.")
    resources: Mapping[str, float] = key({}, AMOUNTS, "Amounts of Ray's custom resources.")

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class Settings:
    """Every setting of rayrpc, checked and frozen; timeouts are in seconds.

    Args:
        kwargs: values by key; a key's meaning is its field's ``metadata["doc"]``.

    Raises:
        ConfigError: a value is not valid.
        TypeError: a key is unknown.

    Source: rayrpc's own.
    """

    address: str | None = key(
        None,
        ADDRESS,
        "Ray cluster to join: `host:port`, `ray://host:port`, `auto`, or `local` to always start "
        "one here. None: `RAY_ADDRESS`, else a local cluster that starts by itself and ends with "
        "the run.",
    )
    namespace: str = key("rayrpc", TEXT, "Ray namespace of rayrpc's named actors.")
    group: str | None = key(
        None,
        TEXT,
        "Group to join when `init_method` names none; workers then need no `MASTER_ADDR`, "
        "`MASTER_PORT` or `RANK`.",
    )
    transport: Literal["auto", "direct", "ray"] = key(
        "auto",
        choice("auto", "direct", "ray"),
        "How calls travel. `direct`: on connections between the workers. `ray`: as actor calls, "
        "large tensors by Ray's object store. `auto`: directly where that is possible, else as "
        "actor calls.",
    )
    listen_host: str | None = key(
        None,
        TEXT,
        "Address, host name or network interface at which a worker listens for workers of other "
        "nodes; `0.0.0.0` or `::`: at all. None: `TP_SOCKET_IFNAME`, else the address of its Ray "
        "node.",
    )
    listen_ports: str | None = key(
        None,
        PORTS,
        "Ports that workers may listen at, `FIRST-LAST`: one for each worker of a node. None: any "
        "free port.",
    )
    announce_host: str | None = key(
        None,
        TEXT,
        "Address, host name or network interface that workers of other nodes connect to. None: "
        "where the worker listens.",
    )
    rpc_timeout: float = key(
        60.0, SECONDS, "Seconds until a call without a timeout of its own fails; 0: never.", float
    )
    cancel_on_interrupt: bool = key(
        True,
        FLAG,
        "A blocking call that Ctrl-C interrupts is cancelled: its function is interrupted, too.",
        _flag_word,
    )
    slow_call: float = key(
        30.0,
        SECONDS,
        "Seconds after which a call that waits for its reply is logged, once, with where it "
        "stands; 0: never.",
        float,
    )
    num_worker_threads: int = key(
        16, COUNT, "Threads with which a worker runs the calls it receives.", int
    )
    fork_workers: int | None = key(
        None,
        COUNT,
        "Workers that `rayrpc.jit.fork` starts for its tasks. None: one for each CPU.",
        int,
    )
    peer_timeout: float = key(
        10.0,
        PEER_SECONDS,
        "Seconds after which a host that does not answer is lost, and its workers with it.",
        float,
    )
    init_timeout: float = key(
        60.0,
        POSITIVE_SECONDS,
        "Seconds that `init_rpc` waits for the group's other members.",
        float,
    )
    placement_timeout: float = key(
        30.0, SECONDS, "Seconds that a rank may wait for resources that others hold.", float
    )
    workers: Mapping[str, WorkerResources] = key(
        {},
        _WORKERS,
        "Resources by worker name or glob pattern: any of `num_cpus`, `num_gpus`, `memory` "
        "(bytes) and `resources` (Ray's custom ones). The exact name wins, else the last "
        "pattern that matches, as a whole; without either, nothing is set aside.",
        parse_yaml,
    )
    placement_strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] | None = key(
        None,
        choice("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"),
        "How ranks spread over nodes, as one placement group: `PACK`, `SPREAD`, `STRICT_PACK` or "
        "`STRICT_SPREAD`. None: Ray places each rank by itself.",
    )
    runtime_env: Mapping[str, Any] | None = key(
        None, RUNTIME_ENV, "Ray's `runtime_env` for the workers that rayrpc starts.", parse_yaml
    )
    working_dir: str | None = key(
        None,
        TEXT,
        "Folder that is sent to hosts that do not have it, with the program's modules and files. "
        "None: that of the script.",
    )
    working_dir_excludes: tuple[str, ...] = key(
        (),
        TEXTS,
        "Names in that folder, or paths relative to it, that are not sent; with `*`, `?`, "
        "`[a-z]`. `.git`, `.venv`, caches and the like never are.",
        parse_yaml,
    )
    dashboard: bool = key(
        False,
        FLAG,
        "Whether a local cluster has a dashboard, by the extra `dashboard`.",
        _flag_word,
    )
    local_num_cpus: int | None = key(
        None, COUNT, "CPUs that a local cluster announces. None: this machine's.", int
    )
    idle_timeout: float = key(
        600.0,
        SECONDS,
        "Seconds after which the cluster that `rayrpc up` keeps ends, if none uses it; 0: never.",
        float,
    )
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = key(
        "WARNING",
        choice("DEBUG", "INFO", "WARNING", "ERROR"),
        "Least severe of rayrpc's messages to log: `DEBUG`, `INFO`, `WARNING` or `ERROR`.",
    )
    full_traceback: bool = key(
        False,
        FLAG,
        "Whether the tracebacks of errors on other workers show rayrpc's own frames, too.",
        _flag_word,
    )
    log_to_terminal: bool = key(
        True,
        FLAG,
        "Whether what workers print reaches the terminal of the program that started them.",
        _flag_word,
    )
    metrics: bool = key(
        False,
        FLAG,
        "Whether workers record metrics, for Prometheus at the port of their Ray node.",
        _flag_word,
    )
    profile_calls: bool = key(
        False,
        FLAG,
        "Whether calls are rows of `torch.profiler`, which torch's own calls are not.",
        _flag_word,
    )
    prefix_output: Literal["auto", "always", "never"] = key(
        "auto",
        choice("auto", "always", "never"),
        "Whether each line of a worker's output begins with its name, and its host if there are "
        "several. `auto`: those of ranks on a terminal, and those of served workers.",
    )
    log_dir: str | None = key(
        None, TEXT, "Folder for files of the workers' output, one a worker. None: none are kept."
    )

    def __post_init__(self) -> None:
        check_fields(self)

    def resources_for(self, name: str) -> WorkerResources:
        """Look up what to set aside for a worker.

        An entry under the exact name wins; else the last pattern that matches, as a whole (entries
        are not merged). Patterns are case-sensitive globs: ``*``, ``?``, ``[0-9]``.

        Args:
            name (str): the worker's name.

        Returns:
            WorkerResources: the entry; where none matches, one that sets nothing aside.
        """
        if name in self.workers:
            return self.workers[name]
        matching = [each for pattern, each in self.workers.items() if fnmatchcase(name, pattern)]
        return matching[-1] if matching else WorkerResources()

    def replace(self, **changes: object) -> Settings:
        """Make settings that differ in some keys.

        Args:
            changes: values by key.

        Returns:
            Settings: new ones; these stay as they are.

        Raises:
            ConfigError: a key is unknown or a value is not valid.
        """
        return dataclasses.replace(self, **checked(Settings, changes, Place("arguments")))

    def to_dict(self) -> dict[str, Any]:
        """Return a copy in plain data, for pickle, YAML and ``from_dict``."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Settings:
        """Make settings from plain data.

        Args:
            values (dict): by key; keys left out have their defaults.

        Returns:
            Settings: checked.

        Raises:
            ConfigError: a key is unknown or a value is not valid.
        """
        return cls(**checked(cls, values, Place("Settings.from_dict")))
