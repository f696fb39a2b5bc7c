"""The bytes that connections have sent, those of connections that have ended included."""

import pytest
from conftest import eventually
from direct_workers import WAIT_SECONDS, connections, groups

from rayrpc._transports.direct.traffic import Traffic


@pytest.fixture
def group():
    with groups() as make:
        yield make


def check_written(worker, least, most):
    sent = worker.transport.sent_bytes
    assert eventually(lambda: sent()["connection"] >= least)
    assert sent()["connection"] < most and sent()["shared_memory"] == 0


def test_what_has_ended_is_counted_once():
    traffic = Traffic()
    first, second = traffic.open(), traffic.open()
    first.connection, first.shared_memory, second.connection = 5, 100, 7
    assert traffic.total() == {"connection": 12, "shared_memory": 100}
    for _ in range(2):
        traffic.end(first)
        assert traffic.total() == {"connection": 12, "shared_memory": 100}
    second.connection += 1
    assert traffic.total() == {"connection": 13, "shared_memory": 100}
    assert traffic._open == {second}


def test_nothing_is_kept_of_each_connection_that_has_ended(group):
    a, b = group({}, {})
    for number in range(2):
        a.call(b, number, b"x").wait(WAIT_SECONDS)
        connection, _ = connections(a, b)
        connection.break_off("the test")
        assert eventually(lambda: connections(a, b)[0] is not connection)  # noqa: B023
    for worker in (a, b):
        kept = worker.transport._traffic._open
        assert eventually(lambda: len(kept) == 1)  # noqa: B023


def test_a_cut_connection_and_the_next_one_are_counted_together(group):
    a, b = group({}, {})
    a.call(b, 1, bytes(10_000)).wait(WAIT_SECONDS)
    connection, _ = connections(a, b)
    connection.break_off("the test")
    assert eventually(lambda: connections(a, b)[0] is not connection)
    a.call(b, 2, bytes(20_000)).wait(WAIT_SECONDS)
    for worker in (a, b):
        check_written(worker, 30_000, 35_000)


def test_messages_to_other_nodes_are_written_to_connections(group):
    a, b = group({"node": "127.0.0.1"}, {"node": "127.0.0.2"})
    a.call(b, 1, b"", [bytes(3_000_000)]).wait(WAIT_SECONDS)
    for worker in (a, b):
        check_written(worker, 3_000_000, 3_010_000)
