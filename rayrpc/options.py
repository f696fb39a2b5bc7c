"""Options of RPC backends, with torch's names, defaults and checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch

from rayrpc.errors import ConfigError

__all__ = [
    "DEFAULT_INIT_METHOD",
    "DEFAULT_NUM_WORKER_THREADS",
    "DEFAULT_PROCESS_GROUP_TIMEOUT",
    "DEFAULT_RPC_TIMEOUT_SEC",
    "DEFAULT_SHUTDOWN_TIMEOUT",
    "RpcBackendOptions",
    "TensorPipeRpcBackendOptions",
    "UNSET_RPC_TIMEOUT",
    "to_seconds",
    "validate_device_maps",
]

DEFAULT_RPC_TIMEOUT_SEC: float = 60.0
DEFAULT_INIT_METHOD = "env://"
DEFAULT_SHUTDOWN_TIMEOUT: float = 0
DEFAULT_NUM_WORKER_THREADS = 16
DEFAULT_PROCESS_GROUP_TIMEOUT = timedelta(milliseconds=2**31 - 1)
UNSET_RPC_TIMEOUT: float = -1.0

# torch's names of them
_DEFAULT_RPC_TIMEOUT_SEC = DEFAULT_RPC_TIMEOUT_SEC
_DEFAULT_INIT_METHOD = DEFAULT_INIT_METHOD
_DEFAULT_NUM_WORKER_THREADS = DEFAULT_NUM_WORKER_THREADS
_UNSET_RPC_TIMEOUT = UNSET_RPC_TIMEOUT

DeviceType = int | str | torch.device
DeviceMap = dict[torch.device, torch.device]


def to_seconds(value: Any, name: str = "timeout", of: str = "function") -> float:
    """Return a timeout of any real type as a float, as torch takes them.

    Args:
        value: a number, a numpy or torch scalar, a Fraction, ...
        name: what it is, for the error.
        of: what takes it, a ``function`` or a ``constructor``, for torch's text.

    Raises:
        TypeError: it is no real number.
    """
    if type(value) is float:
        return value
    kind = type(value)
    try:
        if hasattr(kind, "__float__") or hasattr(kind, "__index__"):
            return float(value)
    except (TypeError, ValueError, RuntimeError):
        pass  # a tensor of several elements, ...
    raise TypeError(
        f"incompatible {of} arguments: {name} must be a number of seconds, got {value!r}"
    )


def _check_timeout(value: Any, of: str) -> float:
    seconds = to_seconds(value, "rpc_timeout", of)
    if not seconds >= 0:
        raise ConfigError(
            f"rpc_timeout must be non-negative: a number of seconds, or 0 for none; got {value}"
        )
    return seconds


class RpcBackendOptions:
    """Options of any RPC backend.

    Args:
        rpc_timeout (float): default timeout of calls in seconds; 0: none.
        init_method (str): names the group: ``env://`` (MASTER_ADDR and MASTER_PORT),
            ``tcp://host:port``, ``file:///path`` or ``ray://name``.  No port is bound.

    Raises:
        TypeError: ``rpc_timeout`` is not a number.
        ValueError: ``rpc_timeout`` is negative.

    Source: ``torch.distributed.rpc.RpcBackendOptions``.
    """

    def __init__(
        self,
        rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = DEFAULT_INIT_METHOD,
    ) -> None:
        self._rpc_timeout = _check_timeout(rpc_timeout, "constructor")
        self.init_method = init_method

    @property
    def init_method(self) -> str:
        """What names the group."""
        return self._init_method

    @init_method.setter
    def init_method(self, value: str | bytes) -> None:
        if not isinstance(value, (str, bytes)):
            raise TypeError(
                f"incompatible constructor arguments: init_method must be a str, got {value!r}"
            )
        self._init_method = value.decode() if isinstance(value, bytes) else value

    @property
    def rpc_timeout(self) -> float:
        """Default timeout of calls in seconds; 0: none."""
        return self._rpc_timeout

    @rpc_timeout.setter
    def rpc_timeout(self, value: float) -> None:
        self._rpc_timeout = _check_timeout(value, "function")


class TensorPipeRpcBackendOptions(RpcBackendOptions):
    """Options of the backends TENSORPIPE and RAY.

    Args:
        num_worker_threads (int): how many received calls run at a time; 1 or more.
        rpc_timeout (float): default timeout of calls in seconds; 0: none.
        init_method (str): names the group, see ``RpcBackendOptions``.
        device_maps (dict): by callee's name, a map from this worker's devices to the callee's.
        devices (list): all local CUDA devices that calls may use; empty: all that are mapped.
        _transports, _channels: accepted and ignored; they choose TensorPipe's own transports.

    Raises:
        TypeError: an argument is not of its type.
        ValueError: a number is out of its range, a device is not a CUDA device, or a map is not
            one to one.

    Example:
        >>> options = rpc.TensorPipeRpcBackendOptions(rpc_timeout=10, init_method="ray://demo")
        >>> rpc.init_rpc("worker0", rpc_backend_options=options)

    Source: ``torch.distributed.rpc.TensorPipeRpcBackendOptions``.
    """

    def __init__(
        self,
        *,
        num_worker_threads: int = DEFAULT_NUM_WORKER_THREADS,
        rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = DEFAULT_INIT_METHOD,
        device_maps: Mapping[str, Mapping[DeviceType, DeviceType]] | None = None,
        devices: Sequence[DeviceType] | None = None,
        _transports: Sequence[str] | None = None,
        _channels: Sequence[str] | None = None,
    ) -> None:
        super().__init__(rpc_timeout, init_method)
        if isinstance(num_worker_threads, bool) or not isinstance(num_worker_threads, int):
            raise TypeError(
                "incompatible constructor arguments: num_worker_threads must be an int, got "
                f"{type(num_worker_threads).__name__}"
            )
        if num_worker_threads < 1:
            raise ConfigError(f"num_worker_threads must be positive, got {num_worker_threads}")
        self.num_worker_threads = num_worker_threads
        self.device_maps = device_maps or {}
        self.devices = [_to_device(device) for device in devices or ()]

    @property
    def device_maps(self) -> dict[str, DeviceMap]:
        """A copy of the device maps, by the callee's name."""
        return {to: dict(device_map) for to, device_map in self._device_maps.items()}

    @device_maps.setter
    def device_maps(self, maps: Mapping[str, Mapping[DeviceType, DeviceType]]) -> None:
        if not isinstance(maps, Mapping):
            raise TypeError(
                "incompatible constructor arguments: device_maps must be a dict of dicts, got "
                f"{maps!r}"
            )
        self._device_maps = {to: _to_device_map(each) for to, each in maps.items()}

    def set_device_map(self, to: str, device_map: Mapping[DeviceType, DeviceType]) -> None:
        """Add to the device map for one callee.

        Args:
            to (str): the callee's name.
            device_map (dict): from this worker's devices to the callee's, one to one.

        Raises:
            ValueError: two devices would map to one, or one to two.

        Source: ``torch.distributed.rpc.TensorPipeRpcBackendOptions.set_device_map``.
        """
        full = _to_device_map(device_map)
        current = self._device_maps.get(to, {})
        for source, target in full.items():
            if source in current and target != current[source]:
                raise ValueError(
                    "`set_device_map` only supports 1-to-1 mapping, trying"
                    f" to map {source} to {target} and {current[source]}"
                )
        self._device_maps[to] = {**current, **full}

    def set_devices(self, devices: Sequence[DeviceType]) -> None:
        """Set the local devices that calls may use.

        Args:
            devices (list): of int, str or torch.device; CUDA devices.

        Raises:
            ValueError: one is not a CUDA device.

        Source: ``torch.distributed.rpc.TensorPipeRpcBackendOptions.set_devices``.
        """
        self.devices = [_to_device(device) for device in devices]


