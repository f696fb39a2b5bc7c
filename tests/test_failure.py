"""A worker dies: everything that needs it fails at once, by name; the other workers go on.

The calls would never end, and have no time-out: only the death ends them.
"""

import contextlib
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import targets
from conftest import ROOT, Run, eventually, python_path

import rayrpc as rpc
from rayrpc import errors

# The promise is 1 s from a death; more is for machines that are busy.
SECONDS = 15.0
GROUP = "ray://failures"

MEMBER = f"""
import sys, time
import rayrpc
rayrpc.install()
import torch.distributed.rpc as rpc
import targets
rpc.init_rpc(sys.argv[1], rpc_backend_options=rpc.TensorPipeRpcBackendOptions(
    init_method={GROUP!r}))
if len(sys.argv) > 2:
    kept = [rpc.remote(sys.argv[2], targets.Adder) for _ in range(5)]
    assert all(rref.rpc_sync().add(1) == 1 for rref in kept)
print("joined", flush=True)
time.sleep(1000)
"""


@contextlib.contextmanager
def attached(folder: Path, *arguments: str) -> Iterator[Run]:
    """Start a process that joins the group by itself."""
    (folder / "member.py").write_text(MEMBER)
    environ = {**os.environ, "PYTHONPATH": python_path(ROOT, ROOT / "tests")}
    run = Run([sys.executable, "member.py", *arguments], environ, folder)
    try:
        run.wait_for("joined")
        yield run
    finally:
        run.close()


@pytest.fixture(scope="module")
def alice(ray_cluster) -> Iterator[str]:
    """A worker that survives; this process is "driver" in its group."""
    rpc.init_rpc("driver", rpc_backend_options=rpc.TensorPipeRpcBackendOptions(init_method=GROUP))
    try:
        rpc.start_workers(["alice"])
        yield "alice"
    finally:
        if rpc._is_current_rpc_agent_set():
            rpc.shutdown()


class Outcomes:
    """The outcomes of calls, and their times."""

    def __init__(self) -> None:
        self.ends: dict[str, tuple[float, object]] = {}
        self._threads: list[threading.Thread] = []

    def record(self, name: str, call: Callable[[], object]) -> None:
        try:
            result: object = call()
        except BaseException as exc:
            result = exc
        self.ends[name] = (time.monotonic(), result)

    def watch(self, name: str, call: Callable[[], object]) -> None:
        thread = threading.Thread(target=self.record, args=(name, call), daemon=True)
        thread.start()
        self._threads.append(thread)

    def join(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))


PENDING = [
    "rpc_sync",
    "rpc_async",
    "async_execution",
    "to_here",
    "proxy",
    "of another worker",
    "async_execution of another worker",
]
LATER = [
    "later rpc_sync",
    "later rpc_async",
    "later remote",
    "later to_here",
    "later proxy",
    "later of another worker",
    "later shared rref",
]


def start_pending(outcomes: Outcomes, existing) -> None:
    def call(func: Any, *args: Any) -> Any:
        return rpc.rpc_async("victim", func, args=args, timeout=0)

    outcomes.watch("rpc_sync", lambda: rpc.rpc_sync("victim", targets.hang, timeout=0))
    outcomes.watch("rpc_async", call(targets.hang).wait)
    outcomes.watch("async_execution", call(targets.wait_for_all, 99).wait)
    pending = rpc.remote("victim", targets.hang, timeout=0)
    outcomes.watch("to_here", lambda: pending.to_here(timeout=0))
    outcomes.watch("proxy", lambda: existing.rpc_sync(timeout=0).hang())
    outcomes.watch(
        "of another worker",
        lambda: rpc.rpc_sync("alice", targets.hang_on, args=("victim",), timeout=0),
    )
    waiting = rpc.rpc_async("alice", targets.wait_on, args=("victim",), timeout=0)
    outcomes.watch("async_execution of another worker", waiting.wait)


def try_later(outcomes: Outcomes, existing) -> None:
    calls = {
        "later rpc_sync": lambda: rpc.rpc_sync("victim", targets.whoami),
        "later rpc_async": lambda: rpc.rpc_async("victim", targets.whoami).wait(),
        "later remote": lambda: rpc.remote("victim", targets.whoami).to_here(),
        "later to_here": existing.to_here,
        "later proxy": lambda: existing.rpc_sync().add(1),
        "later of another worker": lambda: rpc.rpc_sync(
            "alice", targets.call_on, args=("victim", targets.whoami)
        ),
        "later shared rref": lambda: rpc.rpc_sync("alice", targets.read, args=(existing,)),
    }
    for name, call in calls.items():
        outcomes.watch(name, call)
    outcomes.join(60)


