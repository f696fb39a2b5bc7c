"""Workers that are started again when they die, and observers of who comes and goes."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import targets
from conftest import eventually
from directories import kill_directory, wait_for_restart

import rayrpc as rpc
from rayrpc import errors
from rayrpc._runtime.agent import RESTART_SECONDS


@pytest.fixture
def driver(ray_cluster) -> Iterator[None]:
    """This process is "driver" in a dynamic group."""
    options = rpc.TensorPipeRpcBackendOptions(init_method="ray://restarted")
    rpc.init_rpc("driver", rpc_backend_options=options)
    yield
    if rpc._is_current_rpc_agent_set():
        rpc.shutdown()


def kill(name: str) -> int:
    """Kill a worker's process; return its id."""
    pid: int = rpc.rpc_sync(name, os.getpid)
    os.kill(pid, signal.SIGKILL)
    return pid


def kill_and_wait(name: str) -> tuple[int, int]:
    """Kill a worker's process, and wait until it is back; return the old and the new id.

    Of the calls, at most one fails: that which was sent when the death was not known yet.
    """
    old = kill(name)
    with contextlib.suppress(errors.CallError):
        return old, rpc.rpc_sync(name, os.getpid, timeout=0)
    return old, rpc.rpc_sync(name, os.getpid, timeout=0)


def delayed_restarts(group: rpc.WorkerGroup) -> threading.Event:
    """Have the group's workers started again only when the event is set."""
    restarts, goes_on = group._restarts, threading.Event()
    assert restarts is not None
    start = restarts._start

    def start_late(worker: str, left: int) -> None:
        assert goes_on.wait(60)
        start(worker, left)

    restarts._start = start_late
    return goes_on


def noting(path: Path) -> Callable[[], None]:
    """Return a function for ``on_start``, local as workers cannot import this module."""
    text = str(path)

    def note_start() -> None:
        time.sleep(0.3)  # calls wait for its end
        name = rpc.get_worker_info().name
        asked = rpc.rpc_sync("driver", targets.whoami)
        with open(text, "a") as file:
            file.write(f"{name}\n")
        targets.keep("started", (name, asked))

    return note_start


@pytest.mark.usefixtures("driver")
def test_a_worker_that_dies_comes_back_under_its_name(tmp_path):
    path = tmp_path / "starts"
    group = rpc.start_workers(["other", "ps"], max_restarts=1, on_start=noting(path))
    assert sorted(path.read_text().split()) == ["other", "ps"]
    before = rpc.get_worker_info("ps")
    rref = rpc.remote("ps", targets.Adder)
    assert rref.rpc_sync().add(1) == 1
    pending = rpc.rpc_async("ps", time.sleep, args=(100,), timeout=0)
    old = kill("ps")
    with pytest.raises(errors.WorkerDiedError, match="ps"):
        pending.wait()
    # it waits until the worker is there, and has started
    assert rpc.rpc_sync("ps", targets.kept, args=("started",)) == ("ps", "driver")
    assert rpc.rpc_sync("other", targets.call_on, args=("ps", os.getpid)) != old
    assert path.read_text().split()[2:] == ["ps"]
    assert rpc.get_worker_info("ps") == before == group["ps"]
    assert rpc._get_current_rpc_agent().lookup("ps").epoch == 1

    uses: list[Callable[[], object]] = [
        rref.to_here,
        lambda: rref.rpc_sync().add(1),
        lambda: rref.rpc_async().add(1).wait(),
        lambda: rpc.rpc_sync("other", targets.identity, args=(rref,)),
        lambda: rpc.rpc_sync("ps", targets.identity, args=(rref,)),
    ]
    for use in uses:
        with pytest.raises(errors.WorkerDiedError, match=r"'ps'.*make the RRef anew"):
            use()
    assert rpc.remote("ps", targets.Adder).rpc_sync().add(2) == 2

    kill("ps")  # no start is left
    with pytest.raises(errors.WorkerDiedError):
        while True:
            rpc.rpc_sync("ps", os.getpid, timeout=0)
    assert path.read_text().split()[2:] == ["ps"]
    assert rpc.rpc_sync("other", targets.whoami) == "other"
    group.stop()
    assert not [info for info in rpc.get_group().workers() if info.name != "driver"]


