"""A server of one model, whose parameters clients push and pull in strict order of versions."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rayrpc.parallel.distributed import RpcGroup
from rayrpc.parallel.server.ordered_server import OrderedServerBase, make_default_server

__all__ = ["PushPullModelServer", "PushPullModelServerImpl", "set_version"]


def _copy_state(model: nn.Module) -> dict[str, Any]:
    """Return a copy of a model's state, tensors in host memory."""
    return {
        name: value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value
        for name, value in model.state_dict().items()
    }


def _get_version(model: Any) -> int:
    """Return the version of a model's last push or pull; 0: there was none."""
    return int(getattr(model, "pp_version", 0))


def set_version(model: Any, version: int) -> None:
    """Set a model's attribute ``pp_version``, which clients of a model server read."""
    model.pp_version = version


class PushPullModelServer:
    """Push and pull the parameters of a model; can be sent to other processes.

    Args:
        model_name (str): key of the model in the ordered server.
        o_server (OrderedServerBase, optional): stores the model; may be set later, as an
            attribute.

    Source: ``machin.parallel.server.PushPullModelServer``.
    """

    def __init__(self, model_name: str, o_server: OrderedServerBase | None = None) -> None:
        self.model_name = model_name
        self.o_server = o_server

    def _server(self) -> OrderedServerBase:
        if self.o_server is None:
            raise RuntimeError(
                f"the server of model {self.model_name!r} has no ordered server: pass o_server, or "
                "set the attribute o_server, before push and pull"
            )
        return self.o_server

    def push(self, model: nn.Module, pull_on_fail: bool = True) -> bool:
        """Push a model's parameters and buffers, as the version after ``model.pp_version``.

        Args:
            model (nn.Module): gradients are neither sent nor cleared.
            pull_on_fail (bool): if the server refuses, load its newest version into ``model``.

        Returns:
            bool: False if the server has a newer version than the model was made from.

        Raises:
            RuntimeError: no ``o_server`` is set.

        Source: ``machin.parallel.server.PushPullModelServer.push``.
        """
        version = _get_version(model)
        if self._server().push(self.model_name, _copy_state(model), version + 1, version):
            set_version(model, version + 1)
            return True
        if pull_on_fail:
            self._load(model, force=True)
        return False

    def pull(self, model: nn.Module) -> bool:
        """Load the newest parameters and buffers into a model, unless it has them.

        Args:
            model (nn.Module): changed in place; gradients are not cleared.

        Returns:
            bool: False if none were pushed yet.

        Raises:
            RuntimeError: no ``o_server`` is set, or the state is not that of such a model.

        Source: ``machin.parallel.server.PushPullModelServer.pull``.
        """
        return self._load(model, force=False)

    def _load(self, model: nn.Module, force: bool) -> bool:
        found = self._server().pull(self.model_name)
        if found is None:
            return False
        state, version = found
        if force or not hasattr(model, "pp_version") or _get_version(model) < version:
            model.load_state_dict(state)
            set_version(model, version)
        return True


class PushPullModelServerImpl:
    """Serve a model from this process.

    Clients get a ``PushPullModelServer`` by ``group.get_paired(server_name)``.

    Args:
        server_name (str): unique in the group.
        group (RpcGroup): this process is a member.
        model_name (str): key of the model in the ordered server.
        o_server (OrderedServerBase, optional): stores the model; default: a new one, here.

    Raises:
        KeyError: the group has a server of this name.

    Source: ``machin.parallel.server.PushPullModelServerImpl``.
    """

    def __init__(
        self,
        server_name: str,
        group: RpcGroup,
        model_name: str = "model",
        o_server: OrderedServerBase | None = None,
    ) -> None:
        self.server_name = server_name
        self.group = group
        self.model_name = model_name
        if o_server is None:
            o_server = make_default_server(server_name, group, is_here=True)
        self.o_server = o_server
        group.pair(server_name, PushPullModelServer(model_name, o_server))