@pytest.fixture(scope="module", params=["hosted", "attached"])
def death(request, alice, tmp_path_factory):
    """The outcomes of all that can be pending on a worker, which dies by ``kill -9``."""
    with contextlib.ExitStack() as stack:
        if request.param == "hosted":
            rpc.start_workers(["victim"])
        else:
            stack.enter_context(attached(tmp_path_factory.mktemp("victim"), "victim"))
        outcomes = Outcomes()
        existing = rpc.remote("victim", targets.Adder)
        assert existing.rpc_sync().add(1) == 1
        start_pending(outcomes, existing)
        pid = rpc.rpc_sync("victim", targets.pid)
        # five hang there, and one waits for others to come
        assert eventually(lambda: rpc.rpc_sync("victim", targets.hanging) == 6)
        assert eventually(lambda: rpc.rpc_sync("victim", targets.waiting) == 1)
        assert not outcomes.ends, outcomes.ends
        killed = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        outcomes.join(60)
        noticed = time.monotonic()
        try_later(outcomes, existing)
        yield {
            name: (end - (noticed if name.startswith("later") else killed), result)
            for name, (end, result) in outcomes.ends.items()
        }
        del existing
        gc.collect()


@pytest.mark.parametrize("name", PENDING + LATER)
def test_everything_that_needs_a_dead_worker_fails_at_once_and_names_it(death, name):
    assert name in death, f"it never ended; these did: {death}"
    _, result = death[name]
    assert isinstance(result, errors.WorkerDiedError), repr(result)
    assert result.worker == "victim" and "'victim'" in str(result)


@pytest.mark.slow
def test_a_death_is_noticed_soon(death):
    late = {name: seconds for name, (seconds, _) in death.items() if seconds > SECONDS}
    assert not late


def test_the_error_says_where_and_why(death):
    _, error = death["rpc_sync"]
    assert error.node and error.node in str(error)
    assert error.cause


def test_the_other_workers_go_on_and_do_not_list_the_dead_one(death):
    assert rpc.rpc_sync("alice", targets.whoami) == "alice"
    infos = rpc._get_current_rpc_agent().get_worker_infos()
    assert [info.name for info in infos if info.name == "victim"] == []


def test_a_worker_that_kills_itself_in_a_call_fails_that_call(alice):
    rpc.start_workers(["lemming"])
    with pytest.raises(errors.WorkerDiedError, match="lemming"):
        rpc.rpc_sync("lemming", targets.kill_me, timeout=0)


def test_a_dead_worker_of_a_dynamic_group_can_be_replaced(alice):
    rpc.start_workers(["phoenix"])
    first = rpc.rpc_sync("phoenix", targets.pid)
    os.kill(first, signal.SIGKILL)
    with pytest.raises(errors.WorkerDiedError):
        while True:
            rpc.rpc_sync("phoenix", targets.pid)
    rpc.start_workers(["phoenix"])
    assert rpc.rpc_sync("phoenix", targets.pid) != first
    assert rpc.rpc_sync("alice", targets.call_on, args=("phoenix", targets.whoami)) == "phoenix"


def test_a_worker_that_dies_before_its_relay_runs_is_dead_to_the_others(alice, tmp_path):
    with attached(tmp_path, "shortlived") as member:  # prints as soon as init_rpc returns
        member.process.kill()
        with pytest.raises(errors.WorkerDiedError, match="shortlived"):
            while True:
                rpc.rpc_sync("shortlived", targets.whoami, timeout=0)


def owned(name: str) -> tuple[str, str]:
    info = rpc.rpc_sync(name, targets.rref_info)
    return info["num_owner_rrefs"], info["num_forks"]


def test_the_rrefs_of_a_caller_that_dies_are_released(alice, tmp_path):
    gc.collect()
    assert eventually(lambda: owned(alice) == ("0", "0"))
    with attached(tmp_path, "caller", alice) as caller:
        assert owned(alice) == ("5", "5")
        caller.process.kill()
        assert eventually(lambda: owned(alice) == ("0", "0"))


# -- static groups --------------------------------------------------------------------------------

STATIC = """
import os, sys, time, torch
import torch.distributed.rpc as rpc
rank, how = int(sys.argv[1]), sys.argv[2]
os.environ.update(MASTER_ADDR="localhost")
rpc.init_rpc(f"w{rank}", rank=rank, world_size=3)
assert rpc.rpc_sync(f"w{(rank + 1) % 3}", torch.add, args=(torch.ones(1), 1)) == 2
rpc.api._barrier({"w0", "w1", "w2"})
print("joined", flush=True)
if rank == 0:  # the one that leads the others' shutdown
    if how == "raise":
        raise ValueError("as expected")
    time.sleep(1000)
rpc.shutdown()
print("survived", flush=True)
"""