@pytest.mark.slow
@pytest.mark.usefixtures("driver")
def test_calls_that_race_with_restarts_end_and_are_of_one_epoch():
    """Each call has run in the process that it names, or has failed."""
    rpc.start_workers(["ps"], max_restarts=-1)
    is_over = threading.Event()
    outcomes: list[object] = []

    def call() -> None:
        while not is_over.is_set():
            try:
                outcomes.append(rpc.rpc_sync("ps", os.getpid, timeout=0))
            except errors.CallError as exc:
                outcomes.append(type(exc).__name__)
            time.sleep(0.001)

    threads = [threading.Thread(target=call, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    epochs = [kill_and_wait("ps") for _ in range(3)]
    is_over.set()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    failed = [each for each in outcomes if isinstance(each, str)]
    assert set(failed) <= {"WorkerDiedError", "CallLostError"}
    assert len(failed) <= 3 * len(threads)  # only what was pending
    known = {pid for epoch in epochs for pid in epoch}
    assert len(known) == 4
    assert {each for each in outcomes if isinstance(each, int)} == known


@pytest.mark.parametrize("directory", ["lives", "is restarted"])
@pytest.mark.usefixtures("driver")
def test_a_worker_that_joins_meanwhile_waits_for_a_restart_too(directory):
    group = rpc.start_workers(["ps"], max_restarts=1)
    goes_on = delayed_restarts(group)
    kill("ps")
    assert eventually(lambda: not [i for i in rpc.get_group().workers() if i.name == "ps"])
    if directory == "is restarted":
        wait_for_restart(kill_directory())
    rpc.start_workers(["late"])
    waiting = rpc.rpc_async("late", targets.call_on, args=("ps", targets.whoami))
    time.sleep(0.3)
    assert not waiting.done()
    goes_on.set()
    assert waiting.wait() == "ps"


@pytest.mark.usefixtures("driver")
def test_a_call_waits_for_a_restart_no_longer_than_its_timeout():
    group = rpc.start_workers(["ps"], max_restarts=1)
    goes_on = delayed_restarts(group)
    kill("ps")
    assert eventually(lambda: not [i for i in rpc.get_group().workers() if i.name == "ps"])
    begin = time.monotonic()
    with pytest.raises(errors.WorkerDiedError, match="its process died"):
        rpc.rpc_sync("ps", os.getpid, timeout=0.3)
    assert 0.3 <= time.monotonic() - begin < RESTART_SECONDS / 2
    threading.Timer(0.5, goes_on.set).start()
    group.stop()  # waits for the start, and ends what was started
    with pytest.raises(errors.WorkerDiedError):
        rpc.rpc_sync("ps", os.getpid, timeout=0.3)


@pytest.mark.usefixtures("driver")
def test_observers_are_called_when_workers_join_leave_and_die():
    seen: list[tuple[str, ...]] = []
    ends = [
        rpc.on_join(lambda worker: seen.append(("joined", worker.name))),
        rpc.on_leave(lambda worker, cause: seen.append(("gone", worker.name, cause))),
    ]
    group = rpc.start_workers(["leaver"])
    assert eventually(lambda: seen == [("joined", "leaver")])
    group.stop()
    assert eventually(lambda: len(seen) == 2)
    assert seen[1] == ("gone", "leaver", "it has left the group")

    rpc.start_workers(["ps"], max_restarts=1)
    guest = rpc.rpc_sync("ps", lambda: rpc.rpc_sync("driver", targets.whoami))
    assert guest == "driver"
    kill("ps")
    assert eventually(lambda: len(seen) == 5)
    assert [each[:2] for each in seen[2:]] == [("joined", "ps"), ("gone", "ps"), ("joined", "ps")]
    assert "its process died" in seen[3][2]
    for end in ends:
        end()
    rpc.start_workers(["late"])
    time.sleep(0.2)
    assert len(seen) == 5


@pytest.mark.usefixtures("driver")
def test_an_observer_may_call_the_worker_that_has_joined():
    pids = []
    rpc.on_join(lambda worker: pids.append(rpc.rpc_sync(worker, os.getpid)))
    rpc.start_workers(["ps"])
    assert eventually(lambda: pids == [rpc.rpc_sync("ps", os.getpid)])


@pytest.mark.usefixtures("driver")
def test_an_error_of_on_start_is_raised_as_it_is_and_leaves_no_worker():
    def fail() -> None:
        raise ArithmeticError("as expected")

    with pytest.raises(ArithmeticError, match="as expected"):
        rpc.start_workers(["ps", "other"], on_start=fail)
    assert eventually(lambda: [info.name for info in rpc.get_group().workers()] == ["driver"])


@pytest.mark.slow
@pytest.mark.usefixtures("driver")
def test_a_restart_whose_on_start_fails_counts_and_is_made_again(tmp_path, caplog):
    path = str(tmp_path / "starts")

    def fail_the_second_time() -> None:
        with open(path, "a") as file:
            file.write("x")
        if os.path.getsize(path) == 2:
            raise ArithmeticError("as expected")

    rpc.start_workers(["ps"], max_restarts=2, on_start=fail_the_second_time)
    old = kill("ps")

    def is_back() -> bool:
        try:
            return bool(rpc.rpc_sync("ps", os.getpid) != old)
        except errors.CallError:  # the one whose start failed
            return False

    assert eventually(is_back, 60)
    assert os.path.getsize(path) == 3
    assert "its start failed: ArithmeticError: " in caplog.text and "as expected" in caplog.text


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"max_restarts": -2}, errors.ConfigError, "from 0, or -1"),
        ({"max_restarts": True}, errors.ConfigError, "from 0, or -1"),
        ({"on_start": 3}, TypeError, "on_start must be a function"),
        (
            {"max_restarts": 1, "detached": True, "group": "restarted"},
            errors.ConfigError,
            "detached workers cannot be started again",
        ),
    ],
)
def test_arguments_that_cannot_be_are_refused_before_anything_is_started(given, error, text):
    with pytest.raises(error, match=text):
        rpc.start_workers(["ps"], **given)
    assert not rpc._is_current_rpc_agent_set()
