"""Lists of a worker's RRefs, and torch's texts about those that are alive at the end."""

import datetime

import pytest
import torch

from rayrpc._concurrency.outcome import Error, Value
from rayrpc._protocol.ids import GloballyUniqueId, IdSource
from rayrpc._protocol.rref_table import RRefTable
from rayrpc._runtime.rrefs.cell import Cell
from rayrpc._runtime.rrefs.listing import OwnedRRef, UsedRRef, leaks, listed

ME, OWNER, HOLDER = 0, 1, 2


class Thing:
    """A class of the program."""


def build():
    """Make a value."""


@pytest.fixture
def table():
    return RRefTable(ME, IdSource(ME).new, Cell)


def own(table, number, outcome=None, made=None):
    """Have the table own an RRef that worker 2 holds."""
    rref_id = GloballyUniqueId(HOLDER, number)
    cell = table.own(rref_id, GloballyUniqueId(HOLDER, number + 100), HOLDER)
    if outcome is not None:
        cell.set(outcome)
    cell.made = made
    return rref_id


class TestLists:
    def test_none_are_no_list(self, table):
        assert listed(table) == ([], []) and leaks(table) == {}

    @pytest.mark.parametrize(
        ("outcome", "type_"),
        [
            (None, ""),
            (Value(None), "NoneType"),
            (Value([1]), "list"),
            (Value(torch.ones(1)), "Tensor"),
            (Value(datetime.timedelta()), "datetime.timedelta"),
            (Value(Thing()), f"{__name__}.Thing"),
            (Value(Thing), "type"),
            (Error(KeyError("x")), "KeyError (raised)"),
        ],
    )
    def test_an_owned_one_has_the_type_of_its_value(self, table, outcome, type_):
        own(table, 5, outcome)
        assert listed(table) == ([OwnedRRef((HOLDER, 5), type_, "", [HOLDER])], [])

    def test_a_class_of_the_script_has_its_name_alone(self, table, monkeypatch):
        monkeypatch.setattr(Thing, "__module__", "__main__")
        own(table, 5, Value(Thing()))
        assert listed(table)[0][0].type == "Thing"

    @pytest.mark.parametrize(
        ("made", "text"), [(("program.py", 7), "at program.py:7"), (build, "by build"), (None, "")]
    )
    def test_it_tells_where_it_was_made(self, table, made, text):
        own(table, 5, Value(1), made)
        table.use(GloballyUniqueId(ME, 1), GloballyUniqueId(ME, 2), OWNER, made)
        owned, used = listed(table)
        assert owned[0].made == text
        assert used == [UsedRRef((ME, 1), OWNER, text)]

    def test_a_holder_may_be_unknown_or_have_several_forks(self, table):
        rref_id = own(table, 5, Value(1))
        cell = table.lookup(rref_id)
        table.share_owned(rref_id, cell, HOLDER, None)
        table.share_owned(rref_id, cell, None, None)
        assert sorted(listed(table)[0][0].holders, key=str) == [HOLDER, HOLDER, None]


class TestLeaks:
    def test_an_owned_one_is_told_with_its_forks(self, table):
        rref_id = own(table, 5, Value(1), build)
        table.share_owned(rref_id, table.lookup(rref_id), HOLDER, None)
        assert leaks(table) == {rref_id: f"Leaking RRef {rref_id} with 2 forks, made by build"}

    def test_a_used_one_is_told_by_its_fork(self, table):
        rref_id, fork_id = GloballyUniqueId(ME, 1), GloballyUniqueId(ME, 2)
        table.use(rref_id, fork_id, OWNER, ("program.py", 7))
        text = f"Leaking RRef {rref_id} with fork Id {fork_id}, made at program.py:7"
        assert leaks(table) == {fork_id: text}

    def test_where_the_place_is_not_known_it_is_left_out(self, table):
        rref_id = own(table, 5)
        assert leaks(table) == {rref_id: f"Leaking RRef {rref_id} with 1 forks"}
