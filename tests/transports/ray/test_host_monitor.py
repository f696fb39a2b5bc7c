"""Which hosts are lost: by a clock, and by connections to ports; without Ray."""

import asyncio
import socket
from types import SimpleNamespace

import pytest

from rayrpc._transports.ray import host_monitor
from rayrpc._transports.ray.host_monitor import HostMonitor, SilentHosts, probe


@pytest.fixture
def clock():
    return SimpleNamespace(now=100.0)


@pytest.fixture
def silent(clock):
    return SilentHosts(10.0, lambda: clock.now)


@pytest.fixture
def full_port():
    """Return a port where connections are neither accepted nor refused."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        port = listener.getsockname()[1]
        clients = []
        for _ in range(4):
            client = socket.socket()
            client.setblocking(False)
            client.connect_ex(("127.0.0.1", port))
            clients.append(client)
        yield port
        for client in clients:
            client.close()


def test_a_host_is_lost_when_it_was_silent_for_the_timeout(silent, clock):
    assert silent.report("a", True) == 0
    for _ in range(9):
        clock.now += 1
        assert silent.report("a", False) == 0
    clock.now += 1
    assert silent.report("a", False) == 10
    assert silent.report("a", True) == 0


def test_an_answer_begins_the_time_anew(silent, clock):
    silent.report("a", True)
    for second in range(30):
        clock.now += 1
        assert silent.report("a", second % 9 == 8) == 0


def test_a_monitor_that_was_stopped_loses_no_host(silent, clock):
    silent.report("a", True)
    clock.now += 60  # it did not run: its connections took too long
    assert silent.report("a", False) == silent.report("a", False) == 0
    assert silent.report("a", True) == 0
    clock.now += 60
    assert [bool(silent.report("a", False)) for _ in range(3)] == [False, False, True]


def test_a_host_that_never_answered_is_lost_after_the_timeout(silent, clock):
    for _ in range(10):
        assert silent.report("a", False) == 0
        clock.now += 1
    assert silent.report("a", False) == 10


def test_hosts_without_members_are_forgotten(silent, clock):
    silent.report("a", True)
    silent.keep(["b"])
    clock.now += 60
    assert [silent.report("a", False) for _ in range(5)] == [0] * 5


def test_a_host_answers_by_accepting_or_refusing(monkeypatch, full_port):
    monkeypatch.setattr(host_monitor, "PROBE_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert asyncio.run(probe("127.0.0.1", port))
    assert asyncio.run(probe("127.0.0.1", port))
    assert not asyncio.run(probe("127.0.0.1", full_port))
    assert not asyncio.run(probe("no-such-host.invalid", port))


def test_all_hosts_are_asked_at_once(monkeypatch, full_port):
    monkeypatch.setattr(host_monitor, "PROBE_SECONDS", 0.2)
    ports = {"127.0.0.1": full_port, "localhost": full_port}
    with socket.create_server(("127.0.0.2", 0)) as listener:
        ports["127.0.0.2"] = listener.getsockname()[1]
        monitor = HostMonitor(0.5, ports.get)

        async def ask():
            found = [await monitor.ask([*ports, "unknown"]) for _ in range(6)]
            return found[0], found[-1]

        first, last = asyncio.run(ask())
    assert first == {}
    assert last.keys() == {"127.0.0.1", "localhost"} and min(last.values()) >= 0.5
