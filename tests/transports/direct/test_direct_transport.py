"""Calls on connections between real workers: the fallback to Ray, waiting, and deaths."""

import contextlib
import logging
import os
import signal
import socket
import threading
import time
from typing import Any

import pytest
import targets
from conftest import eventually

import rayrpc as rpc
from rayrpc import config, errors

WAIT_SECONDS = 60.0
# The promise is 1 s from a death; more is for machines that are busy.
SECONDS = 15.0
DIRECT = "rayrpc._transports.direct.transport"


@contextlib.contextmanager
def group_of(names, transport):
    before = rpc.settings()
    rpc.configure(transport=transport)
    try:
        rpc.start_workers(names)
        yield
    finally:
        config.use(before)
        if rpc._is_current_rpc_agent_set():
            rpc.shutdown()


@pytest.fixture(scope="class")
def auto(ray_cluster):
    with group_of(["alice", "bob", "shut", "victim", "silent"], "auto"):
        yield


@pytest.fixture(scope="class")
def direct(ray_cluster):
    with group_of(["carol", "dora"], "direct"):
        yield


@pytest.fixture
def reasons(caplog):
    """Return the reasons that were logged for routes to a worker."""
    caplog.set_level(logging.INFO, DIRECT)

    def reasons(worker):
        messages = [r.getMessage() for r in caplog.records if r.name == DIRECT]
        return [message for message in messages if worker in message]

    return reasons


def route_to(name):
    agent = rpc._get_current_rpc_agent()
    return agent.transport.routes()[agent.lookup(name).token]


def cut_connection(name, how):
    route_to(name).connection.connected_socket.shutdown(how)


def forget_connection(name):
    """Let the next call open a connection as if it were the first."""
    agent = rpc._get_current_rpc_agent()
    route = agent.transport._routes.pop(agent.lookup(name).token, None)
    if route is not None:
        route.connection.fail(errors.CallLostError("forgotten"))


def close_listeners(name):
    """Let a worker accept no connections any more, and have none to it from here."""

    def close():
        for listener in rpc._get_current_rpc_agent().transport._server.listeners:
            listener.close()

    rpc.rpc_sync(name, close)
    forget_connection(name)


def count_of(name):
    """Return how often ``targets.count`` ran there."""
    return rpc.rpc_sync(name, lambda: targets.counter)


class Ends:
    """How calls ended, and when."""

    def __init__(self):
        self.seen = {}

    def start(self, name, call):
        def record():
            try:
                result = call()
            except Exception as exc:
                result = exc
            self.seen[name] = (time.monotonic(), result)

        threading.Thread(target=record, daemon=True).start()

    def assert_all_died(self, number, worker, killed):
        assert eventually(lambda: len(self.seen) == number), sorted(self.seen)
        for name, (end, error) in self.seen.items():
            assert isinstance(error, errors.WorkerDiedError), (name, error)
            assert error.worker == worker and end - killed < SECONDS, (name, end - killed)


def bounce(depth):
    """Return a call that goes to alice, from there to bob, and so on, to this depth."""
    names = ["alice" if level % 2 == 0 else "bob" for level in range(depth)]
    call: tuple[Any, ...] = (names.pop(), targets.whoami)
    while names:
        call = (names.pop(), targets.call_on, *call)
    return call


def assert_quick_calls_get_through(blocked):
    for _ in range(50):
        assert rpc.rpc_sync("bob", targets.whoami, timeout=WAIT_SECONDS) == "bob"
        assert rpc.rpc_async("bob", targets.add, args=(1,), timeout=WAIT_SECONDS).wait() == 2
    assert not any(future.done() for future in blocked)


