"""The errors of rayrpc, one tree::

    RpcError (a RuntimeError, as torch's RPC errors are)
    ├── ConfigError (and ValueError)        a setting is unknown or has a wrong value
    ├── ArgumentTypeError (and TypeError)   an argument has the wrong type
    ├── ClusterError                        no Ray cluster can be reached or started
    ├── PlacementError                      a worker needs resources that no node has
    ├── GroupError                          a group refuses a member, or is incomplete
    ├── NotInitializedError                 init_rpc was not called, or shutdown was
    ├── CallError                           a call did not complete
    │   ├── CallTimeoutError                ... it took longer than its timeout
    │   ├── SerializationError (and TypeError)  ... an argument or its result cannot be sent
    │   │   └── DeviceMapError              ... a tensor's device is in no device map
    │   ├── CancelledError                  ... it was cancelled
    │   ├── CallLostError                   ... its connection broke: it may or may not have run
    │   ├── GroupCallError                  ... one of those to the workers of a group
    │   └── WorkerDiedError                 ... its callee died or left the group
    └── FunctionNotFoundError (and AttributeError)
                                            the callee cannot import the function of a call

Errors raised by users' functions are not in this tree: they keep their own types. As in torch,
those that ``rpc_sync`` and Futures raise are RuntimeErrors, but for ValueErrors and TypeErrors.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "ArgumentTypeError",
    "CallError",
    "CallLostError",
    "CallTimeoutError",
    "CancelledError",
    "ClusterError",
    "ConfigError",
    "DeviceMapError",
    "FunctionNotFoundError",
    "GroupCallError",
    "GroupError",
    "NotInitializedError",
    "PlacementError",
    "RpcError",
    "SerializationError",
    "WorkerDiedError",
]


class RpcError(RuntimeError):
    """Base of all errors that rayrpc itself raises."""


class ConfigError(RpcError, ValueError):
    """A setting is unknown or has a value that it cannot have."""


class ArgumentTypeError(RpcError, TypeError):
    """An argument has the wrong type."""


class ClusterError(RpcError):
    """No Ray cluster can be reached or started."""


class PlacementError(RpcError):
    """A worker asks for resources that the cluster does not have."""


class GroupError(RpcError):
    """A group refuses a member, or did not become complete in time."""


class NotInitializedError(RpcError):
    """RPC is used before ``init_rpc`` or after ``shutdown``."""


class CallError(RpcError):
    """A call did not complete."""


class CallTimeoutError(CallError):
    """A call took longer than its timeout."""


class CancelledError(CallError):
    """A call was cancelled by ``cancel``, or by the interrupt of what waited for it."""


class SerializationError(CallError, TypeError):
    """An argument or a result cannot be sent to another worker."""


class DeviceMapError(SerializationError):
    """A tensor is on a device that the device map for the receiver does not contain."""


class CallLostError(CallError):
    """The connection broke during a call: whether the function ran is not known."""


class WorkerDiedError(CallError):
    """A call, Future or RRef needs a worker that died or left the group.

    Args:
        worker (str): name of the worker.
        cause (str): how it ended, as a clause; empty if not known.
        node (str): address of the node that it ran on; empty if not known.
    """

    def __init__(self, worker: str, cause: str = "", node: str = "") -> None:
        self.worker = worker
        self.cause = cause
        self.node = node
        where = f" (on node {node})" if node else ""
        why = cause.rstrip(".") or "it died or was disconnected"
        super().__init__(
            f"RPC worker {worker!r}{where} is gone: {why}. Calls, Futures and RRefs on it "
            "cannot complete; restart the run, or the worker in a dynamic group."
        )

    def __reduce__(self) -> tuple[type[WorkerDiedError], tuple[str, str, str]]:
        return type(self), (self.worker, self.cause, self.node)


class GroupCallError(CallError):
    """Some of the calls to the workers of a group failed.

    Args:
        group (str): its name.
        errors (dict[str, BaseException]): of the calls that failed, by worker.
        results (dict[str, object]): of the others.
    """

    def __init__(
        self, group: str, errors: dict[str, BaseException], results: dict[str, object]
    ) -> None:
        self.group = group
        self.errors = errors
        self.results = results
        count = len(errors) + len(results)
        each = "".join(
            f"\n  {name}: {type(error).__name__}: {error}" for name, error in errors.items()
        )
        super().__init__(
            f"of {count} calls to workers of group {group!r}, {len(errors)} failed:{each}"
        )

    def __reduce__(self) -> tuple[type[GroupCallError], tuple[str, Any, Any]]:
        return type(self), (self.group, self.errors, self.results)


class FunctionNotFoundError(RpcError, AttributeError):
    """The callee cannot import a function or class that the caller sent by reference."""
