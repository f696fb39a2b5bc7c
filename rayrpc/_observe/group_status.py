"""What the workers of a group do, by their reports: for a terminal, a notebook, a program."""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rayrpc._observe.stacks import place_of
from rayrpc._observe.tables import aligned, as_html, duration, size
from rayrpc._observe.waits import ABSENT, Step, Waits
from rayrpc._protocol.membership import Member

__all__ = ["GroupStatus", "Joining", "Silent"]

# Workers that have waited in a circle for so long are shown.
CIRCLE_SECONDS = 1.0
MOST_CALLS = 20
_WORKER_COLUMNS = (
    "worker",
    "id",
    "node",
    "pid",
    "kind",
    "up",
    "calls made",
    "served",
    "sent",
    "running",
    "queued",
    "RRefs owned",
    "held",
    "memory",
)
_CALL_COLUMNS = ("call", "function", "for", "state")


class Silent(NamedTuple):
    """A member that has not answered.

    Args:
        name (str), node (str), pid (int): of the worker.
        why (str): what happened instead.
    """

    name: str
    node: str
    pid: int
    why: str


class Joining(NamedTuple):
    """A process that waits for the others of its group.

    Args:
        name (str), node (str), pid (int): of the worker.
        missing (list[int]): the ranks that it waits for.
    """

    name: str
    node: str
    pid: int
    missing: Sequence[int]


