"""See what a group does: its workers, the calls that wait, who waits for whom, and a trace."""

from __future__ import annotations

import contextlib
import functools
import logging
import uuid
from collections.abc import Iterator
from pathlib import Path

from rayrpc._concurrency.clocks import Clock, measure
from rayrpc._observe import trace
from rayrpc._observe.group_status import GroupStatus
from rayrpc._observe.rref_list import RRefList
from rayrpc._observe.trace_file import Trace
from rayrpc._protocol.membership import Member
from rayrpc._runtime import current
from rayrpc._runtime.agent import Agent
from rayrpc._runtime.invocation import Invocation
from rayrpc.errors import CallError

__all__ = ["profile", "rrefs", "status"]

logger = logging.getLogger(__name__)

# How long a worker may take to begin a trace, and to send what it has recorded.
START_SECONDS, STOP_SECONDS = 10.0, 60.0


def status(timeout: float = 5.0) -> GroupStatus:
    """Return what the workers of this process's group do now.

    Args:
        timeout (float): in seconds; a worker that does not answer until then is listed as such.

    Returns:
        GroupStatus: ``workers``, ``calls``, ``silent`` and ``deadlocks``; ``str()`` gives a table,
        ``stacks()`` where the code of each worker is, and a notebook shows it as HTML.

    Raises:
        RuntimeError: RPC is not initialized.

    Example:
        >>> print(rpc.status())
        >>> print(rpc.status().stacks("trainer1"))

    Source: rayrpc's own; ``rayrpc status`` and ``rayrpc stack`` tell the same from outside.
    """
    agent = current.initialized_agent()
    answers = [
        (member, answer if isinstance(answer, bytes) else str(answer) or "does not answer")
        for member, answer in agent.inspection.request(b"stacks", timeout)
    ]
    return GroupStatus.of(agent.key, str(agent.member.origin), answers)


def rrefs(timeout: float = 5.0) -> RRefList:
    """Return the RRefs that workers of this process's group hold.

    An RRef is listed while a worker other than the owner holds it.

    Args:
        timeout (float): in seconds; what a worker knows that does not answer until then is missing.

    Returns:
        RRefList: a list of ``RRefEntry`` (``id``, ``owner``, ``type``, ``made``, ``holders``);
        ``str()`` gives a table, and a notebook shows it as HTML.

    Raises:
        RuntimeError: RPC is not initialized.

    Example:
        >>> print(rpc.rrefs())

    Source: rayrpc's own.
    """
    agent = current.initialized_agent()
    answers = [
        (member.id, answer)
        for member, answer in agent.inspection.request(b"rrefs", timeout)
        if isinstance(answer, bytes) and answer
    ]
    return RRefList.of({member.id: member.name for member in agent.members.all()}, answers)


@contextlib.contextmanager
def profile(path: str | Path | None = None) -> Iterator[Trace]:
    """Record the calls among all workers of this process's group, as one trace.

    Workers that join later are not recorded; of each, half a million calls are at most.

    Args:
        path (str or Path, optional): of the file to write at the end, for https://ui.perfetto.dev
            or chrome://tracing; None: none.

    Returns:
        Trace: complete at the end; ``write`` and ``to_dict`` give what the file has.

    Raises:
        RuntimeError: RPC is not initialized, or a trace is being recorded.

    Example:
        >>> with rpc.profile("trace.json"):
        ...     rpc.rpc_sync("worker1", train_step)

    Source: rayrpc's own.
    """
    agent = current.initialized_agent()
    others = [member for member in agent.members.all() if member.token != agent.member.token]
    made = Trace(names={member.id: member.name for member in agent.members.all()})
    run = uuid.uuid4().hex
    started: list[Member] = []
    try:
        for member in others:
            try:
                agent.caller.sync(member, Invocation(trace.start, (run,)), START_SECONDS)
            except BaseException:  # it may begin yet
                agent.caller.future(member, Invocation(trace.stop, (run,)), STOP_SECONDS)
                raise
            started.append(member)
        trace.start(run)  # last, and ended first: the trace has no calls of its own
        started.append(agent.member)
        yield made
    finally:
        _collect(agent, run, started[::-1], made)
        if path is not None and made.parts:
            made.write(path)


def _collect(agent: Agent, run: str, members: list[Member], made: Trace) -> None:
    """End a trace on all workers, and take what they have recorded."""
    for member in members:
        try:
            if member.token == agent.member.token:
                part, clock = trace.stop(run), Clock()
            else:
                part = agent.caller.sync(member, Invocation(trace.stop, (run,)), STOP_SECONDS)
                ask = functools.partial(
                    agent.caller.sync, member, Invocation(trace.clock_here), START_SECONDS
                )
                clock = measure(ask)
        except CallError as exc:
            logger.warning("the trace lacks the calls of RPC worker %r: %s", member.name, exc)
            continue
        if part is not None:
            made.add(part, clock)