@pytest.mark.parametrize("how", ["kill", "raise"])
def test_survivors_of_a_static_group_can_shut_down(ray_cluster, start, script, how):
    path = script(STATIC)
    port = {"kill": "29690", "raise": "29691"}[how]
    runs = [
        start("-m", "rayrpc", "run", path, str(rank), how, MASTER_PORT=port) for rank in range(3)
    ]
    for run in runs:
        run.wait_for("joined")
    if how == "kill":
        time.sleep(0.5)  # the others wait in shutdown by now
        assert runs[1].process.poll() is None and runs[2].process.poll() is None
        runs[0].process.kill()
    else:
        assert runs[0].end() == 1 and "as expected" in runs[0].output
    assert [run.end() for run in runs[1:]] == [0, 0], runs[1].output + runs[2].output
    assert all("survived" in run.output for run in runs[1:])


# -- a program that ends without shutdown ---------------------------------------------------------

ENDS = """
import sys
import rayrpc
rayrpc.start_workers(["a"])
rayrpc.rpc_sync("a", max, (1, 2))
sys.exit(int(sys.argv[1]))
"""


def test_programs_may_end_without_shutdown(ray_cluster, start, script):
    path = script(ENDS)
    # threads that use Ray after its shutdown make two of three end with 1, or a signal
    runs = [start(path, str(status)) for status in (0, 3, 0)]
    assert [run.end() for run in runs] == [0, 3, 0], [run.output for run in runs]
    # Ray logs to stderr what it likes
    assert not any("Traceback" in run.output or "Exception" in run.output for run in runs)


# -- nothing is left ------------------------------------------------------------------------------


def actors_of_this_session() -> dict[int, str]:
    """Return the actors' processes under this process, which started the cluster."""
    parents, titles = {}, {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            stat = (path / "stat").read_text().rpartition(")")[2].split()
            parents[int(path.name)] = int(stat[1]) if stat[0] != "Z" else 0
            titles[int(path.name)] = (path / "cmdline").read_bytes().split(b"\0")[0].decode()

    def ours(pid: int) -> bool:
        while pid > 1:
            if pid == os.getpid():
                return True
            pid = parents.get(pid, 0)
        return False

    names = ("Relay", "Directory", "Worker")
    return {
        pid: title
        for pid, title in titles.items()
        if title.startswith("ray::") and any(n in title for n in names) and ours(pid)
    }


def our_threads() -> dict[int | None, str]:
    return {t.ident: t.name for t in threading.enumerate() if t.name.startswith("rayrpc")}


WITHOUT_RAY = """
import os, time
import ray
import rayrpc as rpc
from ray._private.worker import global_worker

class SlowlyEnding:
    # Ray's client, which has ended for a while before its process knows

    def __init__(self, client):
        self.client = client

    def __getattr__(self, name):
        return getattr(self.client, name)

    def shutdown_driver(self):
        self.client.shutdown_driver()
        time.sleep(2)

if __name__ == "__main__":
    rpc.start_workers(["alice", "bob"])
    assert rpc.rpc_sync("alice", int, args=(5,)) == 5
    global_worker.core_worker = SlowlyEnding(global_worker.core_worker)
    ray.shutdown()
    for _ in range(30):
        time.sleep(0.1)
        assert not ray.is_initialized()
    for name in ("alice", "bob"):  # of which one was called before
        try:
            rpc.rpc_sync(name, int, args=(6,))
        except rpc.errors.CallError as exc:
            print(exc, flush=True)
    assert not ray.is_initialized()
    os._exit(0)
"""


@pytest.mark.parametrize("transport", [pytest.param("auto", marks=pytest.mark.slow), "ray"])
def test_nothing_starts_ray_again_that_was_shut_down_under_rpc(
    ray_cluster, start, script, transport
):
    run = start(script(WITHOUT_RAY), RAYRPC_TRANSPORT=transport)
    assert run.end() == 0, run.output
    assert "RPC worker 'bob'" in run.output


@pytest.mark.parametrize(
    "found",
    [actors_of_this_session, pytest.param(our_threads, marks=pytest.mark.slow)],
    ids=["actor", "thread"],
)
def test_none_is_left_of_a_group_whose_members_died(ray_cluster, found):
    # the last of this module: alice's group is not needed any more
    if rpc._is_current_rpc_agent_set():
        rpc.shutdown()
    before = found()

    def left():
        return {key: name for key, name in found().items() if key not in before}

    options = rpc.TensorPipeRpcBackendOptions(init_method="ray://left-behind")
    rpc.init_rpc("driver", rpc_backend_options=options)
    rpc.start_workers(["lemming"])
    assert left()
    with pytest.raises(errors.WorkerDiedError):
        rpc.rpc_sync("lemming", targets.kill_me)
    rpc.shutdown()
    assert eventually(lambda: not left()), left()
