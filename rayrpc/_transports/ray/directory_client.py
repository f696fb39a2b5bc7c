"""A member's side of its group's directory: join, follow the changes, wait at barriers.

The directory answers each poll within a part of ``peer_timeout``.  If it does not, the member asks
the hosts of the directory and of the other members itself: where the directory's does not answer
either, the members on silent hosts are lost.

    FOLLOWS ──(it was restarted)──> REPORTS ──(it has restored the group)──> FOLLOWS
    FOLLOWS ──(no answer)──> ASKS ──(the directory's host is silent)──> CUT OFF: reports the losses
       ^                      │                                            │
       └──(it answers)────────┘          LEFT: expelled <──(it answers)────┘
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayError

from rayrpc._concurrency.deadlines import Deadline
from rayrpc._concurrency.notices import noticed
from rayrpc._protocol.membership import Change, Member, Snapshot
from rayrpc._protocol.transport import Directory
from rayrpc._transports.ray import ray_api
from rayrpc._transports.ray.cluster import control_service_answers, through_client
from rayrpc._transports.ray.directory_answers import (
    WANTS_MEMBERS,
    Restored,
    SharedReports,
    SharedSnapshot,
    poll_seconds,
)
from rayrpc._transports.ray.directory_start import find_or_create
from rayrpc._transports.ray.endpoint import hosted_endpoint
from rayrpc._transports.ray.group_record import GroupRecord
from rayrpc._transports.ray.host_monitor import PROBE_SECONDS, HostMonitor, raylets
from rayrpc._transports.ray.ray_errors import cause_of
from rayrpc.errors import GroupError

__all__ = ["RayDirectory"]

logger = logging.getLogger(__name__)

# Pause before another attempt to reach the directory.
CALL_RETRY_SECONDS = 0.05
# ... after a failure of Ray that is not known to pass soon.
FAULT_SECONDS = 0.5
# How often a member that waits at a barrier looks whether the directory is silent.
SILENCE_POLL_SECONDS = 0.25
# Why a member that was cut off, and has reported losses itself, leaves the group.
CUT_OFF = "it was cut off from the directory"
# How long the program of a hosted worker that the group has declared lost may take to leave it.
LEAVE_SECONDS = 15.0
LEAVE_POLL_SECONDS = 0.1
# How long a member waits for a directory that need not wait for other members.
ANSWER_SECONDS = 10.0


class RayDirectory(Directory):
    """Call the directory of a group from one of its members.

    Args:
        key (str): names the group.
        namespace (str): Ray namespace of the directory's name.
        peer_timeout (float): after so many seconds without an answer the directory counts as
            lost.
    """

    def __init__(self, key: str, namespace: str, peer_timeout: float) -> None:
        self._key = key
        self._namespace = namespace
        self._peer_timeout = peer_timeout
        # neither it nor its host has answered for ``peer_timeout``
        self._is_silent = False
        self._is_gone = False  # it does not answer, and nothing can start it again
        self._record = GroupRecord()
        self._ports: dict[str, int] = {}  # of raylets, by host
        self._worker = ""
        self._token = ""
        self._host = ""  # the directory's
        self._closed = False
        self._actor: Any = None

    @property
    def _is_lost(self) -> bool:
        """Whether it is not known if the directory will ever answer."""
        return self._is_silent or self._is_gone

    def reach(self, timeout: float) -> None:
        """Wait until the directory runs; create it if there is none.

        Args:
            timeout: in seconds.

        Raises:
            GroupError: it does not run in time.
        """
        try:
            self._host = self._call(lambda actor: actor.ready.remote(), timeout)
        except GetTimeoutError:
            raise GroupError(
                f"the directory of RPC group {self._key!r} did not start in {timeout:g} s. Check "
                "with `ray list actors` whether the Ray cluster is out of memory or of processes."
            ) from None

    def join(self, member: Member, timeout: float) -> Snapshot:
        self._worker = member.name
        size = member.world_size
        others = f", {size} workers: `rayrpc status` shows who is there" if size else ""
        try:
            with noticed(f"RPC group {self._key!r}{others}"):
                answer = self._call(
                    lambda actor: actor.join.remote(member, [actor.watched.remote(member.token)]),
                    timeout,
                )
        except GetTimeoutError:
            raise self._incomplete(member, timeout) from None
        if isinstance(answer, str):
            raise GroupError(answer)
        if isinstance(answer, SharedSnapshot):
            members = ray_api.get(answer.members, timeout=timeout)
            answer = answer.snapshot._replace(members=members)
        self._token = member.token
        self._record.begin(answer)
        self._learn_ports()
        if answer.note:
            logger.warning("%s", answer.note)
        return answer  # type: ignore[no-any-return]

    def _call(self, call: Callable[[Any], Any], timeout: float) -> Any:
        deadline = Deadline(timeout)
        while True:
            self._actor = find_or_create(self._key, self._namespace, self._peer_timeout)
            try:
                return ray_api.get(call(self._actor), timeout=deadline.remaining())
            except RayActorError as exc:
                # the directory of an earlier run may have ended itself just now
                if deadline.expired:
                    raise GroupError(
                        f"the directory of RPC group {self._key!r} cannot be reached: "
                        f"{cause_of(exc)}. Check with `ray status` that the Ray cluster runs."
                    ) from exc
                time.sleep(CALL_RETRY_SECONDS)

    def _incomplete(self, member: Member, timeout: float) -> GroupError:
        withdrawn = ray_api.submit(self._actor.withdraw, member.token)
        missing, users = ray_api.get(withdrawn, timeout=ANSWER_SECONDS)
        ranks = f"rank {missing[0]} is" if len(missing) == 1 else f"ranks {missing} are"
        return GroupError(
            f"RPC worker {member.name!r} waited {timeout:g} s for group {self._key!r} to be "
            f"complete: of world_size {member.world_size}, {ranks} missing. Start the missing "
            "workers as the same user with the same MASTER_ADDR and MASTER_PORT (or init_method) "
            "and on the same Ray cluster, or raise init_timeout."
            + (f" Other programs use the key for groups of their own: {users}." if users else "")
        )

    def follow(
        self,
        version: int,
        apply: Callable[[list[Change]], None],
        on_expelled: Callable[[str], None],
    ) -> None:
        def run() -> None:
            while not self._closed:
                changes = self._next_changes(apply)
                if changes is None or self._closed:
                    return
                if isinstance(changes, str):
                    on_expelled(changes)
                    self._end_unless_left()
                    return
                if changes:
                    try:
                        apply(changes)
                    except Exception:
                        logger.exception("changes of the members of a group were not fully applied")
                    self._record.version = changes[-1].version
                    self._record.add(changes)
                    if any(each.node not in self._ports for each in self._record.members.values()):
                        self._learn_ports()

        threading.Thread(target=run, name="rayrpc-directory", daemon=True).start()

    def _end_unless_left(self) -> None:
        """End this process if it is a hosted worker's, and its program stays in the group."""
        if hosted_endpoint() is None:
            return
        deadline = Deadline(LEAVE_SECONDS)
        while not self._closed:
            if deadline.expired:
                logger.error(
                    "RPC worker %r has not left the group that had declared it lost %g s before: "
                    "its process ends",
                    self._worker,
                    LEAVE_SECONDS,
                )
                os._exit(1)
            time.sleep(LEAVE_POLL_SECONDS)

    def _next_changes(self, apply: Callable[[list[Change]], None]) -> list[Change] | str | None:
        """Return the changes after the version that was applied last.

        They are a text if this worker is no member any more: why; and None if the directory cannot
        be started again, or this is closed.  Any other failure of Ray passes: the directory is
        asked again.

        Args:
            apply: called with the losses that this worker finds where the directory is silent.
        """

        ask = functools.partial(ray_api.submit, self._actor.poll, self._token, self._record.version)
        answer: Any = None
        faults = 0
        begin = time.monotonic()
        monitor: HostMonitor | None = None
        while not self._closed:
            try:
                if answer is None:
                    answer = ask()
                if ray_api.wait([answer], timeout=PROBE_SECONDS)[0]:
                    changes = ray_api.get(answer)
                    self._is_gone = False
                    if self._is_silent:
                        self._is_silent = False
                        # the directory and this worker may not have lost the same members
                        ray_api.submit(self._actor.expel, self._token, CUT_OFF)
                        if changes is None:
                            return CUT_OFF
                    if changes is None or changes == WANTS_MEMBERS:
                        reported: list[Any] = [self._record.report()]
                        if changes is not None:
                            reported.append(list(self._record.members.values()))
                        ask = functools.partial(ray_api.submit, self._actor.restore, *reported)
                        answer = None
                        continue
                    if isinstance(changes, Restored):
                        self._record.version = changes.version
                        changes = changes.changes
                    return changes  # type: ignore[no-any-return]
            except ActorUnavailableError:  # a broken connection, or it is started again
                answer = None
                time.sleep(CALL_RETRY_SECONDS)
            except RayActorError as exc:  # it has died for good
                if not self._closed:
                    self._log_loss(cause_of(exc))
                return None
            except Exception as exc:
                if self._closed:
                    return None
                if not ray.is_initialized():
                    self._log_loss(cause_of(exc))
                    return None
                if not faults:
                    logger.warning("the directory of group %r is asked again: %s", self._key, exc)
                faults += 1
                answer = None
                time.sleep(FAULT_SECONDS)
            silence = time.monotonic() - begin
            expected = poll_seconds(self._peer_timeout, len(self._record.members))
            if silence > expected + PROBE_SECONDS and not through_client():
                if monitor is None:
                    monitor = HostMonitor(self._peer_timeout - silence, self._ports.get)
                self._ask_hosts(monitor, silence, apply)
        return None

    def _ask_hosts(
        self, monitor: HostMonitor, silence: float, apply: Callable[[list[Change]], None]
    ) -> None:
        """Find out which hosts are silent; if the directory's is, report the members there."""
        members = self._record.members.values()
        others = [each for each in members if each.token != self._token]
        lost = asyncio.run(monitor.ask([self._host, *(each.node for each in others)]))
        if self._host not in lost or self._host == ray.util.get_node_ip_address():
            if silence > self._peer_timeout and not self._is_gone:
                self._is_gone = not control_service_answers(PROBE_SECONDS)
                if self._is_gone:
                    self._log_loss("it and Ray's control service have ended")
            return  # else the directory is slow, and will decide
        if not self._is_silent:
            self._is_silent = True
            self._log_loss(f"no answer for {silence:.0f} s")
        changes = [
            Change(
                0,
                "died",
                member,
                f"its host {member.node} has not answered for {silence:.0f} s, nor has the group's "
                "directory",
            )
            for member in others
            if member.node in lost
        ]
        if changes:
            self._record.add(changes)
            apply(changes)

    def _learn_ports(self) -> None:
        """Have the ports of raylets at hand: of silent hosts Ray may not tell them."""
        with contextlib.suppress(RayError):
            self._ports = {**self._ports, **raylets()}

    def _log_loss(self, cause: str) -> None:
        logger.warning(
            "RPC worker %r lost the directory of group %r (%s): it does not learn any more who "
            "joins, leaves or dies",
            self._worker,
            self._key,
            cause,
        )

    def members(self) -> list[Member]:
        return self._ask(lambda: ray_api.submit(self._actor.members, self._token), None)  # type: ignore[no-any-return]

    def _ask(self, call: Callable[[], Any], timeout: float | None) -> Any:
        """Return the directory's answer; ask again if it is restarted meanwhile.

        Args:
            call: calls the directory; returns an ObjectRef.
            timeout: in seconds.

        Raises:
            GetTimeoutError: it did not come in time.
            GroupError: the directory is silent.
        """
        deadline = Deadline(timeout)
        while True:
            try:
                return self._wait(call(), deadline)
            except ActorUnavailableError:
                if self._is_lost:
                    raise self._silence_error() from None
                if self._closed or deadline.expired:
                    raise
                time.sleep(deadline.within(CALL_RETRY_SECONDS))

    def _wait(self, ref: Any, deadline: Deadline) -> Any:
        while not ray_api.wait([ref], timeout=deadline.within(SILENCE_POLL_SECONDS))[0]:
            if self._is_lost:
                raise self._silence_error()
            if deadline.expired:
                raise GetTimeoutError
        return ray_api.get(ref)

    def _silence_error(self) -> GroupError:
        return GroupError(
            f"the directory of group {self._key!r}, which RPC worker {self._worker!r} waits for, "
            f"has not answered for {self._peer_timeout:g} s: this host or the directory's is cut "
            "off, or has died. Restart the run."
        )

    def sync(self, tag: str, payload: Any, timeout: float | None) -> dict[str, Any]:
        try:
            reports: Any = self._ask(
                lambda: ray_api.submit(self._actor.sync, tag, self._token, payload), timeout
            )
            if isinstance(reports, SharedReports):
                reports = ray_api.get(reports.reports, timeout=timeout)
        except GetTimeoutError:
            absent = ray_api.submit(self._actor.absent, tag, self._token)
            names = ", ".join(ray_api.get(absent, timeout=ANSWER_SECONDS))
            raise GroupError(
                f"RPC worker {self._worker!r} waited {timeout:g} s at {tag!r} for workers that "
                f"did not reach it: {names}. They are alive but busy or blocked; call shutdown() "
                "on every worker."
            ) from None
        except RayError as exc:
            raise GroupError(
                f"RPC worker {self._worker!r} waited at {tag!r}, but the directory of group "
                f"{self._key!r} has died: {cause_of(exc)}. Restart the run."
            ) from exc
        # another member may need them, should the directory be restarted before it has its own
        self._record.add_sync(tag, reports)
        return reports  # type: ignore[no-any-return]

    def leave(self) -> None:
        if not ray.is_initialized():  # then the directory saw the end of this process's connection
            return
        deadline = Deadline(ANSWER_SECONDS)
        with contextlib.suppress(RayError):
            while not (deadline.expired or self._is_lost):
                try:
                    left = ray_api.submit(self._actor.leave, self._token)
                    ray_api.get(left, timeout=ANSWER_SECONDS)
                    return
                except ActorUnavailableError:
                    time.sleep(CALL_RETRY_SECONDS)

    def close(self) -> None:
        self._closed = True
