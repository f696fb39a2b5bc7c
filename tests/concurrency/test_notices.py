"""An interactive user is told what a program waits for, if that takes long."""

import io
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from conftest import eventually

from rayrpc._concurrency import notices
from rayrpc._concurrency.notices import noticed


class Terminal(io.StringIO):
    is_terminal = True

    def isatty(self):
        return self.is_terminal


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setattr(notices, "NOTICE_SECONDS", 0.05)
    made = Terminal()
    # pytest sets sys.stderr itself before the test runs
    monkeypatch.setattr(notices, "sys", SimpleNamespace(stderr=made, modules=sys.modules))
    return made


def test_a_line_tells_what_takes_long(terminal):
    with noticed("the others"):
        assert eventually(terminal.getvalue)
    assert terminal.getvalue() == "rayrpc: waiting for the others\n"


def test_a_line_may_tell_who_is_missing_by_then(terminal):
    missing = ["alice", "bob"]
    with noticed(lambda: ", ".join(missing)):
        missing.remove("bob")
        assert eventually(terminal.getvalue)
    assert terminal.getvalue() == "rayrpc: waiting for alice\n"


def test_nothing_is_told_of_what_is_quick_or_fails(terminal):
    with noticed("nobody"):
        pass
    with pytest.raises(KeyError), noticed("nobody"):
        raise KeyError
    time.sleep(0.15)
    assert terminal.getvalue() == ""


@pytest.mark.parametrize("output", ["a file", "none", "a closed one"])
def test_output_that_is_not_seen_stays_as_it_is(terminal, monkeypatch, output):
    terminal.is_terminal = False
    closed = io.StringIO()
    closed.close()
    found = {"a file": terminal, "none": None, "a closed one": closed}[output]
    monkeypatch.setattr("rayrpc._concurrency.notices.sys.stderr", found)
    monkeypatch.setattr(threading, "Timer", None)  # it is not even made
    with noticed("nobody"):
        pass
    assert terminal.getvalue() == ""


def test_a_notebook_is_told_too(terminal, monkeypatch):
    terminal.is_terminal = False
    monkeypatch.setattr(sys.modules["__main__"], "get_ipython", None, raising=False)
    with noticed("the others"):
        assert eventually(terminal.getvalue)
