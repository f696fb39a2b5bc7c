"""A server of one model: clients push and pull its parameters, in a strict order of versions."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rayrpc.parallel.distributed import RpcGroup
from rayrpc.parallel.server.ordered_server import (
    OrderedServerBase,
    OrderedServerSimple,
    OrderedServerSimpleImpl,
)

__all__ = ["PushPullModelServer", "PushPullModelServerImpl"]


def _state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return a copy of a model's state, in host memory."""
    return {
        name: value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value
        for name, value in model.state_dict().items()
    }


def _version_of(model: Any) -> int:
    """Return the version that a model has: of the last push or pull; 0: of none."""
    return int(getattr(model, "pp_version", 0))


class PushPullModelServer:
    """Reach a model server; can be sent.

    Args:
        model_name (str): key of the model in the ordered server.
        o_server (OrderedServerBase): keeps it; may be set later, as an attribute.

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
        """Push a model's state, made from the version ``model.pp_version``.

        Args:
            model (nn.Module): its gradients stay.
            pull_on_fail (bool): if the server has a newer version, load that into ``model``.

        Returns:
            Whether the server took it.
        """
        version = _version_of(model)
        if self._server().push(self.model_name, _state_of(model), version + 1, version):
            model.pp_version = version + 1  # type: ignore[assignment]
            return True
        if pull_on_fail:
            self._load(model, force=True)
        return False

    def pull(self, model: nn.Module) -> bool:
        """Load the newest state into a model, unless it has that already.

        Args:
            model (nn.Module): its gradients stay.

        Returns:
            Whether the server has any.
        """
        return self._load(model, force=False)

    def _load(self, model: nn.Module, force: bool) -> bool:
        found = self._server().pull(self.model_name)
        if found is None:
            return False
        state, version = found
        if force or not hasattr(model, "pp_version") or _version_of(model) < version:
            model.load_state_dict(state)
            model.pp_version = version
        return True


class PushPullModelServerImpl:
    """A model server, in this process.

    Args:
        server_name (str): the group's key for its ``PushPullModelServer``.
        group (RpcGroup): this process is a member.
        model_name (str): key of the model in the ordered server.
        o_server (OrderedServerBase): keeps the model; None: one of its own, here.

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
            name = f"{server_name}_o_server"
            self._o_server_impl = OrderedServerSimpleImpl(name, group)
            o_server = OrderedServerSimple(name, group)
        self.o_server = o_server
        group.pair(server_name, PushPullModelServer(model_name, o_server))
