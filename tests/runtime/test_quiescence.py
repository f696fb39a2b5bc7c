"""When a worker, or its group, has no calls under way: what it waits for, and what it reports."""

import itertools
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import eventually, run_in_threads
from memory_workers import WAIT, memory_group

from rayrpc._runtime import quiescence
from rayrpc._runtime.quiescence import Quiescence
from rayrpc.errors import CallError, GroupError

SHORT = 0.05


class Directory:
    """Keeps what this worker reports, and answers with what the others do.

    Args:
        rounds: what another worker reports, by round; then for ever what it reported last.
    """

    def __init__(self, parts, rounds=((0, 0),)):
        self.parts = parts
        self.others = itertools.chain(rounds, itertools.repeat(rounds[-1]))
        self.tags = []
        self.reported = []
        self.timeouts = []

    def sync(self, tag, payload, timeout):
        assert not self.parts.caller.active and not self.parts.callee.calls
        assert self.parts.kept_leaks == len(self.tags) + 1
        self.tags.append(tag)
        self.reported.append(payload)
        self.timeouts.append(timeout)
        return {"me": payload, "other": next(self.others)}


class Callee:
    """Serves calls of the workers in ``calls``."""

    def __init__(self):
        self.calls = []
        self.served = 0

    def active_for(self, is_member):
        return sum(1 for src in self.calls if is_member(src))


class Stream:
    def __init__(self):
        self.errors = []

    def end(self, error):
        self.errors.append(error)


@pytest.fixture
def parts():
    """The parts that a ``Quiescence`` looks at; workers 0 and 1 are members."""
    made = SimpleNamespace(kept_leaks=0, info=SimpleNamespace(name="me"))

    def keep_leaks():
        made.kept_leaks += 1

    made.rrefs = SimpleNamespace(keep_leaks=keep_leaks)
    made.members = SimpleNamespace(find={0: "me", 1: "other"}.get)
    made.caller = SimpleNamespace(active=0, sent=0, streams=set())
    made.callee = Callee()
    return made


@pytest.fixture
def made(parts):
    """Return what makes a ``Quiescence`` and its directory."""

    def make(*args):
        directory: Any = Directory(parts, *args)
        return Quiescence(parts, parts.caller, parts.callee, directory), directory

    return make


class TestJoin:
    def test_it_ends_when_two_rounds_report_the_same(self, made):
        joining, directory = made([(1, 0), (2, 0), (2, 1), (2, 1), (9, 9)])
        joining.join(WAIT)
        assert len(directory.tags) == 4

    def test_one_round_is_never_enough(self, made):
        joining, directory = made()
        joining.join(WAIT)
        assert len(directory.tags) == 2

    def test_a_call_of_its_own_between_two_rounds_takes_another_one(self, made, parts):
        joining, directory = made()
        sync = directory.sync

        def sync_then_call(*args):
            reports = sync(*args)
            parts.caller.sent = 1
            return reports

        directory.sync = sync_then_call
        joining.join(WAIT)
        assert directory.reported == [(0, 0), (1, 0), (1, 0)]

    def test_it_reports_how_many_calls_it_sent_and_served(self, made, parts):
        joining, directory = made()
        parts.caller.sent, parts.callee.served = 3, 5
        joining.join(WAIT)
        assert directory.reported == [(3, 5), (3, 5)]

    def test_no_two_rounds_have_the_same_tag_not_even_of_two_joins(self, made):
        joining, directory = made([(1, 0), (2, 0)])
        for _ in range(3):
            joining.join(WAIT)
        assert len(set(directory.tags)) == len(directory.tags) == 7

    def test_it_reports_only_while_it_is_idle(self, made, parts):
        joining, directory = made()
        parts.caller.active = 1
        parts.callee.calls.append(1)
        thread = threading.Thread(target=joining.join, args=(WAIT,))
        thread.start()
        parts.caller.active = 0
        assert thread.is_alive() and not directory.tags
        parts.callee.calls.clear()
        thread.join(WAIT)
        assert len(directory.tags) == 2

    def test_without_a_timeout_the_directory_has_none_either(self, made):
        joining, directory = made()
        joining.join(None)
        assert directory.timeouts == [None, None]

    def test_the_directory_gets_what_is_left_of_the_timeout(self, made):
        joining, directory = made()
        joining.join(WAIT)
        first, second = directory.timeouts
        assert WAIT / 2 < second <= first <= WAIT

    def test_the_directory_gets_some_time_though_none_is_left(self, made):
        joining, directory = made()
        joining.join(1e-6)
        assert directory.timeouts == [quiescence.MIN_SYNC_SECONDS] * 2

    @pytest.mark.parametrize("leaves", [False, True])
    def test_streams_end_only_if_this_worker_leaves(self, made, parts, leaves):
        stream = Stream()
        parts.caller.streams.add(stream)
        joining, _ = made()
        joining.join(WAIT, leaves)
        assert bool(stream.errors) is leaves

    def test_members_that_go_on_calling_are_named_when_the_timeout_has_passed(self, made):
        joining, directory = made([(number, 0) for number in range(9)])
        with pytest.raises(GroupError, match=r"'me' has waited 1e-06 s .*, and other still do"):
            joining.join(1e-6)
        assert len(directory.tags) == 2

    def test_a_member_that_leaves_between_two_rounds_calls_no_more(self, made):
        joining, directory = made()
        sync, rounds = directory.sync, itertools.count()

        def sync_with_a_third(*args):
            reports = sync(*args)
            return {**reports, "third": (1, 1)} if next(rounds) == 0 else reports

        directory.sync = sync_with_a_third
        joining.join(1e-6)
        assert len(directory.tags) == 3

    def test_a_timeout_that_has_passed_leaves_time_for_the_second_round(self, made):
        joining, directory = made([(0, 0), (0, 0)])
        joining.join(0.0)
        assert len(directory.tags) == 2

    def test_a_round_that_fails_is_the_callers_error(self, made):
        joining, directory = made()
        error = GroupError("worker b did not come")

        def fail(*_):
            raise error

        directory.sync = fail
        with pytest.raises(GroupError, match="worker b did not come") as raised:
            joining.join(WAIT)
        assert raised.value is error


