"""The value of an RRef at its owner: threads wait for it, and callbacks get it."""

import threading

import pytest
from conftest import eventually
from simulation.separately import in_virtual_time

from rayrpc._concurrency.outcome import Error, Value
from rayrpc._runtime.rrefs import cell as cell_module
from rayrpc._runtime.rrefs.cell import Cell


@in_virtual_time()
def test_waiters_and_callbacks_of_a_cell_get_the_outcome():
    cell, got = Cell(), []
    cell.on_done(got.append)
    threading.Timer(1.0, lambda: cell.set(Value(3))).start()
    assert cell.wait(60) == Value(3)
    cell.on_done(got.append)
    assert got == [Value(3), Value(3)]


def test_waiting_has_a_timeout():
    with pytest.raises(TimeoutError):
        Cell().wait(0.01)


@pytest.mark.parametrize("outcome", [Value(None), Error(ValueError("x"))])
def test_an_outcome_that_is_there_needs_no_wait(outcome):
    cell = Cell(outcome, "made here")
    assert cell.is_done and cell.wait(0) is outcome and cell.made == "made here"
    assert not cell.set(Value(2)) and cell.value is outcome


def test_a_thread_gives_the_role_of_the_reader_up_only_if_it_has_to_wait(monkeypatch):
    released = []
    monkeypatch.setattr(cell_module, "release_reader", lambda: released.append(1))
    cell = Cell(Value(1))
    cell.wait()
    assert not released
    with pytest.raises(TimeoutError):
        Cell().wait(0.01)
    assert released == [1]


def test_all_threads_that_wait_go_on(quick_switches):
    cell, got = Cell(), []
    threads = [threading.Thread(target=lambda: got.append(cell.wait(60))) for _ in range(4)]
    for thread in threads:
        thread.start()
    cell.set(Value(3))
    for thread in threads:
        thread.join(60)
    assert eventually(lambda: got == [Value(3)] * 4)