#: torch's name of the native class
_TensorPipeRpcBackendOptionsBase = TensorPipeRpcBackendOptions


def _to_device(device: DeviceType) -> torch.device:
    device = torch.device(device)
    if device.type != "cuda":
        raise ValueError(
            f"`set_devices` expect a list of CUDA devices, but got device type {device.type}."
        )
    return device


def _to_device_map(device_map: Mapping[DeviceType, DeviceType]) -> DeviceMap:
    if not isinstance(device_map, Mapping):
        raise TypeError(
            "incompatible function arguments: a device map must be a dict from this worker's "
            f"devices to the callee's, got {device_map!r}"
        )
    full: DeviceMap = {}
    reverse: DeviceMap = {}
    for source, target in device_map.items():
        source, target = torch.device(source), torch.device(target)
        if target in reverse:
            raise ValueError(
                "`device_map` only supports 1-to-1 mapping, "
                f"trying to map {source} and {reverse[target]} to {target}"
            )
        full[source] = target
        reverse[target] = source
    return full


def validate_device_maps(peers: Mapping[str, Mapping[str, Any]], is_static: bool) -> None:
    """Check the device maps of all members against one another.

    Args:
        peers (dict): by worker name, its ``device_maps``, ``devices`` and ``device_count``.
        is_static (bool): all members are known; in a dynamic group some may be yet to join.

    Raises:
        ValueError: in torch's words: a worker's devices or maps name one twice, name one that
            does not exist, or (``is_static``) map to an unknown worker.
    """
    for name, peer in peers.items():
        devices, count = peer["devices"], peer["device_count"]
        if len(set(devices)) != len(devices):
            raise ValueError(f"Node {name} has duplicated devices\ndevices = {devices}")
        if not _exist(devices, count):
            raise ValueError(
                f"Node {name} has devices with invalid indices\n"
                f"devices = {devices}\n"
                f"device count = {count}"
            )
    names = list(peers)
    for source, peer in peers.items():
        maps = peer["device_maps"]
        if is_static and not set(maps).issubset(names):
            raise ValueError(
                f"Node {source} has invalid target node names in its device maps\n"
                f"device maps = {maps.keys()}\n"
                f"node names = {names}"
            )
        for target, device_map in maps.items():
            _check_map(source, peer, target, peers.get(target), device_map)


def _check_map(
    source: str,
    peer: Mapping[str, Any],
    target: str,
    target_peer: Mapping[str, Any] | None,
    device_map: DeviceMap,
) -> None:
    if len(set(device_map.values())) != len(device_map):
        raise ValueError(
            f"Node {source} has duplicated target devices in its device map for {target}\n"
            f"device map = {device_map}"
        )
    ends = [("source", peer, list(device_map))]
    if target_peer is not None:
        ends.append(("target", target_peer, list(device_map.values())))
    for end, owner, devices in ends:
        if owner["devices"]:
            if not set(devices).issubset(owner["devices"]):
                raise ValueError(
                    f"Node {source} has unexpected {end} devices in its device map for {target}\n"
                    f"device map = {device_map}\n"
                    f"devices = {owner['devices']}"
                )
        elif not _exist(devices, owner["device_count"]):
            raise ValueError(
                f"Node {source} has {end} devices with invalid indices in its device map for "
                f"{target}\n"
                f"device map = {device_map}\n"
                f"device count = {owner['device_count']}"
            )


def _exist(devices: Sequence[torch.device], count: int) -> bool:
    return all(
        d.type == "cpu" or (d.type == "cuda" and d.index is not None and 0 <= d.index < count)
        for d in devices
    )
