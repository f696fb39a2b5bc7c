"""Barriers, at which the members of a group wait for one another."""

from __future__ import annotations

from rayrpc import api
from rayrpc._runtime import current
from rayrpc.parallel.distributed import lookup

__all__ = ["wait_for_members"]


def wait_for_members(group: str, members: list[str], purpose: str) -> None:
    """Wait until all members of a group wait for one another, for the same purpose.

    Args:
        group: its name.
        members: their names.
        purpose: tells the barrier from others of the group.

    Raises:
        WorkerDiedError: a member died.
    """
    barrier, owner = (purpose, group), lookup.owner()
    args = (barrier, lookup.this_process(), tuple(members))
    future = api.rpc_async(owner, lookup.enter_barrier, args=args, timeout=0)
    agent = current.get_agent()
    future.add_done_callback(lambda _: agent.members.notify())
    for member in members:
        agent.lookup(member)

    def missing() -> list[str]:
        present = {member.name for member in agent.members.all()}
        return [name for name in members if name not in present]

    agent.members.wait_until(lambda: future.done() or missing(), None)
    if not future.done():
        api.rpc_sync(owner, lookup.leave_barrier, args=(barrier, lookup.this_process()))
        api.rpc_sync(missing()[0], lookup.this_process)  # raises why the member is missing
    future.wait()
