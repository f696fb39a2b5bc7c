"""Versions of globals: when one gets a new one, and which of them are sent together."""

import logging
import os
import threading
import uuid

import pytest
from conftest import run_in_threads

from rayrpc._runtime.serialization.contents import Found, Received
from rayrpc._runtime.serialization.global_versions import (
    SentGlobals,
    UnitFoundError,
    is_this_process,
    this_process,
)

SOURCE = """
rate = 2
table = []

def scale(x):
    return x * rate

def step(x):
    return scale(x) + 1

def even(n):
    return n == 0 or odd(n - 1)

def odd(n):
    return n != 0 and even(n - 1)

class Agent:
    def act(self):
        return step(1)
"""


class Program:
    """The globals of a program of this process, which no other one can import.

    Args:
        name: of its module.
    """

    def __init__(self, name):
        self.key = this_process(), name
        self.values = {"__name__": name}
        exec(SOURCE, self.values)

    def find(self, names):
        return Found({name: self.values[name] for name in names if name in self.values}, {}, [])

    def home_of(self, func):
        return self if func.__globals__ is self.values else None

    def value_of(self, node):
        is_here = node[:2] == self.key and node[2] in self.values
        return (self.values[node[2]],) if is_here else ()

    def sent(self):
        """Return what one pickle sends."""
        return SentGlobals(self.home_of, self.value_of)

    def take(self, *names, sent=None):
        """Have a pickle, or a new one, take some globals."""
        sent = sent or self.sent()
        return sent.take(self.key, {name: self.values[name] for name in names})

    def version(self, name):
        return self.take(name).versions[name]

    def run(self, code):
        exec(code, self.values)


@pytest.fixture
def program(request):
    return Program(f"program_of_{request.node.name}")


class TestOneGlobal:
    def test_it_keeps_its_version_until_its_content_changes(self, program):
        first = program.version("table")
        assert program.version("table") == first
        program.run("table.append(1)")
        second = program.version("table")
        assert second > first and program.version("table") == second

    def test_an_earlier_content_that_comes_back_is_a_new_version(self, program):
        first = program.version("rate")
        program.run("rate = 3")
        second = program.version("rate")
        program.run("rate = 2")
        assert program.version("rate") > second > first

    def test_its_value_is_sent_with_it(self, program):
        found = program.take("table", "rate")
        assert found.values == {"table": [], "rate": 2} and found.units == []
        assert found.values["table"] is program.values["table"]

    def test_no_two_have_the_same_version(self, program):
        versions = program.take("rate", "table", "scale", "step").versions
        assert len(set(versions.values())) == 4

    def test_one_of_the_same_name_in_another_module_is_another_one(self, program):
        other = Program(program.key[1] + "_too")
        first = program.version("rate")
        assert other.version("rate") != first and program.version("rate") == first

    def test_nothing_taken_is_nothing_found(self, program):
        assert program.take() == Found({}, {}, [])


class TestUses:
    def test_a_change_of_what_a_function_uses_is_one_of_it_however_far_away(self, program):
        before = program.take("scale", "step", "table").versions
        program.run("rate = 5")
        after = program.take("scale", "step", "table").versions
        assert after["scale"] > before["scale"] and after["step"] > before["step"]
        assert after["table"] == before["table"]

    def test_a_change_of_what_it_does_not_use_is_none(self, program):
        before = program.version("step")
        program.run("table.append(1)\nother = 7")
        assert program.version("step") == before

    def test_a_name_that_is_bound_later_is_a_change(self, program):
        program.run("def late():\n    return later")
        before = program.version("late")
        program.run("later = 1")
        assert program.version("late") > before

    def test_functions_that_use_one_another_have_versions(self, program):
        before = program.take("even", "odd").versions
        assert program.take("odd", "even").versions == before
        program.run("def odd(n):\n    return even(n - 1) and n != 0")
        after = program.take("even", "odd").versions
        assert after["even"] > before["even"] and after["odd"] > before["odd"]

    def test_a_function_in_an_object_counts_too(self, program):
        program.run("steps = {'first': step}")
        before = program.version("steps")
        program.run("rate = 5")
        assert program.version("steps") > before

    def test_a_received_global_changes_with_its_version(self, program):
        class View:
            key = ("another process", "elsewhere")
            version = 4

            def find(self, names):
                return Found({"rate": 2}, {"rate": self.version}, [])

        view = View()
        sent = [SentGlobals(lambda func: view, lambda node: ()) for _ in range(3)]
        value = {"scale": program.values["scale"]}
        versions = [sent[n].take(program.key, value).versions["scale"] for n in (0, 1)]
        view.version = 5
        versions.append(sent[2].take(program.key, value).versions["scale"])
        assert versions[0] == versions[1] < versions[2]
        assert Received(4) != Received(5)


class TestOnePickle:
    def test_a_global_is_seen_once_whatever_other_threads_do_to_it(self, program):
        sent = program.sent()
        before = program.take("table", "step", sent=sent)
        program.run("rate = 5\ntable.append(1)")
        after = program.take("table", "step", sent=sent)
        assert after.versions == before.versions

    def test_another_pickle_sees_what_has_changed(self, program):
        sent = program.sent()
        before = program.take("step", sent=sent)
        program.run("rate = 5")
        assert program.take("step").versions["step"] > before.versions["step"]


