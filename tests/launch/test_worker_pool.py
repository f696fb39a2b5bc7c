"""Pools of workers without Ray: the process's membership in their group, and forks.

What pools do with workers is in tests/parallel/pool.
"""

from typing import Any

import pytest

from rayrpc import config, startup
from rayrpc.launch import worker_pool


class FakeAgent:
    def __init__(self):
        self.events = []

    def start(self):
        self.events.append("start")

    def shutdown(self):
        self.events.append("shutdown")


@pytest.fixture
def agents(monkeypatch):
    """The agents that the test's memberships have made."""
    made = []

    def make_agent(name, rank, world_size, options, settings, user_api):
        assert (name, rank, world_size) == (worker_pool.OWNER, -1, None)
        made.append(FakeAgent())
        return made[-1]

    monkeypatch.setattr(startup, "make_agent", make_agent)
    return made


def test_all_pools_share_a_membership_that_ends_with_the_last(agents):
    membership: Any = worker_pool._Membership()
    settings = config.Settings()
    assert membership.enter(settings) is membership.enter(settings) is agents[0]
    membership.leave()
    assert agents[0].events == ["start"]
    membership.leave()
    assert agents[0].events == ["start", "shutdown"]
    assert membership.enter(settings) is agents[1]


def test_names_of_workers_are_not_used_twice():
    membership = worker_pool._Membership()
    assert [membership.new_name() for _ in range(3)] == ["worker-0", "worker-1", "worker-2"]


def test_only_the_first_pool_handles_forks_from_then_on(start, script):
    text = """
import os
import ray, torch  # they register handlers of their own

handlers = []
register = os.register_at_fork
os.register_at_fork = lambda **kwargs: (handlers.append(kwargs), register(**kwargs))

from rayrpc.launch import worker_pool

def ours():
    return [h for h in handlers if h["after_in_child"].__module__ == worker_pool.__name__]

assert not ours()
worker_pool._handle_forks()
worker_pool._handle_forks()
assert len(ours()) == 1

before = worker_pool._membership
if (pid := os.fork()) == 0:
    os._exit(3 if worker_pool._membership is not before else 4)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
assert worker_pool._membership is before
print("forked")
"""
    one = start(script(text))
    assert one.end() == 0, one.output
    assert "forked" in one.output
