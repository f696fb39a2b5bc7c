"""Device maps: the device of a tensor at the receiver.

As in torch, arguments use the caller's map for the callee, and the result uses the reverse of the
same map.  Tensors on other devices than the CPU are copied to host memory, sent, and copied to the
device that the map names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from rayrpc._protocol.membership import Member
from rayrpc._runtime.serialization.tensors import NoDeviceError
from rayrpc.errors import DeviceMapError

__all__ = ["DeviceMap", "DeviceRoutes", "place", "reduce_mapped", "refuse"]

DeviceMap = Mapping[torch.device, torch.device]

_CPU = torch.device("cpu")
# Devices whose tensors are not copied to host memory.
_UNMAPPED = ("cpu", "meta")


class DeviceRoutes:
    """The device maps that concern one worker.

    Args:
        name (str): of this worker.
        maps (Mapping): its own device maps, by callee's name.
    """

    def __init__(self, name: str, maps: Mapping[str, DeviceMap]) -> None:
        self._name = name
        self._maps = {to: dict(device_map) for to, device_map in maps.items() if device_map}
        self._reverse: dict[int, DeviceMap] = {}

    def add(self, member: Member) -> None:
        """Add the maps of a member that joined."""
        to_me = member.extra.get("device_maps", {}).get(self._name, {})
        # strings, because the directory does not import torch
        reverse = {torch.device(mine): torch.device(theirs) for theirs, mine in to_me.items()}
        if reverse:
            self._reverse[member.id] = reverse
        else:
            self._reverse.pop(member.id, None)

    def of_calls(self, to: str) -> DeviceMap | None:
        """Return the map for requests to a callee, by its name."""
        return self._maps.get(to) if self._maps else None

    def of_results(self, to: int) -> DeviceMap | None:
        """Return the map for replies to a caller, by its id."""
        return self._reverse.get(to) if self._reverse else None


def refuse(device: torch.device, what: str, peer: str) -> DeviceMapError:
    """Return the error for a tensor on a device that no map names.

    Args:
        device: of the tensor.
        what: "Request" or "Response".
        peer: name of the receiver.
    """
    return DeviceMapError(  # torch's words
        "TensorPipe RPC backend only supports CPU tensors by default, please move your tensors to "
        "CPU before sending them over RPC, or call `set_device_map` on "
        f"`TensorPipeRpcBackendOptions` to explicitly configure device mapping. {what} device "
        f"mapping is not available for destination {peer} for device {device}."
    )


def reduce_mapped(
    tensor: torch.Tensor, devices: DeviceMap, reduce: Callable[[torch.Tensor], Any]
) -> Any:
    """Return the pickle reduction of a tensor by a device map.

    Args:
        tensor: on any device.
        devices: the map.
        reduce: makes the reduction of a tensor in host memory.

    Raises:
        NoDeviceError: the map does not name the tensor's device.
    """
    source = tensor.device
    target = devices.get(source)
    if target is None and source.type in _UNMAPPED:
        target = source
    if target is None:
        raise NoDeviceError(source)
    if tensor.layout is not torch.strided or (source == target and source.type in _UNMAPPED):
        return reduce(tensor)  # the inner dense tensors of another layout are reduced by this too
    host = tensor.detach().to(_CPU)
    return place, (*reduce(host), str(target), tensor.requires_grad)


def place(
    rebuild: Callable[..., torch.Tensor], args: tuple[Any, ...], device: str, requires_grad: bool
) -> torch.Tensor:
    """Return a tensor on the device that the sender's map names, for use on any stream."""
    tensor = rebuild(*args).to(device)
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()
    return tensor.requires_grad_() if requires_grad else tensor
