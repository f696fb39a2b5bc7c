"""Where workers listen for workers of other nodes; without Ray."""

import logging
import socket

import pytest
from direct_workers import WAIT_SECONDS, groups

from rayrpc._transports.direct.listening import Listening, listen
from rayrpc.errors import CallError

ELSEWHERE = "192.0.2.123"  # TEST-NET-1: no address of this machine


@pytest.fixture
def workers():
    with groups() as make:
        yield make


@pytest.fixture
def free_port():
    """Return a port that nobody uses, most likely with the next two."""
    with listen("127.0.0.1") as listener:
        port = listener.getsockname()[1]
    return port if port < 65000 else port - 100


def open_at(node="127.0.0.1", **options):
    listener, host = Listening(**options).open("w0", node)
    if listener is None:
        return None, host
    with listener:
        return listener.getsockname()[0], host


def test_a_worker_listens_at_its_nodes_address():
    assert open_at("127.0.0.5") == ("127.0.0.5", "127.0.0.5")


@pytest.mark.parametrize("host", ["127.0.0.6", "localhost", "lo"])
def test_an_address_a_name_or_an_interface_may_be_set(host):
    address, announced = open_at("127.0.0.5", host=host)
    assert address in ("127.0.0.6", "127.0.0.1")
    assert announced == ("127.0.0.1" if host == "lo" else host)


def test_tensorpipes_variable_names_an_interface(monkeypatch):
    monkeypatch.setenv("TP_SOCKET_IFNAME", "lo")
    assert open_at("127.0.0.5") == ("127.0.0.1", "127.0.0.1")
    assert open_at("127.0.0.5", host="127.0.0.6") == ("127.0.0.6", "127.0.0.6")


def test_a_worker_that_listens_at_all_addresses_announces_its_nodes():
    assert open_at("127.0.0.5", host="0.0.0.0") == ("0.0.0.0", "127.0.0.5")


def test_the_address_that_is_announced_may_be_another():
    assert open_at(host="0.0.0.0", announced=ELSEWHERE) == ("0.0.0.0", ELSEWHERE)
    assert open_at("127.0.0.5", announced="lo") == ("127.0.0.5", "127.0.0.1")


@pytest.mark.parametrize("host", [ELSEWHERE, "no-such-host.invalid"])
def test_an_address_of_another_host_is_one_line(host, caplog):
    with caplog.at_level(logging.WARNING):
        assert open_at("127.0.0.5", host=host) == (None, "127.0.0.5")
    (line,) = caplog.messages
    for text in (f"w0 cannot listen at {host}", "Set listen_host", "Ray's actor calls"):
        assert text in line


def test_workers_take_the_ports_of_the_range_in_turn(free_port, caplog):
    ports = f"{free_port}-{free_port + 2}"
    listeners = [listen("127.0.0.1", ports) for _ in range(3)]
    try:
        assert [one.getsockname()[1] - free_port for one in listeners] == [0, 1, 2]
        assert open_at(ports=ports) == (None, "127.0.0.1")
        assert f"none of the ports {ports} is free" in caplog.text
    finally:
        for one in listeners:
            one.close()


def test_a_port_whose_connections_are_in_time_wait_is_taken_again(free_port):
    ports = f"{free_port}-{free_port}"
    with listen("127.0.0.1", ports) as listener:
        with socket.create_connection(listener.getsockname()) as client:
            listener.setblocking(True)
            listener.accept()[0].close()  # this end closes first, and stays in TIME_WAIT
            assert client.recv(1) == b""
    listen("127.0.0.1", ports).close()


def test_calls_cross_by_a_range_of_ports_and_by_ipv6(workers, free_port):
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    ports = f"{free_port}-{free_port + 2}"
    caller, callee, other = workers(
        {"node": "127.0.0.1"},
        {"node": "127.0.0.2", "listening": Listening(ports=ports)},
        {"node": "::1"},
    )
    assert callee.member.address.port in range(free_port, free_port + 3)
    for peer in (callee, other):
        assert caller.call(peer, data=b"data").wait(WAIT_SECONDS).data == b"data"
    assert not caller.fallback.calls and other.served == callee.served == 1


def test_calls_to_a_worker_that_cannot_listen_go_by_the_fallback(workers, caplog):
    caller, callee = workers({"node": "127.0.0.1"}, {"node": ELSEWHERE, "worker": "w1"})
    assert "w1 cannot listen at" in caplog.text
    assert caller.call(callee, 7, data=b"data").wait(WAIT_SECONDS).data == b"data"
    assert caller.fallback.calls == [("memory-w1", 7)]
    assert callee.call(caller, data=b"back").wait(WAIT_SECONDS).data == b"back"
    assert not callee.fallback.calls


def test_where_only_connections_may_be_used_such_calls_fail(workers):
    caller, callee = workers({"node": "127.0.0.1", "only": True}, {"node": ELSEWHERE})
    with pytest.raises(CallError, match="it listens at no port"):
        caller.call(callee).wait(WAIT_SECONDS)
