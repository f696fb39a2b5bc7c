"""Look at the groups of a cluster from a process that is in none.

The directories tell who is in their groups, and each worker's actor endpoint passes the question on
to the worker.  Torch is never imported here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import ray
from ray.exceptions import GetTimeoutError, RayError

from rayrpc._concurrency.deadlines import Deadline
from rayrpc._protocol.membership import Member
from rayrpc._protocol.messages import Frame, Kind
from rayrpc._transports.ray import ray_api
from rayrpc._transports.ray.cluster import through_client
from rayrpc._transports.ray.directory_answers import DIRECTORY_NAME, Description
from rayrpc._transports.ray.endpoint import from_wire, to_wire

__all__ = ["GroupAnswers", "ask_groups", "describe"]

NOBODY = -1  # for the id of a worker
DESCRIBE_SECONDS = 10.0


class GroupAnswers(NamedTuple):
    """A run of a group, and what its workers have answered.

    Args:
        key (str): names the group.
        joining (list[tuple[Member, list[int]]]): who wait for others, and for which ranks; with
            the first run of the group.
        answers (list[tuple[Member, bytes | str]]): the report of each worker; or, as text, why
            there is none.
    """

    key: str
    joining: Sequence[tuple[Member, Sequence[int]]]
    answers: Sequence[tuple[Member, bytes | str]]


def describe(key: str, namespace: str) -> Description | None:
    """Return who is in a group; None if there is none, or its directory does not answer.

    Args:
        key (str): names the group.
        namespace (str): Ray namespace of its directory's name.
    """
    try:
        directory = ray_api.get_actor(f"{DIRECTORY_NAME}{key}", namespace=namespace)
        answer = ray_api.submit(directory.describe)
        described: Description = ray_api.get(answer, timeout=DESCRIBE_SECONDS)
        return described
    except (ValueError, RayError):
        return None


def ask_groups(what: bytes, seconds: float) -> list[GroupAnswers]:
    """Ask the workers of all groups on the cluster that this process is connected to.

    Args:
        what: see ``Inspector.answer``.
        seconds: how long a worker may take.
    """
    named = ray.util.list_named_actors(all_namespaces=True)
    directories = []
    for each in named:
        if each["name"].startswith(DIRECTORY_NAME):
            with contextlib.suppress(ValueError, RayError):  # it has just ended
                actor = ray_api.get_actor(each["name"], namespace=each["namespace"])
                directories.append(actor.describe.remote())
    descriptions: list[Description] = []
    deadline = Deadline(seconds)
    for ref in directories:
        with contextlib.suppress(RayError):  # as above; or its host is cut off
            descriptions.append(ray_api.get(ref, timeout=deadline.within(seconds)))
    return [
        GroupAnswers(key, [] if number else joining, _ask(session, what, seconds))
        for key, sessions, joining in descriptions
        for number, session in enumerate(sessions or [[]])
        if session or joining
    ]


def _ask(
    members: Sequence[Member], what: bytes, seconds: float
) -> list[tuple[Member, bytes | str]]:
    wire = to_wire(Frame(Kind.INSPECT, 0, NOBODY, data=what), through_client())
    asked: list[tuple[Member, Any]] = []
    for member in members:
        try:
            asked.append((member, member.address.find().inspect.remote(wire, seconds)))
        except ValueError:
            asked.append((member, None))
    deadline = Deadline(seconds + 1)
    return [(member, _answer(ref, deadline.within(seconds + 1))) for member, ref in asked]


def _answer(ref: Any, seconds: float) -> bytes | str:
    silent = "does not answer: it is stopped, or its code holds the interpreter's lock"
    if ref is None:
        return "has ended"
    try:
        wire = ray_api.get(ref, timeout=seconds)
    except GetTimeoutError:
        return silent
    except RayError as exc:
        return f"could not be asked: {type(exc).__name__}"
    if wire is None:
        return silent
    reply = from_wire(wire)
    return reply.data if reply.kind is Kind.VALUE else "could not report"
