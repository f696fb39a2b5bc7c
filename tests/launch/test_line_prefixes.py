"""What is put before each line that a worker prints."""

import io
from types import SimpleNamespace

import pytest

from rayrpc.config import Settings
from rayrpc.launch.line_prefixes import line_prefixes

TWO = {"rank0": "a", "rank1": "a"}


class Terminal:
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    """Have both streams be a terminal; returns what stands for ``sys``."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    streams = SimpleNamespace(stdout=Terminal(), stderr=Terminal())
    monkeypatch.setattr("rayrpc.launch.line_prefixes.sys", streams)
    return streams


@pytest.mark.parametrize(
    ("setting", "by_default", "has_prefixes"),
    [
        ("auto", False, False),
        ("auto", True, True),
        ("always", False, True),
        ("never", True, False),
    ],
)
def test_in_a_file_lines_have_the_prefixes_that_were_asked_for(setting, by_default, has_prefixes):
    prefixes = line_prefixes(TWO, Settings(prefix_output=setting), by_default)
    assert prefixes == ({"rank0": "(rank0) ", "rank1": "(rank1) "} if has_prefixes else {})


def test_on_a_terminal_ranks_have_colours(terminal):
    prefixes = line_prefixes(TWO, Settings(), False)
    assert prefixes == {"rank0": "\x1b[36m(rank0)\x1b[0m ", "rank1": "\x1b[33m(rank1)\x1b[0m "}
    assert line_prefixes(TWO, Settings(prefix_output="never"), False) == {}


def test_there_are_no_colours_where_they_are_not_wanted(terminal, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    assert line_prefixes(TWO, Settings(), False)["rank0"] == "(rank0) "


def test_there_are_no_colours_where_errors_go_to_a_file(terminal):
    terminal.stderr = io.StringIO()
    assert line_prefixes(TWO, Settings(), False)["rank0"] == "(rank0) "


def test_workers_of_several_hosts_have_their_names():
    hosts = {"rank0": "a", "rank1": "b"}
    prefixes = line_prefixes(hosts, Settings(prefix_output="always"), False)
    assert prefixes == {"rank0": "(rank0 on a) ", "rank1": "(rank1 on b) "}