class TestDrain:
    def test_an_idle_worker_does_not_ask_the_directory(self, made):
        draining, directory = made()
        draining.drain(WAIT)
        assert not directory.tags

    @pytest.mark.parametrize(
        ("own", "served", "counts"),
        [
            (1, [], "1 of its own, 0 of others"),
            (0, [1, 1], "0 of its own, 2 of others"),
            (2, [1, 7], "2 of its own, 1 of others"),
        ],
    )
    def test_one_that_stays_busy_says_with_how_many_calls(self, made, parts, own, served, counts):
        draining, _ = made()
        parts.caller.active = own
        parts.callee.calls += served
        with pytest.raises(GroupError) as raised:
            draining.drain(SHORT)
        assert str(raised.value) == (
            f"RPC worker 'me' still has calls under way after 0.05 s: {counts}; "
            "`rayrpc stack` shows where they are"
        )

    def test_calls_of_workers_that_are_no_members_any_more_do_not_count(self, made, parts):
        draining, _ = made()
        parts.callee.calls += [7, 8]
        draining.drain(WAIT)

    def test_it_ends_streams_in_the_words_of_a_shutdown(self, made, parts):
        stream = Stream()
        parts.caller.streams.add(stream)
        draining, _ = made()
        draining.drain(WAIT)
        (error,) = stream.errors
        assert isinstance(error, CallError) and "RPC was shut down on this worker" in str(error)

    def test_it_ends_streams_first_since_they_may_be_what_is_under_way(self, made, parts):
        draining, _ = made()
        parts.caller.active = 1

        class Last(Stream):
            def end(self, error):
                parts.caller.active = 0

        parts.caller.streams.add(Last())
        draining.drain(WAIT)


# -- whole workers --------------------------------------------------------------------------------

workers = {}
begun, go = threading.Event(), threading.Event()
ended = []


def stay():
    begun.set()
    go.wait(WAIT)


def hop(name, to, left):
    """Call the next worker, and do not wait for it; the last one notes the end."""
    if left:
        workers[name].future(to, hop, to, name, left - 1)
    else:
        ended.append(name)


@pytest.fixture
def start():
    begun.clear()
    go.clear()
    ended.clear()
    with memory_group() as start:
        yield start
        go.set()
        workers.clear()


def test_a_function_of_a_worker_that_died_does_not_keep_the_others_from_leaving(start):
    a, b = start("a"), start("b")
    future = b.future(a, stay)
    assert begun.wait(WAIT)
    with pytest.raises(GroupError, match="0 of its own, 1 of others"):
        a.agent.drain(SHORT)
    b.die()
    a.agent.drain(WAIT)
    assert a.agent.callee.active == 1  # it still runs
    go.set()
    assert eventually(future.done)


def test_the_group_waits_for_calls_that_calls_cause(start, quick_switches):
    a, b = start("a"), start("b")
    workers.update(a=a, b=b)
    for number in range(1, 11):
        a.future(b, hop, "b", "a", number % 6)
        b.future(a, hop, "a", "b", 3)

        def join(worker, number=number):
            worker.agent.join(timeout=WAIT)
            assert len(ended) == 2 * number

        run_in_threads(join, [(a,), (b,)], WAIT)
