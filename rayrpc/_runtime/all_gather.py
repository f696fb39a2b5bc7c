"""All-gather of objects by calls, after torch's ``_all_gather``.

Each worker sends its object to the leader, the first by name; the leader sends all objects to all.
If a member dies, the gathering fails with its WorkerDiedError.  At shutdown it goes on without the
members that died; the next by name replaces a leader that died.  A worker that has received all
objects from that leader returns them to those that have not.

Workers take part in the gatherings of the same names in the same order; those of ``shutdown`` are
numbered separately, since a worker that waits in it may serve a call that gathers.
"""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from rayrpc._concurrency.notices import noticed
from rayrpc._concurrency.reader import release_reader
from rayrpc._concurrency.waiting import Event
from rayrpc._runtime import current
from rayrpc._runtime.agent import Agent
from rayrpc.errors import GroupError, WorkerDiedError
from rayrpc.options import DEFAULT_SHUTDOWN_TIMEOUT, UNSET_RPC_TIMEOUT

__all__ = ["AllGatherStates", "Calls", "forget_gatherings", "gather", "receive_all", "receive_one"]


class AllGatherStates:
    """The state of one gathering.

    ``gathered_objects`` maps names to objects; ``proceed_signal`` is set when it is complete.
    """

    def __init__(self) -> None:
        self.gathered_objects: dict[str, Any] = {}
        self.proceed_signal = Event()


_all_gather_dict_lock = threading.RLock()
_all_gather_sequence_id: dict[str, int] = {}
_all_gather_sequence_id_to_states: collections.defaultdict[str, AllGatherStates] = (
    collections.defaultdict(AllGatherStates)
)


# By series: the last gathering of survivors that this worker has ended, and its objects.  Like the
# numbers, it is cleared when a worker joins another group.
_ended: dict[str, tuple[str, dict[str, Any]]] = {}


def forget_gatherings() -> None:
    """Number the gatherings anew: this worker joins another group."""
    with _all_gather_dict_lock:
        _all_gather_sequence_id.clear()
        _all_gather_sequence_id_to_states.clear()
        _ended.clear()


def receive_one(sequence_id: str, worker_name: str, obj: Any) -> dict[str, Any] | None:
    """Receive a worker's object; runs on the leader.

    Returns:
        All objects, if this worker has them: the leader has died while it sent them.
    """
    with _all_gather_dict_lock:
        for ended, objects in _ended.values():
            if ended == sequence_id:
                return objects
        states = _all_gather_sequence_id_to_states[sequence_id]
        if states.proceed_signal.is_set():
            return states.gathered_objects
        states.gathered_objects[worker_name] = obj
    current.get_agent().members.notify()
    return None


def receive_all(sequence_id: str, objects_map: dict[str, Any]) -> None:
    """Receive all objects; runs on a follower."""
    with _all_gather_dict_lock:
        if any(ended == sequence_id for ended, _ in _ended.values()):
            return
        states = _all_gather_sequence_id_to_states[sequence_id]
        states.gathered_objects = objects_map
        states.proceed_signal.set()
    current.get_agent().members.notify()


class Calls(NamedTuple):
    """The functions of ``rayrpc.api`` that a gathering is made of."""

    rpc_sync: Callable[..., Any]
    rpc_async: Callable[..., Any]
    gather_to_leader: Callable[..., dict[str, Any] | None]
    broadcast_to_followers: Callable[..., None]


