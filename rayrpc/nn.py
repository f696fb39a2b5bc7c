"""Modules that live on another worker, as ``torch.distributed.nn``."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.remote_device import _remote_device
from torch.futures import Future

from rayrpc import api
from rayrpc._runtime import current
from rayrpc._runtime.serialization.reducers import add_reducer
from rayrpc.rref_proxy import RRef

__all__ = ["RemoteModule"]

# The attributes in a RemoteModule's pickle; the rest is ``nn.Module``'s, and means nothing here.
_PICKLED = (
    "on",
    "device",
    "is_device_map_set",
    "is_scriptable",
    "generated_methods",
    "module_rref",
)


def forward_async(self: RemoteModule, *args: Any, **kwargs: Any) -> Future[Any]:
    """Start the module's ``forward`` on its worker.

    Args:
        args, kwargs: for the module's ``forward``; tensors of any shape.

    Returns:
        A Future of its result, or error. A call takes the default timeout of RPC at most.

    Raises:
        RuntimeError: RPC is not initialized.

    Source: ``torch.distributed.nn.RemoteModule.forward_async``.
    """
    future: Future[Any] = _call_forward(api.rpc_async, self, args, kwargs)
    return future


def forward(self: RemoteModule, *args: Any, **kwargs: Any) -> Any:
    """Run the module's ``forward`` on its worker, and wait for the result.

    Args:
        args, kwargs: for the module's ``forward``; tensors of any shape.

    Returns:
        What it returns.

    Raises:
        RuntimeError: RPC is not initialized.
        Exception: ``forward`` raised it.
        WorkerDiedError: the worker died.
        CallTimeoutError: it took longer than the default timeout of RPC.

    Source: ``torch.distributed.nn.RemoteModule.forward``.
    """
    return _call_forward(api.rpc_sync, self, args, kwargs)


def _call_forward(
    rpc_api: Callable[..., Any],
    module: RemoteModule,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    where = (module.module_rref, module.device, module.is_device_map_set)
    owner = module.module_rref.owner()
    return rpc_api(owner, _remote_forward, args=(*where, *args), kwargs=kwargs)


def _remote_forward(
    rref: RRef[nn.Module], device: str, is_device_map_set: bool, *args: Any, **kwargs: Any
) -> Any:
    module: Any = rref.local_value()
    if torch.device(device).type == "cpu":
        return module.forward(*args, **kwargs)

    def move(value: Any, to: str) -> Any:
        return value.to(to) if isinstance(value, torch.Tensor) else value

    there = [move(value, device) for value in args]
    named = {name: move(value, device) for name, value in kwargs.items()}
    result = module.forward(*there, **named)
    if is_device_map_set:
        return result
    if isinstance(result, (tuple, list)):  # without a map, only host memory can be sent
        return type(result)(move(value, "cpu") for value in result)
    return move(result, "cpu")


def _create(
    module_cls: Any, args: Any, kwargs: Any, device: str, interface: Any = None
) -> nn.Module:
    module = module_cls(*args, **kwargs)
    if not isinstance(module, nn.Module):
        raise ValueError(
            "Expect `module_cls(*args, **kwargs)` returns an instance of <class nn.Module>, "
            f"but it returns an instance of {type(module)}."
        )
    module.to(device)
    return torch.jit.script(module) if interface is not None else module


def _parameters(rref: RRef[nn.Module], recurse: bool) -> list[RRef[nn.Parameter]]:
    return [RRef(parameter) for parameter in rref.local_value().parameters(recurse)]


def _set_mode(rref: RRef[nn.Module], mode: bool) -> None:
    rref.local_value().train(mode)


class RemoteModule(nn.Module):
    """Make a module on another worker, and refer to it.

    ``forward`` and ``forward_async`` take the arguments of the module's own ``forward``, and run
    it there; gradients flow through it in a context of distributed autograd.  A RemoteModule can
    be sent over RPC.  Of the other methods of ``nn.Module`` only ``train`` and ``eval`` are
    supported.

    Args:
        remote_device (str): "<worker>/<device>" or "rank:<rank>/<device>"; without a device, "cpu".
        module_cls (type): an ``nn.Module``, or a function that returns one; called there. Its
            errors are raised where the module is used.
        args (tuple): for ``module_cls``.
        kwargs (dict): for ``module_cls``.

    Raises:
        AssertionError: RPC is not initialized.
        ValueError: ``remote_device`` has another form.
        RuntimeError: there is no such worker.

    Source: ``torch.distributed.nn.RemoteModule``.
    """

    on: str | int
    device: str
    is_device_map_set: bool
    is_scriptable: bool
    module_rref: RRef[nn.Module]
    forward_async: Callable[..., Future[Any]]
    generated_methods: tuple[Callable[..., Any], ...]

    def __init__(
        self,
        remote_device: str,
        module_cls: Callable[..., nn.Module],
        args: tuple[Any, ...] | None = None,
        kwargs: dict[str, Any] | None = None,
        _module_interface_cls: Any = None,
    ) -> None:
        super().__init__()
        self._place(remote_device)
        self.is_scriptable = _module_interface_cls is not None
        self._module_interface_cls = _module_interface_cls
        what = (module_cls, args or (), kwargs or {}, self.device, _module_interface_cls)
        self._refer_to(api.remote(self.on, _create, args=what))

    def _place(self, remote_device: str) -> None:
        if not current.is_set():
            raise AssertionError("RemoteModule only works in RPC.")
        place: Any = _remote_device(remote_device)
        name = place.worker_name()
        self.on = place.rank() if name is None else name
        self.device = str(place.device())
        agent = current.get_agent()
        self.is_device_map_set = bool(agent._get_device_map(agent.get_worker_info(self.on)))

    def _refer_to(self, rref: RRef[nn.Module]) -> None:
        self.generated_methods = (forward_async, forward)
        self.module_rref = rref
        _install_methods(self)

    @staticmethod
    def init_from_module_rref(
        remote_device: str, module_rref: RRef[nn.Module], _module_interface_cls: Any = None
    ) -> RemoteModule:
        """Make a RemoteModule of a module that exists on a worker.

        Args:
            remote_device (str): where it is; see the class.
            module_rref (RRef[nn.Module]): references it.

        Returns:
            The RemoteModule.

        Raises:
            AssertionError: RPC is not initialized.
            ValueError: ``remote_device`` has another form.
            RuntimeError: there is no such worker.

        Source: ``torch.distributed.nn.RemoteModule.init_from_module_rref``.
        """
        module = RemoteModule.__new__(RemoteModule)
        nn.Module.__init__(module)
        module._place(remote_device)
        module.is_scriptable = _module_interface_cls is not None
        module._module_interface_cls = _module_interface_cls
        module._refer_to(module_rref)
        return module

    def remote_parameters(self, recurse: bool = True) -> list[RRef[nn.Parameter]]:
        """Return RRefs of the module's parameters, for a ``DistributedOptimizer``.

        Args:
            recurse (bool): also the parameters of its submodules.

        Returns:
            One for each, owned by the module's worker, in the order of ``parameters``.

        Raises:
            Exception: the module could not be made.
            WorkerDiedError: the worker died.
            CallTimeoutError: it took longer than the default timeout of RPC.

        Source: ``torch.distributed.nn.RemoteModule.remote_parameters``.
        """
        found: list[RRef[nn.Parameter]] = api.rpc_sync(
            self.on, _parameters, args=(self.module_rref, recurse)
        )
        return found

    def get_module_rref(self) -> RRef[nn.Module]:
        """Return the RRef of the module.

        Returns:
            An RRef that the module's worker owns.

        Source: ``torch.distributed.nn.RemoteModule.get_module_rref``.
        """
        return self.module_rref

    def train(self, mode: bool = True) -> RemoteModule:
        """Set the module, on its worker, to training or evaluation; wait until it is.

        Args:
            mode (bool): training.

        Returns:
            This RemoteModule.

        Raises:
            Exception: the module could not be made.
            WorkerDiedError: the worker died.
            CallTimeoutError: it took longer than the default timeout of RPC.

        Source: ``torch.distributed.nn.RemoteModule.train``.
        """
        api.rpc_sync(self.on, _set_mode, args=(self.module_rref, mode))
        return self

    def eval(self) -> RemoteModule:
        """Set the module, on its worker, to evaluation; wait until it is.

        Returns:
            This RemoteModule.

        Raises:
            Exception: as for ``train``.

        Source: ``torch.distributed.nn.RemoteModule.eval``.
        """
        return self.train(False)

    def __prepare_scriptable__(self) -> nn.Module:
        """Return the module that ``torch.jit.script`` compiles: its calls stay in Python."""
        compilable = nn.Module()
        for method in self.generated_methods:
            call = torch.jit.ignore(_bound(method, self))
            setattr(compilable, method.__name__, types.MethodType(call, compilable))
        return compilable

    def __getattr__(self, name: str) -> Any:
        if "_modules" not in vars(self):  # it was sent here
            sent = dict(vars(self))
            nn.Module.__init__(self)
            vars(self).update(sent)
            return getattr(self, name)
        return super().__getattr__(name)

    def __getstate__(self) -> NoReturn:
        raise RuntimeError(
            "Cannot pickle RemoteModule in python pickler. RemoteModule can only be pickled when "
            "using RPC"
        )

    def __setstate__(self, state: Any) -> NoReturn:
        raise RuntimeError(
            "Cannot unpickle RemoteModule in python pickler. RemoteModule can only be unpickled "
            "when using RPC"
        )


def _refusing(name: str) -> Any:
    hint = ". Please use ``remote_parameters`` instead." if name == "parameters" else ""

    def method(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise ValueError(f"Method ``{name}`` not supported for RemoteModule{hint}")

    method.__name__ = name
    method.__doc__ = "Refuse: the module is on another worker."
    return method


for _name in (
    *["add_module", "apply", "bfloat16", "buffers", "children", "cpu", "cuda", "double"],
    *["extra_repr", "float", "half", "ipu", "load_state_dict", "modules", "named_buffers"],
    *["named_children", "named_modules", "named_parameters", "parameters"],
    *["register_backward_hook", "register_buffer", "register_forward_hook"],
    *["register_forward_pre_hook", "register_parameter", "requires_grad_", "share_memory"],
    *["state_dict", "to", "type", "xpu", "zero_grad"],
):
    setattr(RemoteModule, _name, _refusing(_name))


def _bound(method: Any, module: RemoteModule) -> Any:
    def call(_: Any, *args: Any, **kwargs: Any) -> Any:
        return method(module, *args, **kwargs)

    return call


def _install_methods(module: Any) -> None:
    for method in module.generated_methods:
        setattr(module, method.__name__, types.MethodType(method, module))


def _reduce(module: RemoteModule) -> Any:
    return _rebuild, tuple(module.__dict__[name] for name in _PICKLED)


def _rebuild(*sent: Any) -> RemoteModule:
    module = RemoteModule.__new__(RemoteModule)  # without ``nn.Module``'s attributes, as torch's
    module.__dict__.update(zip(_PICKLED, sent, strict=True))
    _install_methods(module)
    return module


add_reducer(RemoteModule, _reduce)

# torch's names
_REMOTE_MODULE_PICKLED_ATTRIBUTES = _PICKLED
_RemoteModule = RemoteModule
