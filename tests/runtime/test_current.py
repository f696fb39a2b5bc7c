"""The agents of this process: which one a call uses, and what happens to them at its end."""

import logging
import os

import pytest
from memory_workers import memory_group

from rayrpc._runtime import current
from rayrpc._runtime.rrefs.handle import RRef
from rayrpc._runtime.rrefs.home import get_home
from rayrpc.errors import NotInitializedError

TORCHS_WORDS = "^RPC has not been initialized. Call torch.distributed.rpc.init_rpc first.$"


@pytest.fixture
def agents():
    """Return what starts an agent of a group, none of which is this process's at the end."""
    with memory_group() as start:

        def make(name, key="key"):
            agent = start(name).agent
            agent.key = key
            return agent

        yield make
        for agent in current.agents():
            current.remove(agent)
        current.set_agent(None)


@pytest.fixture
def registered(monkeypatch):
    """What is called at the end of the process, as the module registers it."""
    functions = []

    class AtExit:
        register = staticmethod(functions.append)

        @staticmethod
        def unregister(function):
            functions[:] = [each for each in functions if each != function]

    monkeypatch.setattr(current, "atexit", AtExit)
    return functions


class TestDefault:
    def test_without_one_each_question_has_its_words(self):
        assert not current.is_set() and current.default() is None and not current.has_left()
        assert current.agents() == [] and current.names() == []
        with pytest.raises(NotInitializedError, match=TORCHS_WORDS):
            current.initialized_agent()
        with pytest.raises(NotInitializedError, match=TORCHS_WORDS):
            current.any_agent()
        for ask in current.get_agent, get_home:
            with pytest.raises(NotInitializedError, match=r"^Current RPC agent is not set! "):
                ask()

    def test_it_is_the_one_of_all_calls_and_of_new_rrefs(self, agents):
        agent = agents("a")
        current.set_agent(agent)
        assert current.is_set()
        for ask in (
            current.default,
            current.get_agent,
            current.initialized_agent,
            current.any_agent,
            get_home,
        ):
            assert ask() is agent
        assert RRef(1).owner_name() == "a"
        current.set_agent(None)
        with pytest.raises(NotInitializedError):
            RRef(1)

    def test_one_that_left_by_itself_is_still_set(self, agents):
        agent = agents("a")
        current.set_agent(agent)
        assert not current.has_left()
        agent.shutdown()
        assert current.has_left() and current.is_set()


class TestOthers:
    def test_they_are_found_by_the_names_of_their_groups(self, agents):
        first, second, third = agents("a", "first"), agents("b", "second"), agents("c", "third")
        current.add(second)
        current.add(third)
        current.set_agent(first)
        assert current.agents() == [first, second, third]  # the default group's first
        assert current.names() == ["first", "second", "third"]
        assert current.find("third") is third and current.find("fourth") is None

    def test_one_alone_makes_no_default_and_is_any(self, agents):
        agent = agents("a")
        current.add(agent)
        assert current.any_agent() is agent
        assert not current.is_set() and current.default() is None
        with pytest.raises(NotInitializedError, match=TORCHS_WORDS):
            current.initialized_agent()
        current.remove(agent)
        with pytest.raises(NotInitializedError, match=TORCHS_WORDS):
            current.any_agent()

    def test_the_default_one_is_any_before_all_others(self, agents):
        first, second = agents("a", "first"), agents("b", "second")
        current.add(second)
        current.set_agent(first)
        assert current.any_agent() is first

    def test_removing_a_predecessor_leaves_the_one_that_took_its_group(self, agents):
        before, after = agents("a"), agents("b")
        current.add(before)
        current.add(after)
        current.remove(before)
        current.remove(before)
        assert current.agents() == [after]


class TestEnd:
    def test_all_agents_leave_the_default_one_first(self, agents, registered, monkeypatch):
        left = []
        monkeypatch.setattr(current, "leave", left.append)
        first, second = agents("a", "first"), agents("b", "second")
        current.add(second)
        current.set_agent(first)
        (at_end,) = registered
        at_end()
        assert left == [first, second]

    def test_leaving_shuts_an_agent_down(self, agents):
        agent = agents("a")
        current.leave(agent)
        assert agent.has_left

    def test_one_that_cannot_leave_keeps_no_other_from_it(
        self, agents, registered, monkeypatch, caplog
    ):
        def fail():
            raise OSError("as expected")

        first, second = agents("a", "first"), agents("b", "second")
        shutdown = first.shutdown
        monkeypatch.setattr(first, "shutdown", fail)
        current.add(second)
        current.set_agent(first)
        with caplog.at_level(logging.WARNING):
            registered[0]()
        assert second.has_left and "could not leave the group" in caplog.text
        assert "as expected" in caplog.text
        monkeypatch.setattr(first, "shutdown", shutdown)

    def test_nothing_is_left_to_do_when_no_agent_is(self, agents, registered):
        agent = agents("a")
        current.set_agent(agent)
        assert len(registered) == 1
        current.set_agent(None)
        assert registered == []

    def test_it_comes_before_what_was_registered_earlier(self, agents, registered):
        """Python calls last what was registered first: the transport's library ends later."""
        current.set_agent(agents("a", "first"))
        registered.append("of a library")
        current.add(agents("b", "second"))
        assert registered[0] == "of a library" and len(registered) == 2


@pytest.mark.process
def test_a_forked_child_has_no_agents(agents):
    """It has neither their threads nor their connections."""
    current.set_agent(agents("a", "first"))
    current.add(agents("b", "second"))
    pid = os.fork()
    if pid == 0:
        os._exit(0 if not current.agents() and not current.is_set() else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert current.names() == ["first", "second"]
