"""Collective communication in a group of processes, on torch's process groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["CollectiveGroup"]

SUM = dist.ReduceOp.SUM

# How tensors of one process are reduced before those of all are.
_LOCALLY: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    SUM: Tensor.add_,
    dist.ReduceOp.PRODUCT: Tensor.mul_,
    dist.ReduceOp.MIN: lambda one, other: torch.minimum(one, other, out=one),
    dist.ReduceOp.MAX: lambda one, other: torch.maximum(one, other, out=one),
}


class CollectiveGroup:
    """Collective communication among some processes of a world.

    Made by ``World.create_collective_group``.  Ranks are those of the world.  Where ``async_op``
    is True, a call returns a handle to ``wait`` on.  The ``*_multigpu`` calls, which torch has no
    more, take several tensors in each process, on devices of any kind.

    Args:
        group (ProcessGroup): of torch.
        current_relative_rank (int | None): of this process in it; None: it is no member.

    Source: ``machin.parallel.distributed.CollectiveGroup``; ``torch.distributed``.
    """

    def __init__(self, group: Any, current_relative_rank: int | None) -> None:
        self.group = group
        self.current_rank = current_relative_rank
        self.destroyed = False

    def send(self, tensor: Tensor, dst: int, tag: int = 0) -> None:
        """Send a tensor to a process, and wait until it is sent."""
        dist.send(tensor, dst, self.group, tag)

    def recv(self, tensor: Tensor, src: int | None = None, tag: int = 0) -> int:
        """Receive into a tensor, from any process if none is named; return the sender's rank."""
        return int(dist.recv(tensor, src, self.group, tag))

    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> Any:
        """Send a tensor to a process; return what waits until it is sent."""
        return dist.isend(tensor, dst, self.group, tag)

    def irecv(self, tensor: Tensor, src: int | None = None, tag: int = 0) -> Any:
        """Receive into a tensor, from any process if none is named.

        Returns:
            An object whose ``wait()`` returns the sender's rank; -1 where this process is no
            member.
        """
        if self.current_rank is None:
            return _Waits(lambda: -1)
        work: Any = dist.irecv(tensor, src, self.group, tag)

        def sender() -> int:
            work.wait()
            if src is not None:
                return src
            return int(dist.get_global_rank(self.group, work._source_rank()))

        return _Waits(sender)

    def broadcast(self, tensor: Tensor, src: int, async_op: bool = False) -> Any:
        """Give every process the tensor of one."""
        return dist.broadcast(tensor, src, self.group, async_op)

    def all_reduce(self, tensor: Tensor, op: Any = SUM, async_op: bool = False) -> Any:
        """Give every process the reduction of all tensors, in place."""
        return dist.all_reduce(tensor, op, self.group, async_op)

    def reduce(self, tensor: Tensor, dst: int, op: Any = SUM, async_op: bool = False) -> Any:
        """Give one process the reduction of all tensors, in place."""
        return dist.reduce(tensor, dst, op, self.group, async_op)

    def all_gather(self, tensor_list: list[Tensor], tensor: Tensor, async_op: bool = False) -> Any:
        """Give every process the tensors of all."""
        return dist.all_gather(tensor_list, tensor, self.group, async_op)

    def gather(
        self,
        tensor: Tensor,
        gather_list: list[Tensor] | None,
        dst: int = 0,
        async_op: bool = False,
    ) -> Any:
        """Give one process the tensors of all; the others pass None for the list."""
        return dist.gather(tensor, gather_list, dst, self.group, async_op)

    def scatter(
        self,
        tensor: Tensor,
        scatter_list: list[Tensor] | None = None,
        src: int = 0,
        async_op: bool = False,
    ) -> Any:
        """Give each process one of the tensors that one has."""
        return dist.scatter(tensor, scatter_list, src, self.group, async_op)

    def barrier(self, async_op: bool = False) -> Any:
        """Wait until every process is here."""
        return dist.barrier(self.group, async_op)

    # -- several tensors in each process ------------------------------------------------------

    def broadcast_multigpu(
        self, tensor_list: list[Tensor], src: int, async_op: bool = False, src_tensor: int = 0
    ) -> Any:
        """Give all tensors of every process the value of one, ``tensor_list[src_tensor]``."""
        first = tensor_list[src_tensor]
        work = self.broadcast(first, src, async_op)
        return _after(work, lambda: _spread(first, tensor_list))

    def all_reduce_multigpu(
        self, tensor_list: list[Tensor], op: Any = SUM, async_op: bool = False
    ) -> Any:
        """Give all tensors of every process the reduction of them all, in place."""
        first = _reduced(tensor_list, op)
        work = self.all_reduce(first, op, async_op)
        return _after(work, lambda: _spread(first, tensor_list))

    def reduce_multigpu(
        self,
        tensor_list: list[Tensor],
        dst: int,
        op: Any = SUM,
        async_op: bool = False,
        dst_tensor: int = 0,
    ) -> Any:
        """Give one tensor of one process, ``tensor_list[dst_tensor]``, the reduction of all."""
        result = _reduced(tensor_list, op, dst_tensor)
        work = self.reduce(result, dst, op, async_op)
        return _after(work, lambda: None)

    def all_gather_multigpu(
        self,
        output_tensor_lists: list[list[Tensor]],
        input_tensor_list: list[Tensor],
        async_op: bool = False,
    ) -> Any:
        """Give every list of every process the tensors of all.

        Tensor ``j`` of rank ``k`` comes to ``output_tensor_lists[i][k * n + j]`` on the device of
        that, for each ``i``, where ``n`` is ``len(input_tensor_list)``.
        """
        stacked = torch.stack([each.to(input_tensor_list[0].device) for each in input_tensor_list])
        found = [torch.empty_like(stacked) for _ in range(self.size())]
        work = self.all_gather(found, stacked, async_op)

        def place() -> None:
            values = [tensor for part in found for tensor in part]
            for outputs in output_tensor_lists:
                for output, value in zip(outputs, values, strict=True):
                    output.copy_(value)

        return _after(work, place)

    # -- the group ----------------------------------------------------------------------------

    def destroy(self) -> None:
        """End the group; doing so again does nothing."""
        if not self.destroyed:
            self.destroyed = True
            if self.current_rank is not None and dist.is_initialized():
                dist.destroy_process_group(self.group)

    def size(self) -> int:
        """Return the number of members."""
        return dist.get_world_size(self.group)

    def __reduce__(self) -> NoReturn:
        raise RuntimeError("a CollectiveGroup cannot be sent: create it in each process")


class _Waits:
    """A handle whose ``wait`` runs a function, once."""

    def __init__(self, run: Callable[[], Any]) -> None:
        self._run = run
        self._result: list[Any] = []

    def wait(self) -> Any:
        """Wait, and return what there is to return."""
        if not self._result:
            self._result.append(self._run())
        return self._result[0]


def _after(work: Any, finish: Callable[[], None]) -> Any:
    """Finish now, or when a handle is waited for."""
    if work is None:
        finish()
        return None

    def run() -> None:
        work.wait()
        finish()

    return _Waits(run)


def _reduced(tensors: Sequence[Tensor], op: Any, index: int = 0) -> Tensor:
    """Reduce the tensors of this process into one of them."""
    if len(tensors) > 1 and op not in _LOCALLY:
        raise ValueError(f"several tensors in one process can be reduced by {list(_LOCALLY)} only")
    result = tensors[index]
    for number, other in enumerate(tensors):
        if number != index:
            _LOCALLY[op](result, other.to(result.device))
    return result


def _spread(value: Tensor, tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        if tensor is not value:
            tensor.copy_(value)