class TestClasses:
    def state_of(self, program):
        return dict(vars(program.values["Agent"]))

    def version(self, program, cls=None):
        cls = cls or program.values["Agent"]
        methods = {name: each for name, each in vars(cls).items() if not name.startswith("__")}
        return program.sent().version_of_class(cls, methods)

    def test_one_keeps_its_version_until_its_state_changes(self, program):
        first = self.version(program)
        assert self.version(program) == first
        program.values["Agent"].made = 1
        assert self.version(program) > first

    def test_it_changes_with_what_its_methods_use(self, program):
        first = self.version(program)
        program.run("rate = 5")
        assert self.version(program) > first

    def test_two_of_one_name_are_two(self, program):
        first = program.values["Agent"]
        before = self.version(program)
        program.run("class Agent:\n    def act(self):\n        return step(1)")
        assert self.version(program) != before and self.version(program, first) == before

    def test_a_global_that_names_it_does_not_change_with_it(self, program):
        program.run("agent = Agent()")
        before = program.version("agent")
        program.values["Agent"].made = 1
        assert program.version("agent") == before

    def test_it_is_in_no_unit(self, program):
        program.run("Agent.table = table")
        sent = program.sent()
        sent.version_of_class(program.values["Agent"], {"table": program.values["table"]})
        assert program.take("table", sent=sent).units == []


class TestUnits:
    @pytest.fixture
    def shared(self, program):
        """A program with two globals that refer to one list, and one that does not."""
        program.run("alias = {'table': table}\nalone = []")
        return program

    def test_globals_that_refer_to_one_object_are_sent_together(self, shared):
        shared.take("alias", "table")
        found = shared.take("table", "alone")
        assert found.units == [("alias", "table")]
        assert found.values.keys() == found.versions.keys() == {"table", "alias", "alone"}
        assert found.values["alias"]["table"] is found.values["table"]

    def test_they_get_new_versions_together(self, shared):
        before = shared.take("alias", "table", "alone").versions
        shared.run("alias['more'] = 1")  # in one of them alone
        after = shared.take("table", "alone").versions
        assert after["table"] > before["table"] and after["alias"] > before["alias"]
        assert after["alone"] == before["alone"]

    def test_three_may_be_one_through_the_second(self, shared):
        shared.run("more = [alias]\nlast = (alone, table)")
        found = shared.take("more", "alias", "last", "table", "alone")
        assert found.units == [("alias", "alone", "last", "more", "table")]

    def test_what_functions_in_an_object_use_is_not_part_of_it(self, shared):
        shared.run("def use():\n    return table\nholder = {'use': use}")
        assert shared.take("holder", "table").units == []

    def test_those_that_share_no_object_any_more_are_apart(self, shared):
        shared.take("alias", "table")
        shared.run("alias = {}")
        found = shared.take("table")
        assert found.units == [] and found.values.keys() == {"table"}

    def test_one_that_was_deleted_is_sent_no_more(self, shared):
        shared.take("alias", "table")
        shared.run("del alias")
        assert shared.take("table").units == []

    def test_one_that_is_found_when_a_part_was_sent_has_all_pickled_again(self, shared):
        sent = shared.sent()
        shared.take("table", sent=sent)
        with pytest.raises(UnitFoundError):
            shared.take("alias", sent=sent)
        found = shared.take("table")  # now it is known
        assert found.units == [("alias", "table")]

    def test_one_that_is_found_within_a_pickle_before_it_was_sent_is_none_to_repeat(self, shared):
        sent = shared.sent()
        shared.take("alone", sent=sent)
        assert shared.take("alias", "table", sent=sent).units == [("alias", "table")]

    def test_a_warning_says_once_that_they_are_sent_together_from_now_on(self, shared, caplog):
        with caplog.at_level(logging.WARNING):
            shared.take("alias", "table")
            assert not caplog.messages  # they always were
            shared.take("alone")
            shared.run("alias['alone'] = alone")
            for _ in range(2):
                shared.take("alias", "table", "alone")
        named = [message.split(" refers to")[0] for message in caplog.messages]
        module = shared.key[1]
        names = ("alias", "alone", "table")
        assert sorted(named) == [f"the global {name!r} of {module}" for name in names]
        (of_alone,) = (message for message in caplog.messages if "'alone'" in message)
        assert "others refer to, too: alias, table. They are sent together" in of_alone


class TestThisProcess:
    def test_it_has_one_id(self):
        assert this_process() == this_process() and is_this_process(this_process())
        assert not is_this_process("another one")

    def test_a_forked_child_has_another_one_and_knows_its_parents(self, monkeypatch):
        parent = this_process()
        pid = os.getpid()
        monkeypatch.setattr(os, "getpid", lambda: pid + 1_000_000)
        child = this_process()
        assert child != parent and is_this_process(child) and is_this_process(parent)
        monkeypatch.undo()
        assert this_process() == parent

    def test_threads_that_ask_for_it_first_and_at_once_agree(self, monkeypatch):
        pid, new_id = os.getpid(), uuid.uuid4
        all_are_asking = threading.Barrier(4)

        def new_id_later():
            all_are_asking.wait(60)
            return new_id()

        monkeypatch.setattr(os, "getpid", lambda: pid + 2_000_000)
        monkeypatch.setattr(uuid, "uuid4", new_id_later)
        found: list[str] = []
        run_in_threads(lambda: found.append(this_process()), [()] * 4, 60)
        assert len(found) == 4 and len(set(found)) == 1


def test_threads_that_send_one_content_send_one_version(program, quick_switches):
    for number in range(20):
        program.run(f"rate = {number + 10}")
        found: list[dict[str, int]] = []
        start = threading.Barrier(4)

        def send(found=found, start=start):
            start.wait(60)
            found.append(program.take("step", "scale", "rate").versions)

        run_in_threads(send, [()] * 4, 60)
        assert all(versions == found[0] for versions in found)
