"""Contexts of a worker's threads: opened, released, and interrupted anywhere between."""

from types import SimpleNamespace
from typing import Any

import pytest
from interrupting import interrupted

from rayrpc import autograd
from rayrpc._autograd import current_context
from rayrpc._autograd import hook as hook_module
from rayrpc._autograd.hook import GradContexts
from rayrpc._runtime import current

PEER = 1
FILES = {module.__file__ for module in (autograd, current_context, hook_module)} | {__file__}


@pytest.fixture
def tasks():
    """What the agent was given to run in another thread."""
    return []


@pytest.fixture
def hook(monkeypatch, tasks):
    agent: Any = SimpleNamespace(
        info=SimpleNamespace(id=0),
        member=SimpleNamespace(epoch=0),
        hooks=[],
        submit=tasks.append,
    )
    hook = GradContexts(agent)
    agent.hooks.append(hook)
    monkeypatch.setattr(current, "get_agent", lambda: agent)
    return hook


def test_a_thread_has_one_context_at_a_time(hook):
    with autograd.context() as context_id:
        assert hook.current().id == context_id
        with pytest.raises(RuntimeError, match="Already have an autograd context id"):
            with autograd.context():
                pass
        assert hook.current().id == context_id
    assert not hook.wants()


def test_one_of_the_private_interface_stays_until_it_is_released(hook):
    opened = autograd._new_context()
    with pytest.raises(RuntimeError, match="Already have an autograd context id"):
        autograd._new_context()
    autograd._release_context(opened._context_id())
    assert not hook.wants()


def test_no_interrupt_leaves_a_thread_in_a_context_or_a_worker_unnotified(hook, tasks):
    used = set()

    def step():
        with autograd.context() as context_id:
            hook.current().add_callee(PEER)
            used.add(context_id)

    number = 1
    while interrupted(step, FILES, number):
        step()
        assert not hook.wants(), f"after an interrupt at point {number}"
        assert not hook._contexts, f"after an interrupt at point {number}"
        number += 1
    assert number > 50
    assert used <= set(hook._to_notify[PEER])
    assert len(tasks) >= number


def test_a_context_can_be_opened_while_the_interrupt_of_another_ones_end_is_handled(hook):
    def step():
        for _ in range(2):
            with autograd.context():
                pass

    def step_again():
        try:
            step()
        except KeyboardInterrupt:
            step()

    number = 1
    while interrupted(step_again, FILES, number):
        assert not hook._contexts, f"after an interrupt at point {number}"
        number += 1
    assert number > 50
