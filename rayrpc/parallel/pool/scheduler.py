"""Which worker does which task: the pool's side, which workers ask for more.

A worker that asks brings the results that it has.  Tasks that turn out to be short are given
several at a time.  If they are not after all, the worker is asked for the results that are ready,
and for the tasks that it has not begun if others have nothing to do.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch.futures import Future

from rayrpc.parallel.pool.tasks import Result, Task

__all__ = ["Scheduler"]

# So much work is given at a time; a message costs a tenth of it.
GIVE_SECONDS = 0.002
GIVE_MOST = 256
# Who has had several tasks for so long is asked what has become of them.
LATE_SECONDS = 0.05

_Key = tuple[int, int]  # of a task: its job and index
_Answer = tuple[Any, str, list[Task]]  # what completes with the tasks, of whom, and they


@dataclass
class _Worker:
    """What the scheduler knows of a worker.

    Args:
        room (int | None): how many more tasks it takes in its life.
        given: tasks that it has.
        since (float): when it got them.
        count (int): how many they were.
        turn (int): how often it was given some.
        asks (Future | None): what completes with its next tasks.
        has_asked (bool): it did once.
        was_late (bool): it was asked what has become of them.
    """

    room: int | None
    given: dict[_Key, Task] = field(default_factory=dict)
    since: float = 0.0
    count: int = 0
    turn: int = 0
    asks: Any = None
    has_asked: bool = False
    was_late: bool = False


class Scheduler:
    """Hand out tasks.

    Args:
        done: takes each result, once.
        pack: makes of a worker's name and its next tasks what is sent to it.
    """

    def __init__(
        self,
        done: Callable[[Result], None],
        pack: Callable[[str, list[Task]], Any] = lambda _, tasks: tasks,
    ) -> None:
        self._done = done
        self._pack = pack
        self._lock = threading.Lock()
        self._tasks: deque[Task] = deque()
        self._workers: dict[str, _Worker] = {}
        self._idle: deque[str] = deque()
        self._seconds = GIVE_SECONDS  # that a task takes, with its message
        self._closed = False

    def add(self, name: str, room: int | None) -> None:
        """Take in a worker that may do ``room`` tasks."""
        with self._lock:
            self._workers[name] = _Worker(room)

    def remove(self, name: str, error: BaseException) -> bool:
        """Let go of a worker; tasks that it had fail.  Tell whether it ever asked for one."""
        with self._lock:
            worker = self._workers.pop(name, None)
            if worker is None:
                return True
            if name in self._idle:
                self._idle.remove(name)
        if worker.asks is not None:
            worker.asks.set_result(None)
        for job, index in worker.given:
            self._done((job, index, (False, error)))
        return worker.has_asked

    def put(self, task: Task) -> None:
        """Take in a task."""
        with self._lock:
            self._tasks.append(task)
            answers = self._match()
        self._send(answers)

    def close(self, drop: bool = False) -> None:
        """Answer workers that find no task with None, from now on.

        Args:
            drop (bool): forget the tasks that nobody has taken.
        """
        with self._lock:
            self._closed = True
            if drop:
                self._tasks.clear()
            answers = self._match()
        self._send(answers)

    def report(self, name: str, results: Iterable[Result]) -> None:
        """Take results of a worker."""
        with self._lock:
            worker = self._workers.get(name)
            given = worker.given if worker is not None else {}
            # what is not in it was reported before, or has failed with its worker
            fresh = [each for each in results if given.pop(each[:2], None) is not None]
        for result in fresh:
            self._done(result)

    def take(self, name: str, results: Iterable[Result]) -> Any:
        """Take results of a worker that has nothing more to do.

        Returns:
            Future: of its next tasks, None at the end.
        """
        self.report(name, results)
        future: Any = Future()
        with self._lock:
            worker = self._workers.get(name)
            if worker is None:
                future.set_result(None)
                return future
            if worker.count:
                self._learn((time.monotonic() - worker.since) / worker.count)
            self._take_back(worker, list(worker.given))  # it has not got them
            if worker.asks is None:
                self._idle.append(name)
            else:  # nobody hears the answer to what it asked before
                worker.asks.set_result(None)
            worker.asks = future
            worker.has_asked = True
            answers = self._match()
        self._send(answers)
        return future

    def late(self) -> list[tuple[str, int, bool]]:
        """Return workers that have had several tasks for long, and whether to take any back.

        Returns:
            for each its name, its turn, and whether others have nothing to do.
        """
        now = time.monotonic()
        with self._lock:
            late = [
                name
                for name, worker in self._workers.items()
                if worker.asks is None and worker.count > 1 and now - worker.since > LATE_SECONDS
                if not worker.was_late or self._idle
            ]
            for name in late:
                self._workers[name].was_late = True
            return [(name, self._workers[name].turn, bool(self._idle)) for name in late]

    def give_back(self, name: str, turn: int, keys: Iterable[_Key]) -> None:
        """Take back tasks of a turn of a worker, which has not begun them, and will not."""
        with self._lock:
            worker = self._workers.get(name)
            if worker is None or worker.turn != turn:  # it may have got them again
                return
            self._take_back(worker, keys)
            worker.count = 1
            answers = self._match()
        self._send(answers)

    def _take_back(self, worker: _Worker, keys: Iterable[_Key]) -> None:
        back = [worker.given.pop(key) for key in keys if key in worker.given]
        if worker.room is not None:
            worker.room += len(back)
        self._tasks.extendleft(reversed(back))

    def _learn(self, seconds: float) -> None:
        # at once if they became longer, slowly if shorter
        self._seconds = max(seconds, 0.5 * (self._seconds + seconds))

    def _match(self) -> list[_Answer]:
        """Give tasks to workers that ask; return what to send."""
        answers: list[_Answer] = []
        while self._idle and (self._tasks or self._closed):
            name = self._idle.popleft()
            worker = self._workers[name]
            tasks = self._next(worker)
            answers.append((worker.asks, name, tasks))
            worker.asks = None
            worker.given = {task[:2]: task for task in tasks}
            worker.since = time.monotonic()
            worker.count = len(tasks)
            worker.turn += 1
            worker.was_late = False
            if worker.room is not None:
                worker.room -= len(tasks)
        return answers

    def _next(self, worker: _Worker) -> list[Task]:
        share = len(self._tasks) // (2 * len(self._workers))
        count = min(share, int(GIVE_SECONDS / self._seconds), GIVE_MOST)
        if worker.room is not None:
            count = min(count, worker.room)
        return [self._tasks.popleft() for _ in range(min(max(1, count), len(self._tasks)))]

    def _send(self, answers: list[_Answer]) -> None:
        for future, name, tasks in answers:
            future.set_result(self._pack(name, tasks) if tasks else None)