def gather(
    agent: Agent, calls: Calls, obj: Any, names: set[str], timeout: float, survivors: bool
) -> dict[str, Any]:
    """Exchange objects with all named workers.

    Args:
        agent: of this worker.
        calls: the RPC functions to use.
        obj: this worker's object.
        names: of the workers that take part.
        timeout: in seconds; 0: none; -1: the default, for each call.
        survivors: go on without workers that die.

    Returns:
        The objects, by the worker's name.

    Raises:
        WorkerDiedError: a worker died, and ``survivors`` is False.
        GroupError: a worker did not call in time.
    """
    me = agent.get_worker_info().name
    with _all_gather_dict_lock:
        series = ("shutdown! " if survivors else "") + " ".join(sorted(names))
        number = _all_gather_sequence_id.get(series, 0)
        _all_gather_sequence_id[series] = number + 1
        sequence_id = f"{series} {number}"
        states = _all_gather_sequence_id_to_states[sequence_id]
    rpc_timeout = (agent.default_timeout or 0.0) if timeout == UNSET_RPC_TIMEOUT else timeout
    # as in torch: only a time-out given here bounds the wait for slow members
    patience = None if timeout in (UNSET_RPC_TIMEOUT, DEFAULT_SHUTDOWN_TIMEOUT) else timeout

    def absent() -> list[str]:
        return sorted(_living(agent, names) - states.gathered_objects.keys())

    where = "shutdown" if survivors else "a gathering"

    def end() -> dict[str, Any]:
        if survivors:
            with _all_gather_dict_lock:
                _ended[series] = sequence_id, states.gathered_objects
        return states.gathered_objects

    try:
        calls.gather_to_leader(sequence_id, me, obj)
        while True:
            living = _living(agent, names)
            if not survivors:
                _raise_if_dead(agent, names - living)
            leader = min(living)
            args = (sequence_id, me, obj, names)
            if leader == me:
                if me != min(names):  # others may have ended with the objects of the dead leader
                    for name in sorted(living - {me}):
                        with contextlib.suppress(WorkerDiedError):
                            _ask(calls, name, args, rpc_timeout, states)
                notice = noticed(lambda: f"{', '.join(absent())} in {where}")
                with agent.waits.noted(where, absent), notice:
                    ready = agent.members.wait_until(
                        lambda: states.proceed_signal.is_set() or not absent(), patience
                    )
                if not ready:
                    raise GroupError(
                        f"Workers {absent()} did not join a gathering of {sorted(names)} within "
                        f"{patience} s. They are alive: call the same function on each of them."
                    )
                if not survivors:
                    _raise_if_dead(agent, names - _living(agent, names))
                objects = end()
                followers = _living(agent, names) - {me}
                _send_to_followers(calls, (sequence_id, objects), followers, rpc_timeout, survivors)
                return objects
            try:
                _ask(calls, leader, args, rpc_timeout, states)
            except WorkerDiedError:
                if not survivors:
                    raise
                continue

            def settled(leader: str = leader) -> bool:
                return states.proceed_signal.is_set() or leader not in _living(agent, names)

            notice = noticed(f"{leader}, which waits for all, in {where}")
            with agent.waits.noted(where, [leader].copy), notice:
                is_settled = agent.members.wait_until(settled, patience)
            if not is_settled:
                raise GroupError(
                    f"{leader!r}, which leads a gathering of {sorted(names)}, did not receive the "
                    f"objects of all within {patience} s. Call the same function on each of them."
                )
            if states.proceed_signal.is_set():
                return end()
    finally:
        with _all_gather_dict_lock:
            _all_gather_sequence_id_to_states.pop(sequence_id, None)


def _ask(
    calls: Calls, name: str, args: tuple[Any, ...], rpc_timeout: float, states: AllGatherStates
) -> None:
    """Send this worker's object to another; store the objects of all if that returns them."""
    objects = calls.rpc_sync(name, calls.gather_to_leader, args=args, timeout=rpc_timeout)
    if objects is not None:
        states.gathered_objects = objects
        states.proceed_signal.set()


def _send_to_followers(
    calls: Calls, args: tuple[Any, ...], names: set[str], rpc_timeout: float, survivors: bool
) -> None:
    futures = {
        name: calls.rpc_async(name, calls.broadcast_to_followers, args=args, timeout=rpc_timeout)
        for name in sorted(names)
    }
    errors: list[tuple[str, RuntimeError]] = []
    release_reader()
    for name, future in futures.items():
        try:
            future.wait()
        except WorkerDiedError as exc:
            if not survivors:
                errors.append((name, exc))
        except RuntimeError as exc:
            errors.append((name, exc))
    if errors:
        raise GroupError(
            f"Followers {[name for name, _ in errors]} timed out in _all_gather after "
            f"{rpc_timeout:.2f} seconds. The first exception is {errors[0][1]}"
        )


def _living(agent: Any, names: set[str]) -> set[str]:
    return names & {info.name for info in agent.get_worker_infos()}


def _raise_if_dead(agent: Agent, names: set[str]) -> None:
    for name in sorted(names):
        error = agent.members.death_of(agent.lookup(name))
        if error is not None:
            raise error
