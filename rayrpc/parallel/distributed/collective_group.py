"""Collective communication in a group of processes, on torch's process groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from rayrpc.parallel.distributed.pending import Handle, Pending, then

__all__ = ["CollectiveGroup"]

SUM = dist.ReduceOp.SUM

# How the tensors of one process are reduced, before those of all processes.
_LOCAL_REDUCTIONS: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    SUM: Tensor.add_,
    dist.ReduceOp.PRODUCT: Tensor.mul_,
    dist.ReduceOp.MIN: lambda one, other: torch.minimum(one, other, out=one),
    dist.ReduceOp.MAX: lambda one, other: torch.maximum(one, other, out=one),
}


class CollectiveGroup:
    """Communicate among some processes of a world.

    Made by ``World.create_collective_group``.  Ranks are those of the world.  Every member makes
    the same calls in the same order.  With ``async_op=True`` a call returns a handle at once, and
    its tensors may be used after ``handle.wait()``; else it returns None when it is done.

    The ``*_multigpu`` calls, which torch has no more, take several tensors in each process, on
    devices of any kind.  All tensors of a call have the same shape and dtype.

    Args:
        group (ProcessGroup): of torch.
        current_relative_rank (int | None): of this process in the group; None: it is no member.

    Source: ``machin.parallel.distributed.CollectiveGroup``; ``torch.distributed``.
    """

    def __init__(self, group: Any, current_relative_rank: int | None) -> None:
        self.group = group
        self.current_rank = current_relative_rank
        self.destroyed = False

    def send(self, tensor: Tensor, dst: int, tag: int = 0) -> None:
        """Send a tensor to a process, and wait until it is sent.

        Args:
            tensor (Tensor): to send.
            dst (int): rank of the receiver.
            tag (int): the receiver's ``recv`` has the same.

        Source: ``torch.distributed.send``.
        """
        dist.send(tensor, dst, self.group, tag)

    def recv(self, tensor: Tensor, src: int | None = None, tag: int = 0) -> int:
        """Receive a tensor.

        Args:
            tensor (Tensor): filled in place.
            src (int, optional): rank of the sender; default: any process.
            tag (int): the sender's ``send`` has the same.

        Returns:
            int: rank of the sender.

        Source: ``torch.distributed.recv``.
        """
        return int(dist.recv(tensor, src, self.group, tag))

    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> dist.Work | None:
        """Send a tensor to a process, without waiting.

        Args:
            tensor, dst, tag: as for ``send``; ``tensor`` must not change before ``wait`` returns.

        Returns:
            Work: to ``wait`` for; None: this process is no member.

        Source: ``torch.distributed.isend``.
        """
        return dist.isend(tensor, dst, self.group, tag)

    def irecv(self, tensor: Tensor, src: int | None = None, tag: int = 0) -> Pending[int]:
        """Receive a tensor, without waiting.

        Args:
            tensor, src, tag: as for ``recv``.

        Returns:
            Pending: its ``wait`` returns the rank of the sender; -1: this process is no member.

        Source: ``torch.distributed.irecv``.
        """
        if self.current_rank is None:
            return Pending(lambda: -1)
        work: Any = dist.irecv(tensor, src, self.group, tag)

        def sender() -> int:
            work.wait()
            if src is not None:
                return src
            return int(dist.get_global_rank(self.group, work._source_rank()))

        return Pending(sender)

    def broadcast(self, tensor: Tensor, src: int, async_op: bool = False) -> Handle | None:
        """Copy the tensor of one process to all.

        Args:
            tensor (Tensor): sent by ``src``, filled in place in the others.
            src (int): rank of the sender.
            async_op (bool): do not wait.

        Returns:
            Handle | None: to wait for, if ``async_op``.

        Source: ``torch.distributed.broadcast``.
        """
        work: Handle | None = dist.broadcast(tensor, src, self.group, async_op)
        return work

    def all_reduce(self, tensor: Tensor, op: Any = SUM, async_op: bool = False) -> Handle | None:
        """Reduce the tensors of all processes, in place in all.

        Args:
            tensor (Tensor): this process's, then the result.
            op (ReduceOp): how to reduce.
            async_op (bool): do not wait.

        Returns:
            Handle | None: to wait for, if ``async_op``.

        Source: ``torch.distributed.all_reduce``.
        """
        work: Handle | None = dist.all_reduce(tensor, op, self.group, async_op)
        return work

    def reduce(
        self, tensor: Tensor, dst: int, op: Any = SUM, async_op: bool = False
    ) -> Handle | None:
        """Reduce the tensors of all processes, in place in one.

        Args:
            tensor (Tensor): this process's; in ``dst``, then the result; undefined in the others.
            dst (int): rank of the process that gets the result.
            op (ReduceOp): how to reduce.
            async_op (bool): do not wait.

        Returns:
            Handle | None: to wait for, if ``async_op``.

        Source: ``torch.distributed.reduce``.
        """
        work: Handle | None = dist.reduce(tensor, dst, op, self.group, async_op)
        return work

    def all_gather(
        self, tensor_list: list[Tensor], tensor: Tensor, async_op: bool = False
    ) -> Handle | None:
        """Collect the tensors of all processes in all.

        Args:
            tensor_list (list[Tensor]): filled in place, by rank in the group; as many as there are
                members, each of the shape and dtype of ``tensor``.
            tensor (Tensor): this process's.
            async_op (bool): do not wait.

        Returns:
            Handle | None: to wait for, if ``async_op``.

        Source: ``torch.distributed.all_gather``.
        """
        work: Handle | None = dist.all_gather(tensor_list, tensor, self.group, async_op)
        return work

    def gather(
        self,
        tensor: Tensor,
        gather_list: list[Tensor] | None,
        dst: int = 0,
        async_op: bool = False,
    ) -> Handle | None:
        """Collect the tensors of all processes in one.

        Args:
            tensor (Tensor): this process's.
            gather_list (list[Tensor] | None): in ``dst``, as for ``all_gather``; None in the
                others.
            dst (int): rank of the process that collects.
            async_op (bool): do not wait.

        Returns:
            Handle | None: to wait for, if ``async_op``.

        Source: ``torch.distributed.gather``.
        """
        work: Handle | None = dist.gather(tensor, gather_list, dst, self.group, async_op)
        return work

    def scatter(
        self,
        tensor: Tensor,
        scatter_list: list[Tensor] | None = None,
        src: int = 0,
        async_op: bool = False,
    ) -> Handle | None:
        """Send each process one of the tensors of one process.

        Args:
            tensor (Tensor): filled in place.
            scatter_list (list[Tensor], optional): in ``src``, one for each member, by rank in the
                group; None in the others.
            src (int): rank of the sender.
            async_op (bool): do not wait.

        Returns:
            Handle | None: to wait for, if ``async_op``.

        Source: ``torch.distributed.scatter``.
        """
        work: Handle | None = dist.scatter(tensor, scatter_list, src, self.group, async_op)
        return work

    def barrier(self, async_op: bool = False) -> Handle | None:
        """Wait until all members have called this.

        Args:
            async_op (bool): do not wait.

        Returns:
            Handle | None: to wait for, if ``async_op``.

        Source: ``torch.distributed.barrier``.
        """
        work: Handle | None = dist.barrier(self.group, async_op)
        return work

    # -- several tensors in each process ------------------------------------------------------

    def broadcast_multigpu(
        self, tensor_list: list[Tensor], src: int, async_op: bool = False, src_tensor: int = 0
    ) -> Handle | None:
        """Copy one tensor of one process to all tensors of all.

        Args:
            tensor_list (list[Tensor]): this process's, filled in place.
            src (int): rank of the sender.
            async_op (bool): do not wait.
            src_tensor (int): index of the tensor to send, in the list of ``src``.

        Returns:
            Handle | None: to wait for, if ``async_op``.

        Source: ``machin.parallel.distributed.CollectiveGroup.broadcast_multigpu``.
        """
        first = tensor_list[src_tensor]
        work = self.broadcast(first, src, async_op)
        return then(work, lambda: _copy_to_all(first, tensor_list))

    def all_reduce_multigpu(
        self, tensor_list: list[Tensor], op: Any = SUM, async_op: bool = False
    ) -> Handle | None:
        """Reduce all tensors of all processes, in place in all.

        Args:
            tensor_list (list[Tensor]): this process's, then the result in each.
            op (ReduceOp): SUM, PRODUCT, MIN or MAX, if a process has several tensors.
            async_op (bool): do not wait.

        Returns:
            Handle | None: to wait for, if ``async_op``.

        Raises:
            ValueError: ``op`` is another one.

        Source: ``machin.parallel.distributed.CollectiveGroup.all_reduce_multigpu``.
        """
        first = _reduce_locally(tensor_list, op)
        work = self.all_reduce(first, op, async_op)
        return then(work, lambda: _copy_to_all(first, tensor_list))

    def reduce_multigpu(
        self,
        tensor_list: list[Tensor],
        dst: int,
        op: Any = SUM,
        async_op: bool = False,
        dst_tensor: int = 0,
    ) -> Handle | None:
        """Reduce all tensors of all processes, in place in one tensor of one process.

        Args:
            tensor_list (list[Tensor]): this process's; in ``dst``, one becomes the result.
            dst (int): rank of the process that gets the result.
            op (ReduceOp): SUM, PRODUCT, MIN or MAX, if a process has several tensors.
            async_op (bool): do not wait.
            dst_tensor (int): index of the result in the list of ``dst``.

        Returns:
            Handle | None: to wait for, if ``async_op``.

        Raises:
            ValueError: ``op`` is another one.

        Source: ``machin.parallel.distributed.CollectiveGroup.reduce_multigpu``.
        """
        result = _reduce_locally(tensor_list, op, dst_tensor)
        return self.reduce(result, dst, op, async_op)

    def all_gather_multigpu(
        self,
        output_tensor_lists: list[list[Tensor]],
        input_tensor_list: list[Tensor],
        async_op: bool = False,
    ) -> Handle | None:
        """Collect all tensors of all processes in each list of all.

        Args:
            output_tensor_lists (list[list[Tensor]]): filled in place.  Of ``n`` tensors of each
                process, tensor ``j`` of rank ``k`` in the group is ``[k * n + j]`` of each list.
            input_tensor_list (list[Tensor]): this process's ``n`` tensors.
            async_op (bool): do not wait.

        Returns:
            Handle | None: to wait for, if ``async_op``.

        Source: ``machin.parallel.distributed.CollectiveGroup.all_gather_multigpu``.
        """
        stacked = torch.stack([each.to(input_tensor_list[0].device) for each in input_tensor_list])
        gathered = [torch.empty_like(stacked) for _ in range(self.size())]
        work = self.all_gather(gathered, stacked, async_op)

        def copy_to_outputs() -> None:
            values = [tensor for part in gathered for tensor in part]
            for outputs in output_tensor_lists:
                for output, value in zip(outputs, values, strict=True):
                    output.copy_(value)

        return then(work, copy_to_outputs)

    # -- the group ----------------------------------------------------------------------------

    def destroy(self) -> None:
        """Destroy torch's process group; further calls do nothing.

        Source: ``machin.parallel.distributed.CollectiveGroup.destroy``.
        """
        if not self.destroyed:
            self.destroyed = True
            if self.current_rank is not None and dist.is_initialized():
                dist.destroy_process_group(self.group)

    def size(self) -> int:
        """Return the number of members.

        Source: ``machin.parallel.distributed.CollectiveGroup.size``.
        """
        return dist.get_world_size(self.group)

    def __reduce__(self) -> NoReturn:
        raise RuntimeError("a CollectiveGroup cannot be sent: create it in each process")


def _reduce_locally(tensors: Sequence[Tensor], op: Any, index: int = 0) -> Tensor:
    """Reduce the tensors of this process into one of them."""
    if len(tensors) > 1 and op not in _LOCAL_REDUCTIONS:
        raise ValueError(
            f"several tensors in one process can be reduced by {list(_LOCAL_REDUCTIONS)} only"
        )
    result = tensors[index]
    for number, other in enumerate(tensors):
        if number != index:
            _LOCAL_REDUCTIONS[op](result, other.to(result.device))
    return result


def _copy_to_all(value: Tensor, tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        if tensor is not value:
            tensor.copy_(value)