class GroupStatus:
    """The state of a group.

    Args:
        key (str): names the group.
        owner (str): who started it.
        reports (Iterable[dict]): of the workers; see ``report.Inspector.report``.
        silent (Iterable[Silent]): members that have not answered.
        joining (Iterable[Joining]): processes that are no members yet.
    """

    def __init__(
        self,
        key: str,
        owner: str,
        reports: Iterable[Mapping[str, Any]],
        silent: Iterable[Silent] = (),
        joining: Iterable[Joining] = (),
    ) -> None:
        self.key = key
        self.owner = owner
        self.workers = sorted(reports, key=lambda report: report["id"])
        self.silent = list(silent)
        self.joining = list(joining)
        self._waits = Waits(self.workers)

    @classmethod
    def of(
        cls,
        key: str,
        owner: str,
        answers: Iterable[tuple[Member, bytes | str]],
        joining: Iterable[tuple[Member, Sequence[int]]] = (),
    ) -> GroupStatus:
        """Return the state of a group by what its members have answered.

        Args:
            key, owner: of the group.
            answers: the report of each member, as JSON; or, as text, why there is none.
            joining: who wait for others, and for which ranks.
        """
        reports, silent = [], []
        for member, answer in answers:
            if isinstance(answer, bytes):
                reports.append(json.loads(answer))
            else:
                silent.append(Silent(member.name, member.node, member.pid, answer))
        waiting = [Joining(each.name, each.node, each.pid, ranks) for each, ranks in joining]
        return cls(key, owner, reports, silent, waiting)

    @property
    def calls(self) -> list[dict[str, Any]]:
        """The calls that wait for their replies, the oldest first.

        By call: ``from``, ``to``, ``function``, ``seconds``, and ``state``: "sent" until the callee
        knows it, "queued" until a slot is free, "running", "waiting" for a Future or for a value.
        """
        return self._waits.calls()

    @property
    def deadlocks(self) -> list[list[str]]:
        """The circles of workers that can never go on, unless a call times out."""
        return self._waits.deadlocks()

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain values, for JSON."""
        return {
            "key": self.key,
            "owner": self.owner,
            "workers": list(self.workers),
            "silent": [each._asdict() for each in self.silent],
            "joining": [each._asdict() for each in self.joining],
            "calls": self.calls,
            "deadlocks": self.deadlocks,
        }

    # -- as text ------------------------------------------------------------------------------

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        names = ", ".join(report["name"] for report in self.workers)
        return f"<status of group {self.key!r}: {names}>"

    def text(self, before: GroupStatus | None = None) -> str:
        """Return it for a terminal.

        Args:
            before: the same group some time ago, to show how many calls and bytes there were a
                second.
        """
        lines = [self._title(), *aligned(_WORKER_COLUMNS, self._worker_rows(before))]
        lines += self._absent()
        calls = self.calls
        if calls:
            lines += ["", *aligned(_CALL_COLUMNS, _call_rows(calls[:MOST_CALLS]))]
        if len(calls) > MOST_CALLS:
            lines.append(f"... and {len(calls) - MOST_CALLS} more calls")
        lines += ["", *absences] if (absences := self._absences()) else []
        return "\n".join([*lines, *self._circles()])

    def stacks(self, worker: str | None = None) -> str:
        """Return where the users' code of all workers is, and which call waits for which.

        Args:
            worker: the name of one, to show no other's stacks.
        """
        lines = [self._title()]
        for report in self.workers:
            if worker in (None, report["name"]):
                lines += _stack_lines(report, self._waits)
        lines += self._absent()
        chains = [_chain_text(chain) for chain in self._waits.chains()]
        return "\n".join([*lines, *(["", *chains] if chains else []), *self._circles()])

    def _title(self) -> str:
        owner = f", started by {self.owner}" if self.owner else ""
        count = len(self.workers) + len(self.silent)
        return f"group {self.key!r}: {count} worker{'' if count == 1 else 's'}{owner}"

    def _worker_rows(self, before: GroupStatus | None) -> list[list[str]]:
        earlier = {} if before is None else {each["pid"]: each for each in before.workers}
        return [_worker_row(report, earlier.get(report["pid"])) for report in self.workers]

    def _absent(self) -> list[str]:
        lines = [
            f"{each.name} (node {each.node}, pid {each.pid}) {each.why}" for each in self.silent
        ]
        for joining in self.joining:
            ranks = ", ".join(map(str, joining.missing)) or "none"
            lines.append(
                f"{joining.name} (node {joining.node}, pid {joining.pid}) is in init_rpc; ranks "
                f"missing: {ranks}"
            )
        return lines

    def _absences(self) -> list[str]:
        return [
            f"{worker} {_wait_text(wait)} ({duration(wait['seconds'])})"
            for worker, wait in self._waits.absences()
        ]

    def _circles(self) -> list[str]:
        deadlocks = self.deadlocks
        lines = [f"deadlock: {_circle_text(circle)}" for circle in deadlocks]
        known = {frozenset(circle) for circle in deadlocks}
        lines += [
            f"each waits for a call on the next: {_circle_text(circle)}: a deadlock, if these "
            "calls need what the waiting threads hold"
            for circle in self._waits.circles(CIRCLE_SECONDS)
            if frozenset(circle) not in known
        ]
        return ["", *lines] if lines else []

    def _repr_html_(self) -> str:
        parts = [f"<p>{html.escape(self._title())}</p>"]
        parts.append(as_html(_WORKER_COLUMNS, self._worker_rows(None)))
        if self.calls:
            parts.append(as_html(_CALL_COLUMNS, _call_rows(self.calls[:MOST_CALLS])))
        rest = [line for line in [*self._absent(), *self._absences(), *self._circles()] if line]
        return "".join([*parts, *(f"<p>{html.escape(line)}</p>" for line in rest)])


def _worker_row(report: Mapping[str, Any], before: Mapping[str, Any] | None) -> list[str]:
    def count(value: Callable[[Mapping[str, Any]], float], text: Callable[[float], str]) -> str:
        if before is None:
            return text(value(report))
        seconds = max(report["seconds"] - before["seconds"], 1e-3)
        return f"{text((value(report) - value(before)) / seconds)}/s"

    slots, rrefs = report["slots"], report["rrefs"]
    return [
        report["name"],
        str(report["id"]),
        report["node"],
        str(report["pid"]),
        "hosted" if report["hosted"] else "attached",
        duration(report["seconds"]),
        count(lambda each: each["sent"], "{:.0f}".format),
        count(lambda each: each["served"], "{:.0f}".format),
        count(lambda each: sum(each["sent_bytes"].values()), size),
        f"{slots['busy']}/{slots['limit']}",
        str(slots["queued"]),
        str(rrefs["owned"]),
        str(rrefs["held"]),
        size(report["memory"]),
    ]


def _call_rows(calls: Iterable[Mapping[str, Any]]) -> list[list[str]]:
    return [
        [
            f"{call['from']} -> {call['to']}",
            call["function"],
            duration(call["seconds"]),
            call["state"],
        ]
        for call in calls
    ]


def _stack_lines(report: Mapping[str, Any], waits: Waits) -> list[str]:
    lines = ["", f"-- {report['name']} (node {report['node']}, pid {report['pid']})"]
    for thread in report["threads"]:
        wait = thread["waits_in"]
        if not thread["stack"] and not thread["waits_for"] and not wait:
            continue
        role = ""
        if thread["serves"]:
            call = waits.served(thread["serves"])
            role = f", runs {call['function']} for {call['from']} ({duration(call['seconds'])})"
        lines.append(f"thread {thread['name']}{role}:")
        for frame in thread["stack"]:
            lines.append(f'  File "{frame["file"]}", line {frame["line"]}, in {frame["function"]}')
            if frame["text"]:
                lines.append(f"    {frame['text']}")
        lines += [f"  waits for {waits.describe(key)}" for key in thread["waits_for"]]
        if wait and wait["for"]:
            lines.append(f"  {_wait_text(wait)}")
    return lines


def _wait_text(wait: Mapping[str, Any]) -> str:
    return f"waits in {wait['where']} for {', '.join(wait['for'])}"


def _chain_text(chain: Sequence[Step]) -> str:
    first = chain[0]
    text = first.worker
    for step in chain:
        if step.state == ABSENT:
            how_long = duration(step.seconds)
            text += f" waits in {step.function} for {step.to} ({how_long}), which"
            continue
        how = "" if step.state == "running" else f", {step.state}"
        text += f" waits for {step.to} ({step.function}, {duration(step.seconds)}{how}), which"
    last, text = chain[-1], text.removesuffix(", which")
    if place := place_of(last.stack):
        how = ", which is at" if last.state in ("running", ABSENT) else ", behind a call that is at"
        text += f"{how} {place}"
    return text


def _circle_text(circle: Sequence[str]) -> str:
    return " -> ".join([*circle, circle[0]])
