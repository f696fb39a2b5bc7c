"""Which worker runs which task; pure: requests and results in, tasks and results out.

A worker requests tasks, and reports the results of the last ones with it.  Short tasks are given
several at a time, as a batch.  If a batch takes long after all, the pool collects the results that
its worker keeps and, where other workers are idle, the tasks that it has not begun.

A worker::

                           tasks                   batch takes long
    NEW ──request──> IDLE ───────> BUSY ──────────────────────────────> OVERDUE
                     ^  │           │                                      │
                     │  └─closed──> ENDING                                 │
                     └──────────────request (from any state)───────────────┘

``remove_worker`` ends it in any state: its tasks fail, its request is answered with None.

A task::

    submit ──> queued ──────> given ──report──────────> done
                 │  ^           │ └──remove_worker────> failed
                 │  └───────────┘
                 │   returned, or its worker requests tasks without having its result
                 └──close(drop)──> dropped
"""

from __future__ import annotations

import enum
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch.futures import Future

from rayrpc.parallel.pool.tasks import Result, Task

__all__ = ["Overdue", "Scheduler", "TaskKey"]

# A batch is this much work; a message costs a tenth of it.
BATCH_SECONDS = 0.002
MAX_BATCH = 256
# After so long the results of a batch of several tasks are collected.
OVERDUE_SECONDS = 0.05

TaskKey = tuple[int, int]  # job and index
_Answer = tuple[Any, str, list[Task]]  # the Future of a request, its worker, and the batch


class _State(enum.Enum):
    NEW = enum.auto()
    IDLE = enum.auto()
    BUSY = enum.auto()
    OVERDUE = enum.auto()
    ENDING = enum.auto()


class Overdue(NamedTuple):
    """A worker whose batch takes long.

    Args:
        name (str): of the worker.
        batch (int): number of its batch, for ``return_tasks``.
        revoke (bool): others are idle, so tasks that it has not begun are wanted.
    """

    name: str
    batch: int
    revoke: bool


@dataclass
class _Worker:
    """A worker as the scheduler sees it.

    Args:
        max_tasks (int | None): how many more tasks it runs in its life; None: any number.
        state (_State): see the drawing above.
        request (Future | None): to complete with its next tasks, while IDLE.
        given (dict): tasks whose results are missing.
        batch (int): number of its last batch.
        size (int): number of tasks in that batch that were not returned.
        since (float): when it was given, on the scheduler's clock.
    """

    max_tasks: int | None
    state: _State = _State.NEW
    request: Any = None
    given: dict[TaskKey, Task] = field(default_factory=dict)
    batch: int = 0
    size: int = 0
    since: float = 0.0