@pytest.mark.usefixtures("auto")
class TestAuto:
    def test_a_peer_without_listeners_is_called_by_ray_once_a_call_and_one_reason_logged(
        self, reasons
    ):
        close_listeners("shut")
        futures = [rpc.rpc_async("shut", targets.count) for _ in range(20)]
        assert sorted(future.wait() for future in futures) == list(range(1, 21))
        assert rpc.rpc_sync("shut", targets.count) == 21
        assert rpc.remote("shut", targets.count).to_here() == 22
        (reason,) = reasons("shut")
        assert "by the ray transport" in reason and "no connection could be made" in reason
        assert rpc.rpc_sync("alice", targets.whoami) == "alice" and reasons("alice") == []

    def test_calls_to_a_peer_that_refuses_connections_go_by_ray(self, reasons):
        def change_secret(secret):
            server = rpc._get_current_rpc_agent().transport._server
            old, server._secret = server._secret, secret
            return old

        before = count_of("bob")
        secret = rpc.rpc_sync("bob", change_secret, args=(b"other",))
        forget_connection("bob")
        try:
            futures = [rpc.rpc_async("bob", targets.count) for _ in range(5)]
            assert sorted(f.wait() for f in futures) == [before + i for i in range(1, 6)]
            (reason,) = reasons("bob")
            assert "by the ray transport" in reason
        finally:
            rpc.rpc_sync("bob", change_secret, args=(secret,))
            forget_connection("bob")

    def test_calls_that_could_not_be_sent_run_once(self, reasons):
        before = count_of("bob")
        cut_connection("bob", socket.SHUT_WR)
        try:
            futures = [rpc.rpc_async("bob", targets.count) for _ in range(20)]
            assert sorted(f.wait() for f in futures) == [before + i for i in range(1, 21)]
            assert count_of("bob") == before + 20
            assert len(reasons("bob")) == 1
        finally:
            forget_connection("bob")

    def test_a_call_that_was_sent_is_not_sent_again(self):
        def count_and_wait():
            targets.count()
            eventually(lambda: "cut" in targets.shared)

        before = count_of("bob")
        sent = rpc.rpc_async("bob", count_and_wait)
        assert eventually(lambda: count_of("bob") == before + 1)
        cut_connection("bob", socket.SHUT_RDWR)
        try:
            with pytest.raises(errors.CallLostError, match=r"'bob'.*not known"):
                sent.wait()
            assert count_of("bob") == before + 1
        finally:
            rpc.rpc_sync("bob", targets.keep, args=("cut", True))
            forget_connection("bob")

    def test_all_calls_pending_on_a_killed_worker_fail_at_once(self):
        pid = rpc.rpc_sync("victim", targets.pid)
        ends = Ends()
        for i in range(10):  # more than the 16 threads that serve them
            ends.start(f"sync {i}", lambda: rpc.rpc_sync("victim", targets.nap, args=(50,)))
            ends.start(f"async {i}", rpc.rpc_async("victim", targets.nap, args=(50,)).wait)
            args = ("victim", targets.nap, 50)
            ends.start(
                f"of alice {i}", lambda a=args: rpc.rpc_sync("alice", targets.call_on, args=a)
            )
        agent = rpc._get_current_rpc_agent()
        waiting = lambda: rpc._get_current_rpc_agent().caller.active
        assert eventually(lambda: agent.caller.active == 30)
        assert eventually(lambda: rpc.rpc_sync("alice", waiting) == 10)
        killed = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        ends.assert_all_died(30, "victim", killed)

    def test_the_end_of_a_process_on_this_node_is_a_death_before_the_directory_reports_it(
        self, monkeypatch
    ):
        agent: Any = rpc._get_current_rpc_agent()
        handle, held = agent._on_peer_lost, []
        monkeypatch.setattr(agent, "_on_peer_lost", held.append)
        try:
            with pytest.raises(errors.WorkerDiedError, match=r"'silent'.*the peer closed it"):
                rpc.rpc_sync("silent", targets.kill_me)
        finally:
            assert eventually(lambda: "silent" in [change.member.name for change in held])
            for change in held:
                handle(change)

    @pytest.mark.parametrize("chains", [1, 4])
    def test_nested_calls_go_as_deep_as_there_are_threads(self, chains):
        """16 threads at each of two workers are 32 levels, of one chain or of several."""
        to, func, *args = bounce(32 // chains)
        futures = [rpc.rpc_async(to, func, args=args, timeout=WAIT_SECONDS) for _ in range(chains)]
        assert [future.wait() for future in futures] == ["bob"] * chains
        assert rpc.rpc_sync("alice", targets.whoami) == "alice"

    def test_slow_functions_hold_up_no_other_call_of_their_caller(self):
        def wait():
            assert eventually(lambda: "go" in targets.shared)
            return "went"

        blocked = [rpc.rpc_async("bob", wait) for _ in range(10)]
        start = time.monotonic()
        assert_quick_calls_get_through(blocked)
        assert time.monotonic() - start < WAIT_SECONDS / 2
        rpc.rpc_sync("bob", targets.keep, args=("go", True))
        assert [future.wait() for future in blocked] == ["went"] * 10

    def test_functions_that_block_after_quick_runs_hold_up_no_other_call(self):
        event = rpc.remote("bob", threading.Event)
        event.rpc_sync().set()
        assert all(event.rpc_sync().wait(WAIT_SECONDS) for _ in range(100))
        event.rpc_sync().clear()
        blocked = [event.rpc_async().wait(WAIT_SECONDS) for _ in range(10)]
        assert_quick_calls_get_through(blocked)
        event.rpc_sync().set()
        assert all(future.wait() for future in blocked)

    def test_a_plain_function_that_blocks_after_quick_runs_holds_up_no_other_call(self):
        for _ in range(100):
            rpc.rpc_sync("bob", targets.nap, args=(0,))
        blocked = rpc.rpc_async("bob", targets.nap, args=(6, "rested"))
        for _ in range(20):
            assert rpc.rpc_sync("bob", targets.whoami) == "bob"
        assert not blocked.done()
        assert blocked.wait() == "rested"


@pytest.mark.usefixtures("direct")
class TestDirect:
    def test_a_broken_connection_is_not_replaced_by_ray(self, reasons, monkeypatch):
        monkeypatch.setattr(DIRECT + ".REOPEN_SECONDS", 60.0)
        assert rpc.rpc_sync("carol", targets.whoami) == "carol"
        cut_connection("carol", socket.SHUT_WR)
        try:
            for _ in range(2):
                with pytest.raises(errors.CallError, match=r"'carol'.*cannot be called directly"):
                    rpc.rpc_sync("carol", targets.whoami)
            (reason,) = reasons("carol")
            assert "calls to carol fail" in reason
        finally:
            forget_connection("carol")

    def test_a_peer_without_listeners_is_not_called(self, reasons, monkeypatch):
        close_listeners("carol")
        for call in (
            lambda: rpc.rpc_sync("carol", targets.count),
            lambda: rpc.rpc_async("carol", targets.count).wait(),
        ):
            with pytest.raises(errors.CallError, match=r"'carol'.*cannot be called dir") as got:
                call()
            assert not isinstance(got.value, errors.WorkerDiedError)
        assert len(reasons("carol")) == 1
        unconnected = rpc._get_current_rpc_agent().transport._unconnected
        monkeypatch.setattr(unconnected, "_only", False)
        assert count_of("carol") == 0

    def test_calls_pending_on_a_killed_worker_fail_at_once(self):
        pid = rpc.rpc_sync("dora", targets.pid)
        ends = Ends()
        for i in range(5):
            ends.start(f"sync {i}", lambda: rpc.rpc_sync("dora", targets.nap, args=(50,)))
            ends.start(f"async {i}", rpc.rpc_async("dora", targets.nap, args=(50,)).wait)
        agent = rpc._get_current_rpc_agent()
        assert eventually(lambda: agent.caller.active >= 10)
        assert rpc.rpc_sync("dora", targets.whoami) == "dora"
        killed = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        ends.assert_all_died(10, "dora", killed)
