"""The thread of an RRef context, on a clock that the test moves."""

import functools
import threading

import pytest
from conftest import eventually

from rayrpc._runtime.rrefs import upkeep
from rayrpc._runtime.rrefs.upkeep import BATCH_SECONDS, RETRANSMIT_SECONDS, Upkeep


class Context:
    """What the thread calls, and its clock; the thread is the test's own.

    Args:
        steps: what happens while the thread waits for the tasks of a batch, in order; it is closed
            after them.
    """

    def __init__(self, *steps):
        self.log = []
        self.now = 0.0
        self._steps = list(steps)
        retransmit = functools.partial(self.log.append, "retransmit")
        self.upkeep = Upkeep(self.run, retransmit, self.flush, lambda: self.now, self.sleep)

    def run(self, task):
        self.log.append(task)
        if task == "fails":
            raise ValueError(task)

    def flush(self):
        self.log.append("flush")
        if not self._steps:
            self.upkeep.close()
        self.upkeep.submit("next")

    def sleep(self, seconds):
        assert seconds == BATCH_SECONDS
        if self._steps:
            self._steps.pop(0)(self)

    def start(self):
        self.upkeep.submit("first")
        self.upkeep.run()
        return self.log


def submit(*tasks):
    return lambda context: [context.upkeep.submit(task) for task in tasks]


def after(seconds):
    def step(context):
        context.now += seconds

    return step


def test_tasks_that_come_soon_after_another_are_one_batch():
    assert Context(submit("second", "third")).start() == ["first", "second", "third", "flush"]


def test_messages_are_retransmitted_when_that_is_due_and_not_before():
    log = Context(after(RETRANSMIT_SECONDS / 2), after(RETRANSMIT_SECONDS / 2), after(0)).start()
    assert log == ["first", "flush", "next", "retransmit", "flush", "next", "flush"]


def test_without_tasks_they_are_retransmitted_too(monkeypatch):
    monkeypatch.setattr(upkeep, "RETRANSMIT_SECONDS", 0.01)
    log = []
    made = Upkeep(log.append, lambda: log.append("retransmit"), lambda: made.close())
    made.run()
    assert log == ["retransmit"]


def test_an_error_of_a_task_or_of_sending_is_logged_and_ends_nothing(caplog):
    context = Context(submit("fails", "third"), after(0))
    flush, errors = context.flush, [OSError("not sent")]

    def failing():
        flush()
        if errors:
            raise errors.pop()

    made = Upkeep(context.run, lambda: None, failing, lambda: 0.0, context.sleep)
    context.upkeep = made
    assert context.start() == ["first", "fails", "third", "flush", "next", "flush"]
    texts = [record.message for record in caplog.records]
    assert texts == [
        "an error in the protocol of RRefs: this worker may leak some",
        "messages of RRefs could not be sent",
    ]


def test_closed_it_runs_no_task_that_is_queued():
    context = Context()
    context.upkeep.close()
    assert context.start() == []


@pytest.mark.timeout(60)
def test_its_thread_ends_when_it_is_closed():
    done = []
    made = Upkeep(done.append, lambda: None, lambda: made.close())
    made.submit("task")
    before = set(threading.enumerate())
    made.start()
    for thread in set(threading.enumerate()) - before:
        thread.join(30)
        assert thread.name == "rayrpc-rrefs" and not thread.is_alive()
    assert eventually(lambda: done == ["task"])
