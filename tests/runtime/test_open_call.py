"""A call that completes by callback, and the interrupts of the thread that completes it."""

from typing import Any

import pytest
from memory_workers import memory_group

from rayrpc._concurrency.outcome import Error
from rayrpc._runtime.open_call import OpenCall, Request


@pytest.fixture
def worker():
    with memory_group() as start:
        yield start("a")


class InterruptedOnce(list[object]):
    """A list whose first ``append`` is followed by Ctrl-C."""

    was_interrupted = False

    def append(self, item):
        super().append(item)
        if not self.was_interrupted:
            self.was_interrupted = True
            raise KeyboardInterrupt


@pytest.fixture
def outcomes():
    return []


@pytest.fixture
def call(worker, outcomes):
    return OpenCall(worker.agent.caller, Request(worker.member, 1, None), outcomes.append)


def test_a_call_whose_completion_was_interrupted_at_its_start_is_completed_later(
    worker, call, outcomes
):
    call.finishers = InterruptedOnce()
    outcome: Error = Error(ValueError("the reply"))
    with pytest.raises(KeyboardInterrupt):
        worker.agent.caller.finish(call, outcome)
    assert not outcomes
    worker.agent.caller.finish(call, outcome)
    assert outcomes == [outcome]


def test_the_interrupt_of_a_second_completion_leaves_the_first_one_to_its_thread(
    worker, call, outcomes
):
    outcome: Error = Error(ValueError("the reply"))

    def complete_again(_: Any) -> None:
        call.finishers = InterruptedOnce(call.finishers)
        with pytest.raises(KeyboardInterrupt):
            worker.agent.caller.finish(call, outcome)
        worker.agent.caller.finish(call, outcome)
        outcomes.append("once")

    call.done = complete_again
    worker.agent.caller.finish(call, outcome)
    assert outcomes == ["once"]
