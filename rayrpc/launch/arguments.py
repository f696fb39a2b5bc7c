"""What ranks are called with: shared with those on this node, copied for the others.

``multiprocessing`` moves the tensors in a child's arguments to shared memory, so that parent and
children see one another's writes.  Ranks on this node get the same: their arguments are pickled by
``multiprocessing``'s own reducers, once for each rank, since what such a pickle refers to can be
taken once.  A rank takes it from this process, to which it proves itself with the ``authkey`` of
``multiprocessing``.

    on this node          all tensors are shared; pipes and sockets are duplicated
    on another node       an error for what is in shared memory already, for pipes and sockets;
                          other tensors are copied, with a warning
"""

from __future__ import annotations

import io
import logging
import multiprocessing
import pickle
import socket
from collections import ChainMap
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

import cloudpickle
import torch
import torch.multiprocessing  # registers its reducers

from rayrpc._runtime.serialization.shared_globals import SharesGlobals, dumps_by_value
from rayrpc.errors import PlacementError
from rayrpc.launch.hosted import Target

__all__ = ["Arguments"]

logger = logging.getLogger(__name__)

_HOLDERS = (torch.Tensor, torch.UntypedStorage, torch.TypedStorage)
_TIED = (Connection, socket.socket)


class Arguments:
    """The main of ranks, and its arguments.

    Args:
        fn (Callable): the main.
        args (tuple): its arguments after the rank.
        by_value (bool): other processes cannot import this process's functions.

    Raises:
        RuntimeError: an argument can only be inherited (a queue or lock of ``multiprocessing``).
    """

    def __init__(self, fn: Any, args: Any, by_value: bool = False) -> None:
        self._call = fn, args
        self._by_value = by_value
        #: there is something that a rank on another node does not share
        self.can_share = False
        #: ... and that only ranks on this node can use: what it is; empty if there is no such thing
        self.tied = ""
        if not by_value:
            try:
                _Probe(self._found).dump(self._call)
                return
            except RuntimeError:
                raise  # only children of this process can inherit it
            except Exception:
                self._by_value = True
        probe: Any = _ProbeByValue(self._found)
        probe.dump(self._call)

    def _found(self, obj: Any) -> None:
        self.can_share = True
        if isinstance(obj, _TIED):
            self.tied = f"a {type(obj).__name__}"
        elif _is_shared(obj):
            self.tied = f"a {type(obj).__name__} in shared memory"

    def targets(self, nodes: Sequence[str], here: str) -> list[Target]:
        """Return what each rank runs; tensors are in shared memory if a rank is on this node.

        Args:
            nodes: id of each rank's node.
            here: id of this process's node; empty if it is on none (Ray Client).

        Raises:
            PlacementError: a rank on another node cannot use an argument.
            RuntimeError: a tensor requires grad and is no leaf: torch shares none such.
        """
        away = [rank for rank, node in enumerate(nodes) if not here or node != here]
        if away and self.tied:
            raise PlacementError(
                f"Rank {away[0]} cannot be called with {self.tied}: it runs on node "
                f"{nodes[away[0]]}, and this process on {here or 'no node of the cluster'}. Let it "
                "ask for what this node has (the settings `workers` and `placement_strategy`), or "
                "pass what can be copied, as tensor.clone()."
            )
        if away and self.can_share:
            logger.warning(
                "%d of %d ranks run on other nodes: they have copies of the tensors in their "
                "arguments, and what they write to these is not seen here",
                len(away),
                len(nodes),
            )
        copied = Target(self._copied()) if away else None
        authkey = bytes(multiprocessing.current_process().authkey)
        targets = []
        for rank in range(len(nodes)):
            if copied is not None and rank in away:
                targets.append(copied)
            else:
                targets.append(Target(self._shared(), authkey))
        return targets

    def _copied(self) -> bytes:
        return self._pickled(_ByValue if self._by_value else pickle.Pickler)

    def _shared(self) -> bytes:
        return self._pickled(_SharingByValue if self._by_value else ForkingPickler)

    def _pickled(self, pickler: Any) -> bytes:
        return dumps_by_value(lambda file: pickler(file, 5), self._call)


def _is_shared(obj: Any) -> bool:
    """Tell whether a tensor or storage was put into shared memory."""
    try:
        return bool(obj.device.type == "cpu" and obj.is_shared())
    except (NotImplementedError, RuntimeError):  # without a storage of its own: sparse, nested
        return False


class _ByValue(SharesGlobals, cloudpickle.Pickler):
    """Pickles functions whose globals those that are sent in calls share."""


class _SharingByValue(_ByValue):
    def __init__(self, file: Any, protocol: int) -> None:
        forking: Any = ForkingPickler(io.BytesIO())
        # before __init__, which takes it
        self.dispatch_table = ChainMap(self.dispatch_table, forking.dispatch_table)
        cloud: Any = super()
        cloud.__init__(file, protocol=protocol)


class _Nowhere:
    def write(self, data: Any) -> int:
        return len(data)


class _Probe(pickle.Pickler):
    """Pickle to nowhere all but tensors and the like, which are reported."""

    def __init__(self, found: Callable[[Any], None]) -> None:
        super().__init__(_Nowhere(), 5)
        self._found = found

    def reducer_override(self, obj: Any) -> Any:
        return _report(obj, self._found)


class _ProbeByValue(cloudpickle.Pickler):
    def __init__(self, found: Callable[[Any], None]) -> None:
        cloud: Any = super()
        cloud.__init__(_Nowhere(), protocol=5)
        self._found = found

    def reducer_override(self, obj: Any) -> Any:
        cloud: Any = super()
        reduced = _report(obj, self._found)
        return cloud.reducer_override(obj) if reduced is NotImplemented else reduced


def _report(obj: Any, found: Callable[[Any], None]) -> Any:
    if isinstance(obj, _HOLDERS + _TIED):
        found(obj)
        return object, ()
    return NotImplemented