class Scheduler:
    """Give tasks to workers that request them.  Methods may be called from any thread.

    Args:
        on_result (Callable): called with each result, once.
        encode (Callable): maps a worker's name and its next tasks to what completes its request.
        clock (Callable): returns the time in seconds.
    """

    def __init__(
        self,
        on_result: Callable[[Result], None],
        encode: Callable[[str, list[Task]], Any] = lambda _, tasks: tasks,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._on_result = on_result
        self._encode = encode
        self._clock = clock
        self._lock = threading.Lock()
        self._tasks: deque[Task] = deque()
        self._workers: dict[str, _Worker] = {}
        self._idle: deque[str] = deque()
        self._task_seconds = BATCH_SECONDS  # estimate for a task with its share of a message
        self._closed = False

    def add_worker(self, name: str, max_tasks: int | None) -> None:
        """Add a worker that may run ``max_tasks`` tasks; None: any number."""
        with self._lock:
            self._workers[name] = _Worker(max_tasks)

    def remove_worker(self, name: str, error: BaseException) -> bool:
        """Remove a worker; tasks that it was given fail.

        Args:
            name (str): of the worker.
            error (BaseException): of its tasks.

        Returns:
            Whether it ever requested tasks.
        """
        with self._lock:
            worker = self._workers.pop(name, None)
            if worker is None:
                return True
            if worker.state is _State.IDLE:
                self._idle.remove(name)
        if worker.request is not None:
            worker.request.set_result(None)
        for job, index in worker.given:
            self._on_result((job, index, (False, error)))
        return worker.state is not _State.NEW

    def submit(self, task: Task) -> None:
        """Queue a task."""
        with self._lock:
            self._tasks.append(task)
            answers = self._match()
        self._send(answers)

    def close(self, drop: bool = False) -> None:
        """Answer requests with None where no task is queued, from now on.

        Args:
            drop (bool): drop the queued tasks.
        """
        with self._lock:
            self._closed = True
            if drop:
                self._tasks.clear()
            answers = self._match()
        self._send(answers)

    def report(self, name: str, results: Iterable[Result]) -> None:
        """Accept results of a worker; those that it reported before are ignored."""
        with self._lock:
            worker = self._workers.get(name)
            given = worker.given if worker is not None else {}
            # what is not in it was reported before, or failed with its worker
            fresh = [each for each in results if given.pop(each[:2], None) is not None]
        for result in fresh:
            self._on_result(result)

    def request(self, name: str, results: Iterable[Result]) -> Any:
        """Accept results of a worker that has run all its tasks, and give it the next ones.

        Args:
            name (str): of the worker.
            results (Iterable[Result]): of the last batch; tasks whose result is missing here did
                not arrive, and are queued again.

        Returns:
            Future: of the encoded tasks; None where there will be none.
        """
        self.report(name, results)
        future: Any = Future()
        with self._lock:
            worker = self._workers.get(name)
            if worker is None:
                future.set_result(None)
                return future
            if worker.size:
                self._update_estimate((self._clock() - worker.since) / worker.size)
            self._requeue(worker, list(worker.given))
            if worker.state is _State.IDLE:  # the caller of its last request gave up waiting
                worker.request.set_result(None)
            else:
                self._idle.append(name)
            worker.state, worker.request = _State.IDLE, future
            answers = self._match()
        self._send(answers)
        return future

    def find_overdue(self) -> list[Overdue]:
        """Return the workers to collect results from: several tasks take them long.

        A worker is returned once for a batch, and again while others are idle.
        """
        now = self._clock()
        with self._lock:
            revoke = bool(self._idle)
            states = (_State.BUSY, _State.OVERDUE) if revoke else (_State.BUSY,)
            found = []
            for name, worker in self._workers.items():
                if (
                    worker.state in states
                    and worker.size > 1
                    and now - worker.since > OVERDUE_SECONDS
                ):
                    worker.state = _State.OVERDUE
                    found.append(Overdue(name, worker.batch, revoke))
            return found

    def return_tasks(self, name: str, batch: int, keys: Iterable[TaskKey]) -> None:
        """Queue tasks again that a worker has not begun, and will not.

        Args:
            name (str): of the worker.
            batch (int): number of the batch that they were given in; ignored if it is not the
                last one, because the worker may have been given the same tasks again.
            keys (Iterable[TaskKey]): of the tasks.
        """
        with self._lock:
            worker = self._workers.get(name)
            if worker is None or worker.batch != batch:
                return
            self._requeue(worker, keys)
            worker.size = 1
            answers = self._match()
        self._send(answers)

    def _requeue(self, worker: _Worker, keys: Iterable[TaskKey]) -> None:
        returned = [worker.given.pop(key) for key in keys if key in worker.given]
        if worker.max_tasks is not None:
            worker.max_tasks += len(returned)
        self._tasks.extendleft(reversed(returned))

    def _update_estimate(self, seconds: float) -> None:
        # up at once, down slowly
        self._task_seconds = max(seconds, 0.5 * (self._task_seconds + seconds))

    def _match(self) -> list[_Answer]:
        """Give tasks to idle workers; return what to send when the lock is released."""
        answers: list[_Answer] = []
        while self._idle and (self._tasks or self._closed):
            name = self._idle.popleft()
            worker = self._workers[name]
            tasks = self._next_batch(worker)
            answers.append((worker.request, name, tasks))
            worker.request = None
            worker.state = _State.BUSY if tasks else _State.ENDING
            worker.given = {task[:2]: task for task in tasks}
            worker.since = self._clock()
            worker.size = len(tasks)
            worker.batch += 1
            if worker.max_tasks is not None:
                worker.max_tasks -= len(tasks)
        return answers

    def _next_batch(self, worker: _Worker) -> list[Task]:
        share = len(self._tasks) // (2 * len(self._workers))
        count = min(share, int(BATCH_SECONDS / self._task_seconds), MAX_BATCH)
        if worker.max_tasks is not None:
            count = min(count, worker.max_tasks)
        return [self._tasks.popleft() for _ in range(min(max(1, count), len(self._tasks)))]

    def _send(self, answers: list[_Answer]) -> None:
        for future, name, tasks in answers:
            future.set_result(self._encode(name, tasks) if tasks else None)
