"""Who waits for whom, by the reports of a group's workers: a pure graph.

    thread ──waits for──> call ──runs in──> thread        of the callee
                           ├─── is queued behind ──> calls that run there: any may make room
                           └─── fetches the value of ──> the call that makes it

A call of which the callee does not know, and one whose Future or coroutine is not done, depend on
nothing that is known here.  What can go on, can go on for ever; the rest is a deadlock: each report
tells what held at one moment, and what waits goes on waiting until what it waits for has ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

__all__ = ["ABSENT", "Step", "Waits"]

#: the state of a step without a call
ABSENT = "absent"

#: ("thread", worker, ident) or ("call", key)
Node = tuple[Any, ...]


class Step(NamedTuple):
    """A worker that waits for a call, or, in a shutdown or a pass, for another worker.

    Args:
        worker (str): that waits.
        thread (str): its thread.
        to (str): the callee, or the first of the workers that it waits for.
        function (str): that the call runs; without a call, what it waits in: "shutdown".
        seconds (float): since the call was made, or the wait began.
        state (str): of the call at the callee: "running", "waiting", "queued"; "sent": the callee
            does not know it; "absent": there is no call.
        stack (list): of the callee's thread that runs the call, or what the call waits for; without
            a call, of the other worker's main; empty if there is none, or stacks were not reported.
    """

    worker: str
    thread: str
    to: str
    function: str
    seconds: float
    state: str
    stack: Sequence[Mapping[str, Any]] = ()


class Waits:
    """The graph of a group.

    Args:
        reports (Iterable[dict]): of its workers; see ``report.Inspector.report``.
    """

    def __init__(self, reports: Iterable[Mapping[str, Any]]) -> None:
        self._reports = {report["name"]: report for report in reports}
        self._sent: dict[str, Mapping[str, Any]] = {}
        self._callers: dict[str, str] = {}
        self._served: dict[str, tuple[str, Mapping[str, Any]]] = {}
        self._threads: dict[tuple[str, int], Mapping[str, Any]] = {}
        for name, report in self._reports.items():
            for call in report["calls"]:
                self._sent[call["key"]] = call
                self._callers[call["key"]] = name
            for call in report["serving"]:
                self._served[call["key"]] = name, call
            for thread in report["threads"]:
                self._threads[name, thread["ident"]] = thread
        self._stuck = self._find_stuck()

    # -- calls --------------------------------------------------------------------------------

    def calls(self) -> list[dict[str, Any]]:
        """Return the calls that wait for their replies, the oldest first.

        Returns:
            By call: ``from``, ``to``, ``function``, ``seconds`` and ``state``.
        """
        calls = [
            {
                "from": self._callers[key],
                "to": call["to"],
                "function": self._function(key),
                "seconds": call["seconds"],
                "state": self._state(key),
            }
            for key, call in self._sent.items()
        ]
        return sorted(calls, key=lambda call: -call["seconds"])

    def _function(self, key: str) -> str:
        """Return the name of what a call runs; the callee knows methods of RRefs, too."""
        served = self._served.get(key)
        name = served[1]["function"] if served is not None else ""
        return name or (self._sent[key]["function"] if key in self._sent else "")

    def _state(self, key: str) -> str:
        served = self._served.get(key)
        return "sent" if served is None else str(served[1]["state"])

    def served(self, key: str) -> Mapping[str, Any]:
        """Return the callee's report of a call that it serves."""
        return self._served[key][1]

    def describe(self, key: str) -> str:
        """Return a call in words."""
        served, sent = self._served.get(key), self._sent.get(key)
        to = served[0] if served is not None else sent["to"] if sent is not None else "?"
        return f"{self._function(key) or 'a call'} on {to}, {self._state(key)}"

    # -- threads ------------------------------------------------------------------------------

    def absences(self) -> list[tuple[str, Mapping[str, Any]]]:
        """Return which workers wait for others apart from calls, the longest wait first.

        Returns:
            Names, each with ``where`` it waits, ``for`` which workers, and the ``seconds``.
        """
        found = [
            (worker, thread["waits_in"])
            for (worker, _), thread in self._threads.items()
            if thread["waits_in"] and thread["waits_in"]["for"]
        ]
        return sorted(found, key=lambda each: -each[1]["seconds"])

    def chains(self) -> list[list[Step]]:
        """Return what threads wait for, step by step; the longest wait first.

        A chain begins at a thread that nothing waits for, if there is one.  It ends where a worker
        runs a function, or does not wait for a call, or at a thread that is in it already.
        """
        waited = {key for thread in self._threads.values() for key in thread["waits_for"]}

        def rank(where: tuple[str, int]) -> int:
            serves = self._threads[where]["serves"]
            return 0 if not serves else 2 if serves in waited else 1

        seen: set[tuple[str, int]] = set()  # in a chain, but not as its begin
        found = []
        for where in sorted(self._threads, key=rank):
            if where not in seen and (chain := self._chain(*where, seen)):
                found.append(chain)
        return sorted(found, key=lambda chain: -chain[0].seconds)

    def _chain(self, worker: str, ident: int, seen: set[tuple[str, int]]) -> list[Step]:
        chain: list[Step] = []
        here: set[tuple[str, int]] = set()
        while (worker, ident) not in here:
            here.add((worker, ident))
            if len(here) > 1:
                seen.add((worker, ident))
            thread = self._threads.get((worker, ident))
            if thread is None:
                break
            if not thread["waits_for"]:
                if not (wait := thread["waits_in"]) or not wait["for"]:
                    break
                to = wait["for"][0]
                main = self._main_of(to)
                stack = self._threads[main]["stack"] if main is not None else ()
                where, seconds = wait["where"], wait["seconds"]
                chain.append(Step(worker, thread["name"], to, where, seconds, ABSENT, stack))
                if main is None:
                    break
                worker, ident = main
                continue
            # of several, one that cannot end explains more
            keys = sorted(thread["waits_for"], key=lambda key: ("call", key) not in self._stuck)
            key = keys[0]
            to, call = self._served.get(key, ("", {}))
            sent = self._sent.get(key, {})
            blocker = self._blocker(key)
            blocking = self._threads.get(blocker, {}) if blocker is not None else {}
            chain.append(
                Step(
                    worker,
                    thread["name"],
                    to or sent.get("to", "?"),
                    self._function(key),
                    sent.get("seconds", call.get("seconds", 0.0)),
                    self._state(key),
                    blocking.get("stack", ()),
                )
            )
            if blocker is None:
                break
            worker, ident = blocker
        return chain

    def _main_of(self, worker: str) -> tuple[str, int] | None:
        """Return the main thread of a worker, if it has reported."""
        threads = self._reports[worker]["threads"] if worker in self._reports else ()
        return next(((worker, each["ident"]) for each in threads if each["is_main"]), None)

    def _blocker(self, key: str) -> tuple[str, int] | None:
        """Return the thread that a call waits for, if it is known."""
        served = self._served.get(key)
        if served is None:
            return None
        worker, call = served
        if call["thread"]:
            return worker, call["thread"]
        behind = [*call["after"], *(self._running(worker) if call["state"] == "queued" else ())]
        behind.sort(key=lambda key: ("call", key) not in self._stuck)
        for each in behind:
            if self._served[each][1]["thread"]:
                return worker, self._served[each][1]["thread"]
        return None

    def _running(self, worker: str) -> list[str]:
        calls = self._reports[worker]["serving"]
        return [call["key"] for call in calls if call["state"] == "running"]

    # -- deadlocks ----------------------------------------------------------------------------

    def deadlocks(self) -> list[list[str]]:
        """Return the circles of workers whose calls wait for one another, and can never end."""
        circles: dict[frozenset[str], list[str]] = {}
        for node in self._stuck:
            path: list[Node] = []
            while node not in path:
                path.append(node)
                node = next(each for each in self._needs(node)[0] if each in self._stuck)
            circle = [each[1] for each in path[path.index(node) :] if each[0] == "thread"]
            if circle:
                first = circle.index(min(circle))
                circles.setdefault(frozenset(circle), circle[first:] + circle[:first])
        return sorted(circles.values())

    def circles(self, seconds: float) -> list[list[str]]:
        """Return the circles of workers each of which has waited for a call on the next one.

        If they hold locks that these calls take, or wait for what these calls do, it is a deadlock.

        Args:
            seconds: for how long at least.
        """
        nexts: dict[str, list[str]] = {}
        for worker, report in self._reports.items():
            keys = {key for thread in report["threads"] for key in thread["waits_for"]}
            nexts[worker] = sorted(
                {
                    call["to"]
                    for call in report["calls"]
                    if call["key"] in keys
                    and call["seconds"] >= seconds
                    and call["to"] in self._reports
                    and call["to"] != worker
                }
            )
        return _circles(nexts)

    def _find_stuck(self) -> set[Node]:
        nodes: list[Node] = [("thread", *where) for where in self._threads]
        nodes += [("call", key) for key in self._served]
        stuck = set(nodes)
        changed = True
        while changed:
            changed = False
            for node in nodes:
                if node in stuck and not self._is_stuck(node, stuck):
                    stuck.discard(node)
                    changed = True
        return stuck

    def _is_stuck(self, node: Node, stuck: set[Node]) -> bool:
        needs, any_will_do = self._needs(node)
        if not needs:
            return False
        return (all if any_will_do else any)(each in stuck for each in needs)

    def _needs(self, node: Node) -> tuple[list[Node], bool]:
        """Return what has to end before a node can go on, and whether any one of it will do."""
        if node[0] == "thread":
            thread = self._threads[node[1], node[2]]
            return [("call", key) for key in thread["waits_for"] if key in self._served], False
        worker, call = self._served[node[1]]
        if call["thread"]:
            where = worker, call["thread"]
            return [("thread", *where)] if where in self._threads else [], False
        if call["state"] == "queued":
            slots = self._reports[worker]["slots"]
            running = self._running(worker)
            # one that runs elsewhere, or that has ended since, will make room
            is_full = slots["busy"] >= slots["limit"] and len(running) >= slots["limit"]
            return [("call", key) for key in running] if is_full else [], True
        return [("call", key) for key in call["after"]], False


def _circles(nexts: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """Return one circle through each group of nodes that reach one another."""
    circles: dict[frozenset[str], list[str]] = {}
    for start in sorted(nexts):
        # the shortest way back, breadth first
        ways = {start: [start]}
        queue = [start]
        circle: list[str] | None = None
        while queue and circle is None:
            node = queue.pop(0)
            for each in nexts[node]:
                if each == start:
                    circle = ways[node]
                    break
                if each not in ways:
                    ways[each] = [*ways[node], each]
                    queue.append(each)
        if circle is not None:
            circles.setdefault(frozenset(circle), circle)
    return list(circles.values())
