"""What a cut cable does: nothing if it is short, errors that name the silence if it stays."""

import contextlib
import signal
import time

import pytest
from host_maker import why_impossible
from host_ranks import started_ranks

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(bool(why_impossible()), reason=why_impossible() or "possible"),
]

PEER_TIMEOUT = 5.0  # of ``hosts_cluster``


@pytest.fixture
def ranks(hosts_cluster):
    """Start a program on each of the first hosts; its cables are whole afterwards."""
    hosts, environ = hosts_cluster
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: [hosts.heal(number) for number in (1, 2, 3)])

        def start(size):
            numbers = range(1, size + 1)
            return hosts, stack.enter_context(started_ranks(hosts, environ, numbers))

        yield start


def test_a_short_cut_loses_nothing(ranks):
    hosts, (a, b) = ranks(2)
    a.tell("nap w1 1")
    b.tell("nap w0 1")
    a.wait_for("napping")
    b.wait_for("napping")
    hosts.cut(2)
    time.sleep(PEER_TIMEOUT / 2)
    hosts.heal(2)
    for rank in (a, b):
        assert rank.wait_for("napped", "error") == "napped 1.0"
    for rank, other in ((a, "w1"), (b, "w0")):
        rank.tell(f"call {other}")
        assert rank.wait_for("called", "error") == "called 2"
        rank.tell("shutdown")
    assert a.wait_for("shut", "error") == b.wait_for("shut", "error") == "shut down"
    assert a.end() == b.end() == 0
    assert not [line for rank in (a, b) for line in rank.lines if "group" in line]


@pytest.mark.slow
def test_a_stream_survives_a_short_cut_and_fails_with_one_that_stays(ranks):
    hosts, (a, b) = ranks(2)
    a.tell("stream w1 60")
    a.wait_for("streaming")
    hosts.cut(2)
    time.sleep(PEER_TIMEOUT / 2)
    hosts.heal(2)
    assert a.wait_for("streamed", "error") == "streamed True"
    a.tell("stream w1 100000")
    a.wait_for("streaming")
    hosts.cut(2)
    line = a.wait_for("streamed", "error")
    assert "has not answered for" in line and "10.88.0.2" in line
    for rank in (a, b):
        rank.tell("shutdown")
        rank.wait_for("shut", "error")


@pytest.mark.slow
def test_a_cut_during_large_transfers_fails_them(ranks):
    hosts, (a, b) = ranks(2)
    a.tell("push w1")
    a.wait_for("pushing")
    time.sleep(1)
    hosts.cut(2)
    line = a.wait_for("error")
    assert "has not answered for" in line and "10.88.0.2" in line
    for rank in (a, b):
        rank.tell("shutdown")
        rank.wait_for("shut", "error")


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(3, id="a host"),
        pytest.param(1, id="the host of the directory", marks=pytest.mark.slow),
    ],
)
def test_a_cut_that_stays_fails_calls_and_shutdown_on_both_sides(ranks, number):
    hosts, started = ranks(3)
    lost, others = (
        started[number - 1],
        [each for each in started if each is not started[number - 1]],
    )
    lost.tell(f"nap w{number % 3} 100")
    for rank in others:
        rank.tell(f"nap w{number - 1} 100")
    for rank in started:
        rank.wait_for("napping")
    hosts.cut(number)
    for rank in started:
        line = rank.wait_for("napped", "error")
        assert "has not answered for" in line and "10.88.0." in line
    others[0].tell(f"call w{started.index(others[1])}")
    assert others[0].wait_for("called", "error") == "called 2"
    for rank in started:
        rank.tell("shutdown")
    for rank in started:
        rank.wait_for("shut", "error")


@pytest.mark.slow
def test_a_process_that_was_stopped_for_longer_is_slow_and_not_lost(ranks):
    _, (a, b) = ranks(2)
    b.tell("nap w0 0.1")
    b.wait_for("napped")
    a.tell("nap w1 1")
    a.wait_for("napping")
    b.signal(signal.SIGSTOP)
    try:
        time.sleep(2 * PEER_TIMEOUT)
    finally:
        b.signal(signal.SIGCONT)
    assert a.wait_for("napped", "error") == "napped 1.0"
    for rank in (a, b):
        rank.tell("shutdown")
    assert a.wait_for("shut", "error") == b.wait_for("shut", "error") == "shut down"
