"""The list of a group's RRefs: owners, types, holders, and where they were made."""

import threading

import pytest
import torch
from conftest import eventually
from memory_workers import memory_group

import rayrpc as rpc
from rayrpc import observe
from rayrpc._observe.report import Inspector
from rayrpc._observe.rref_list import RRefList, rref_report
from rayrpc._runtime import current
from rayrpc._runtime.rrefs import home

go = threading.Event()
kept = []


@pytest.fixture
def group(monkeypatch):
    """Three workers; the first one is that of this process."""
    go.clear()
    kept.clear()
    with memory_group() as start:
        workers = [start(name) for name in "abc"]
        for worker in workers:
            worker.agent.callee.inspect = Inspector(worker.agent, False).answer
        monkeypatch.setattr(current, "initialized_agent", lambda: workers[0].agent)
        yield workers
        go.set()
        kept.clear()


def make():
    return torch.ones(2)


def fails():
    raise KeyError("x")


def make_later():
    go.wait(60)
    return {}


def keep(rref):
    kept.append(rref)


def listed():
    return {each.id: each for each in observe.rrefs()}


def test_no_rref_is_a_list_of_none(group):
    assert observe.rrefs() == [] and str(observe.rrefs()) == "no RRef is held by a worker"


@pytest.mark.parametrize("silent", ["owner", "holder"])
def test_only_the_type_is_missing_where_one_worker_is_silent(group, silent):
    a, b, c = group
    rref = a.remote(b, make)
    a.sync(c, keep, rref)
    assert eventually(lambda: [each.holders for each in observe.rrefs()] == [{"a": 1, "c": 1}])

    def hangs(what):
        go.wait(60)
        return b""

    worker = b if silent == "owner" else c
    worker.agent.callee.inspect = hangs
    try:
        (entry,) = observe.rrefs(timeout=2.0)
    finally:
        go.set()
    # both the owner and each holder know who holds it
    assert entry.owner == "b" and entry.holders == {"a": 1, "c": 1}
    assert entry.type == ("" if silent == "owner" else "Tensor")


def test_an_rref_is_listed_with_its_owner_type_place_and_holders(group):
    a, b, c = group
    rref = a.remote(b, make)
    line = "memory_workers.py:"  # which calls for the test
    assert eventually(lambda: [each.type for each in observe.rrefs()] == ["Tensor"])
    (entry,) = observe.rrefs()
    assert entry.id == (0, rref._rref_id.local_id) and entry.owner == "b"
    assert entry.made.startswith("at ") and line in entry.made
    assert entry.holders == {"a": 1}
    a.sync(c, keep, rref)
    a.sync(c, keep, rref)
    assert eventually(lambda: observe.rrefs()[0].holders == {"a": 1, "c": 2})
    text = str(observe.rrefs())
    assert "held by" in text and "a, c (2)" in text and "Tensor" in text
    assert "<td>a, c (2)</td>" in observe.rrefs()._repr_html_()
    del rref
    # the function, where the line is not known any more
    assert eventually(lambda: [each.made for each in observe.rrefs()] == ["by make"])
    kept.clear()
    assert eventually(lambda: observe.rrefs() == [])


def test_a_value_that_is_not_there_has_no_type_and_an_error_its_own(group):
    a, b, _ = group
    failed, later = a.remote(b, fails), a.remote(b, make_later)
    assert eventually(lambda: len(observe.rrefs()) == 2)
    assert eventually(lambda: [e.type for e in observe.rrefs()] == ["KeyError (raised)", ""])
    go.set()
    assert eventually(lambda: [e.type for e in observe.rrefs()] == ["KeyError (raised)", "dict"])
    with pytest.raises(KeyError):
        failed.to_here()
    assert later.to_here() == {}


def test_a_local_value_is_listed_once_others_hold_it(group, monkeypatch):
    a, b, _ = group
    monkeypatch.setattr(home, "_home", a.agent)
    rref = rpc.RRef([1])
    assert observe.rrefs() == []
    a.sync(b, keep, rref)
    assert eventually(lambda: [e.holders for e in observe.rrefs()] == [{"b": 1}])
    (entry,) = observe.rrefs()
    assert entry.owner == "a" and entry.type == "list" and "test_rref_list.py:" in entry.made


def test_a_long_list_is_cut_in_a_text_alone():
    used = [((0, number), 1, "") for number in range(60)]
    found = RRefList.of({0: "a", 1: "b"}, [(0, rref_report([], used))])
    assert len(found) == 60 and str(found).endswith("... and 10 more RRefs")
    assert len(str(found).splitlines()) == 52


def test_leaks_say_where_they_were_made(group):
    a, b, _ = group
    rref = a.remote(b, make)
    assert eventually(lambda: rref.confirmed_by_owner())
    with pytest.raises(RuntimeError, match=r"Leaking RRef .* with fork Id .*, made at .*:\d+\n"):
        a.agent.rrefs.check_leaks()
    with pytest.raises(RuntimeError, match=r"Leaking RRef .* with 1 forks, made by make\n"):
        b.agent.rrefs.check_leaks()
