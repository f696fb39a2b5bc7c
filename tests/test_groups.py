"""Groups of attached processes: joins, refusals, changes of membership, shutdown."""

import contextlib
import functools
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
import targets
from conftest import ROOT, eventually, python_path

import rayrpc as rpc
from rayrpc import errors
from rayrpc._protocol.rendezvous import owned_key
from rayrpc._transports.process_origin import this_origin

ports = itertools.count(29700)  # parts of keys: no port is bound


class PuppetError(Exception):
    """The code that a puppet ran raised; the text names the type."""


class Puppet:
    """A process started by hand as ``rayrpc run SCRIPT``; it runs the code that it is sent."""

    def __init__(self, script: str) -> None:
        path = python_path(ROOT, ROOT / "tests")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rayrpc", "run", script],
            env={**os.environ, "PYTHONPATH": path, "RAYRPC_INIT_TIMEOUT": "60"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self._sent = 0
        self._answers: dict[int, dict[str, Any]] = {}
        self._came = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(targets.OBEYED):
                with self._came:
                    answer = json.loads(line.removeprefix(targets.OBEYED))
                    self._answers[len(self._answers)] = answer
                    self._came.notify_all()

    def is_done(self, number: int) -> bool:
        """Tell whether the code that was sent as this number has ended."""
        return number in self._answers

    def start(self, code: str) -> int:
        """Send an expression, or lines of code; return its number."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(code) + "\n")
        self._sent += 1
        return self._sent - 1

    def wait(self, number: int, timeout: float = 90) -> Any:
        """Return the value of the code with this number."""
        with self._came:
            if not self._came.wait_for(lambda: self.is_done(number), timeout):
                self.process.kill()
                pytest.fail(f"no answer after {timeout} s")
        answer = self._answers[number]
        if "error" in answer:
            raise PuppetError(answer["error"])
        return answer["value"]

    def do(self, code: str, timeout: float = 90) -> Any:
        """Send an expression, or lines of code; return its value."""
        return self.wait(self.start(code), timeout)

    def kill(self) -> None:
        """End the process as a crash would."""
        self.process.kill()
        self.process.wait(10)
        self._reader.join(5)
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            with contextlib.suppress(OSError):
                stream.close()


CONNECT = """
import rayrpc
from rayrpc._transports.ray.cluster import connect
connect(rayrpc.settings())
"""
RESET = """
import rayrpc
if rpc._is_current_rpc_agent_set():
    rpc.shutdown(graceful=False)
rayrpc.configure()
"""


@pytest.fixture(scope="module")
def puppet_pool(
    ray_cluster, tmp_path_factory
) -> Iterator[tuple[Callable[[], Puppet], list[Puppet]]]:
    script = tmp_path_factory.mktemp("puppets") / "puppet.py"
    script.write_text("import targets\ntargets.obey()\n")
    puppets: list[Puppet] = []
    yield functools.partial(Puppet, str(script)), puppets
    for puppet in puppets:
        puppet.kill()


@pytest.fixture
def puppets(puppet_pool) -> Iterator[list[Puppet]]:
    """Four attached processes that are in no group."""
    start, puppets = puppet_pool
    for puppet in [p for p in puppets if p.process.poll() is not None]:
        puppet.kill()
        puppets.remove(puppet)
    new = [start() for _ in range(4 - len(puppets))]
    for puppet in new:
        puppet.do(CONNECT, 120)
    puppets += new
    yield puppets
    running = [p for p in puppets if p.process.poll() is None]
    for puppet, number in [(p, p.start(RESET)) for p in running]:
        puppet.wait(number)


@pytest.fixture
def key() -> str:
    """The init_method of a group of the test's own."""
    return f"tcp://localhost:{next(ports)}"


def join(name: str, key: str, rank: int | None = None, world_size: int | None = None) -> str:
    """Return the code that joins a group."""
    options = f"rpc_backend_options=rpc.TensorPipeRpcBackendOptions(init_method={key!r})"
    place = "" if rank is None else f"rank={rank}, "
    return f"rpc.init_rpc({name!r}, {place}world_size={world_size}, {options})"


def all_do(puppets: list[Puppet], codes: list[str]) -> list[Any]:
    """Let each run its code at the same time; errors are returned as their text."""
    numbers = [puppet.start(code) for puppet, code in zip(puppets, codes, strict=True)]
    results: list[Any] = []
    for puppet, number in zip(puppets, numbers, strict=True):
        try:
            results.append(puppet.wait(number))
        except PuppetError as exc:
            results.append(str(exc))
    return results


def find_directory(key: str) -> Any:
    """Return the directory of the group with this key; ValueError if it does not run."""
    name = f"rayrpc-directory:{owned_key(key.removeprefix('tcp://'), this_origin())}"
    return ray.get_actor(name, namespace=rpc.settings().namespace)


def wait_joining(key: str) -> None:
    """Return when a join to the group with this key is pending."""

    def is_joining() -> bool:
        try:
            directory = find_directory(key)
        except ValueError:
            return False
        count = directory.__ray_call__.remote(lambda self: len(self._joins))
        return ray.get(count, timeout=60) > 0

    assert eventually(is_joining)


def names(puppet: Puppet) -> list[str]:
    return puppet.do("[i.name for i in rpc._get_current_rpc_agent().get_worker_infos()]")


WHO = "rpc.rpc_sync({!r}, targets.whoami)"


class TestStatic:
    def test_processes_started_by_hand_meet_by_master_addr_and_port(self, puppets):
        port = next(ports)
        codes = [
            f"os.environ.update(MASTER_ADDR={host!r}, MASTER_PORT='{port}', RANK='{rank}')\n"
            f"rpc.init_rpc('w{rank}', world_size=4)\n"
            f"value = rpc.get_worker_info().id"
            for rank, host in enumerate(["localhost", "127.0.0.1", "localhost", "localhost"])
        ]
        assert all_do(puppets, codes) == [0, 1, 2, 3]
        calls = [WHO.format(f"w{(rank + 1) % 4}") for rank in range(4)]
        assert all_do(puppets, calls) == ["w1", "w2", "w3", "w0"]
        assert all_do(puppets, ["rpc.shutdown()"] * 4) == [None] * 4

    def test_a_name_taken_twice_is_refused_to_all(self, puppets, key):
        results = all_do(puppets[:2], [join("twin", key, rank, 2) for rank in range(2)])
        assert all("RPC worker name twin is not unique" in result for result in results)

    def test_a_taken_rank_is_refused_and_the_group_still_forms(self, puppets, key):
        first = puppets[0].start(join("a", key, 0, 2))
        wait_joining(key)
        with pytest.raises(PuppetError, match=r"asks for rank 0, which worker 'a' \(pid \d+"):
            puppets[1].do(join("b", key, 0, 2))
        puppets[1].do(join("b", key, 1, 2))
        puppets[0].wait(first)
        assert puppets[0].do(WHO.format("b")) == "b"

    def test_another_world_size_is_refused_and_the_group_still_forms(self, puppets, key):
        first = puppets[0].start(join("a", key, 0, 2))
        wait_joining(key)
        with pytest.raises(PuppetError, match=r"world_size 3, but .* with world_size 2"):
            puppets[1].do(join("b", key, 1, 3))
        puppets[1].do(join("b", key, 1, 2))
        puppets[0].wait(first)

    def test_a_group_that_stays_incomplete_names_the_missing_ranks(self, puppets, key):
        patient, hasty = puppets[:2]
        set_timeout = "import rayrpc\nrayrpc.configure(init_timeout={})\n"
        patient.do(set_timeout.format(300))
        hasty.do(set_timeout.format(2))
        patient.start(join("a", key, 0, 4))
        wait_joining(key)
        with pytest.raises(PuppetError, match=r"world_size 4, ranks \[1, 3\] are missing"):
            hasty.do(join("c", key, 2, 4))
        # rank 0 still waits when rank 2 no longer does
        hasty.do(set_timeout.format(2))
        with pytest.raises(PuppetError, match=r"world_size 4, ranks \[1, 2\] are missing"):
            hasty.do(join("d", key, 3, 4))
        patient.kill()

    def test_a_complete_group_refuses_one_more(self, puppets, key):
        all_do(puppets[:2], [join(f"w{rank}", key, rank, 2) for rank in range(2)])
        with pytest.raises(
            PuppetError, match=r"is complete: its 2 workers \(w0, w1\) are alive"
        ) as exc:
            puppets[2].do(join("w2", key, 1, 2))
        user, host = this_origin()[:2]
        for puppet in puppets[:2]:
            pid = puppet.process.pid
            script = puppet.process.args[-1]
            user_of_key = f"user {user!r}, program {script!r}, host {host!r}, pid {pid}"
            assert user_of_key in str(exc.value)

    def test_the_same_key_serves_one_group_after_another(self, puppets, key):
        for number in range(3):
            ranks = [(number + i) % 2 for i in range(2)]
            assert all_do(puppets[:2], [join(f"w{rank}", key, rank, 2) for rank in ranks]) == [
                None,
                None,
            ]
            codes = [WHO.format("w0"), WHO.format("w1")]
            assert all_do(puppets[:2], codes) == ["w0", "w1"]
            assert all_do(puppets[:2], ["rpc.shutdown()"] * 2) == [None] * 2

    def test_graceful_shutdown_waits_for_the_calls_of_slow_members(self, puppets, key):
        fast, slow = puppets[:2]
        all_do([fast, slow], [join("fast", key, 0, 2), join("slow", key, 1, 2)])
        slow.do("future = rpc.rpc_async('fast', targets.wait_until_kept, args=('go',))\n")
        leaving = fast.start("rpc.shutdown()")
        slow.do("import time\ntime.sleep(0.5)\n")
        assert slow.do(WHO.format("fast")) == "fast"  # it serves until the last one leaves
        assert not fast.is_done(leaving)
        slow.do("rpc.rpc_sync('fast', targets.keep, args=('go', 1))")
        slow.do("future.wait()")
        slow.do("rpc.shutdown()")
        fast.wait(leaving)

    def test_graceful_shutdown_with_a_timeout_names_the_missing_workers(self, puppets, key):
        all_do(puppets[:3], [join(f"w{rank}", key, rank, 3) for rank in range(3)])
        # the leader waits for the others: the first by name
        first, second = (
            puppets[0].start("rpc.shutdown(timeout=2)"),
            puppets[1].start("rpc.shutdown()"),
        )
        with pytest.raises(PuppetError, match=r"Workers \['w2'\] did not join"):
            puppets[0].wait(first)
        assert not puppets[0].do("rpc._is_current_rpc_agent_set()")
        puppets[2].do("rpc.shutdown()")  # the others do not wait for the one that timed out
        puppets[1].wait(second)

    def test_an_ungraceful_shutdown_does_not_wait(self, puppets, key):
        all_do(puppets[:2], [join(f"w{rank}", key, rank, 2) for rank in range(2)])
        puppets[0].do("rpc.shutdown(graceful=False)")
        puppets[1].do("rpc.shutdown()")

    def test_the_key_of_a_crashed_run_is_free_at_once(self, puppets, key):
        all_do(puppets[:2], [join(f"w{rank}", key, rank, 2) for rank in range(2)])
        for puppet in puppets[:2]:
            puppet.kill()
        codes = [join(f"w{rank}", key, rank, 2) for rank in range(2)]
        assert all_do(puppets[2:], codes) == [None, None]
        assert puppets[2].do(WHO.format("w1")) == "w1"
        assert all_do(puppets[2:], ["rpc.shutdown()"] * 2) == [None] * 2


class TestDynamic:
    def test_members_join_and_leave_and_all_learn_of_it(self, puppets):
        a, b, c, _ = puppets
        key = f"ray://{next(ports)}"
        a.do(join("a", key))
        b.do(join("b", key, rank=5))
        c.do(join("c", key))
        for puppet in (a, b, c):
            assert sorted(names(puppet)) == ["a", "b", "c"]
        ids = [puppet.do("rpc.get_worker_info().id") for puppet in (a, b, c)]
        assert ids[1] == 5 and len(set(ids)) == 3
        assert a.do(WHO.format("c")) == "c" and c.do("rpc.rpc_sync(5, targets.whoami)") == "b"
        b.do("rpc.shutdown()")
        assert a.do("rpc.rpc_sync('c', targets.whoami)") == "c"
        assert eventually(lambda: sorted(names(a)) == ["a", "c"])
        assert eventually(lambda: sorted(names(c)) == ["a", "c"])
        with pytest.raises(PuppetError, match=r"WorkerDiedError: .*'b'.*left the group"):
            a.do(WHO.format("b"))
        b.do(join("b", key, rank=5))  # the same name and rank again
        assert a.do(WHO.format("b")) == "b" and b.do(WHO.format("a")) == "a"

    def test_a_group_may_be_named_by_the_settings(self, puppets):
        group = f"group-{next(ports)}"
        for puppet, name in zip(puppets[:2], "ab", strict=False):
            puppet.do(
                "import rayrpc\nfor key in ('MASTER_ADDR', 'MASTER_PORT', 'RANK'):\n"
                "    os.environ.pop(key, None)\n"
                f"rayrpc.configure(group={group!r})\nrpc.init_rpc({name!r})\n"
            )
        assert puppets[0].do(WHO.format("b")) == "b"

    def test_taken_names_and_ranks_are_refused_and_the_others_stay(self, puppets):
        key = f"ray://{next(ports)}"
        puppets[0].do(join("a", key, rank=3))
        with pytest.raises(PuppetError, match="RPC worker name a is not unique"):
            puppets[1].do(join("a", key))
        with pytest.raises(PuppetError, match="asks for rank 3, which worker 'a'"):
            puppets[1].do(join("b", key, rank=3))
        puppets[1].do(join("b", key))
        assert puppets[0].do(WHO.format("b")) == "b"

    def test_a_group_whose_members_all_died_at_once_is_remembered_for_a_while(self, puppets, key):
        all_do(puppets[:2], [join(f"w{rank}", key, rank, 2) for rank in range(2)])
        directory = find_directory(key)

        def linger(self):
            from rayrpc._transports.ray import directory

            directory.LINGER_AFTER_DEATH_SECONDS = 100.0

        ray.get(directory.__ray_call__.remote(linger), timeout=60)
        for puppet in puppets[:2]:
            puppet.process.send_signal(signal.SIGKILL)
        is_empty = directory.__ray_call__.remote
        assert eventually(lambda: ray.get(is_empty(lambda self: self._group.is_empty), timeout=60))
        time.sleep(2)  # longer than after an end without deaths
        with pytest.raises(PuppetError, match="mixes statically and dynamically"):
            puppets[2].do(join("late", key, rank=2))
        ray.kill(directory)

    def test_static_and_dynamic_do_not_mix(self, puppets, key):
        mixed = "mixes statically and dynamically initialized members"
        puppets[0].do(join("a", key, rank=0))
        with pytest.raises(PuppetError, match=mixed):
            puppets[1].do(join("b", key, rank=1, world_size=2))
        puppets[0].do("rpc.shutdown()")
        key = f"tcp://localhost:{next(ports)}"
        waiting = puppets[0].start(join("a", key, rank=0, world_size=2))
        wait_joining(key)
        with pytest.raises(PuppetError, match=mixed):
            puppets[1].do(join("b", key, rank=1))
        puppets[1].do(join("b", key, rank=1, world_size=2))
        puppets[0].wait(waiting)
        with pytest.raises(PuppetError, match=mixed):
            puppets[2].do(join("c", key, rank=2))

    def test_shutdown_does_not_wait_for_the_others(self, puppets):
        key = f"ray://{next(ports)}"
        for puppet, name in zip(puppets[:2], "ab", strict=False):
            puppet.do(join(name, key))
        puppets[0].do("rpc.shutdown()")
        puppets[1].do("rpc.shutdown()")


class TestAlone:
    """In the process of the tests itself."""

    @pytest.fixture
    def alone(self, ray_cluster, key):
        options = rpc.TensorPipeRpcBackendOptions(init_method=key)
        rpc.init_rpc("only", rank=0, world_size=1, rpc_backend_options=options)
        yield options
        if rpc._is_current_rpc_agent_set():
            rpc.shutdown()

    def test_a_group_of_one_talks_to_itself(self, alone):
        assert rpc.rpc_sync("only", targets.whoami) == "only"
        assert rpc.remote("only", targets.add, args=(1, 2)).to_here() == 3

    def test_a_second_init_rpc_is_refused(self, alone):
        with pytest.raises(RuntimeError, match="is already initialized"):
            rpc.init_rpc("other", rank=0, world_size=1, rpc_backend_options=alone)
        assert rpc.rpc_sync("only", targets.whoami) == "only"

    def test_shutdown_and_init_rpc_again_and_again(self, alone):
        for number in range(3):
            rpc.shutdown()
            rpc.init_rpc(f"again{number}", rank=0, world_size=1, rpc_backend_options=alone)
            assert rpc.rpc_sync(0, targets.whoami) == f"again{number}"

    @pytest.mark.slow
    def test_no_thread_is_left_after_shutdown(self, alone):
        rpc.shutdown()
        before = set(threading.enumerate())  # other tests may have left some that still block

        def left():
            return [t.name for t in our_threads() if t not in before]

        rpc.init_rpc("only", rank=0, world_size=1, rpc_backend_options=alone)
        rpc.rpc_async("only", targets.whoami).wait()
        assert left()
        rpc.shutdown()
        assert eventually(lambda: not left()), left()

    @pytest.mark.parametrize(
        "call",
        [
            lambda: rpc.rpc_sync("a", min),
            lambda: rpc.rpc_async("a", min),
            lambda: rpc.remote("a", min),
            lambda: rpc.get_worker_info(),
            lambda: rpc.shutdown(),
            lambda: rpc._all_gather(1),
        ],
        ids=["rpc_sync", "rpc_async", "remote", "info", "shutdown", "gather"],
    )
    def test_nothing_works_before_init_rpc(self, call):
        with pytest.raises(errors.NotInitializedError, match="RPC has not been initialized"):
            call()

    def test_the_timeout_before_init_rpc_is_refused_in_torchs_words(self):
        with pytest.raises(errors.NotInitializedError, match="Current RPC agent is not set"):
            rpc.get_rpc_timeout()

    def test_nothing_works_after_shutdown(self, alone):
        rpc.shutdown()
        with pytest.raises(RuntimeError, match="RPC has not been initialized"):
            rpc.rpc_sync("only", targets.whoami)

    @pytest.mark.parametrize("rank", [2, 7, -1])
    def test_a_rank_out_of_range_is_refused(self, ray_cluster, key, rank):
        options = rpc.TensorPipeRpcBackendOptions(init_method=key)
        with pytest.raises(ValueError, match="rank"):
            rpc.init_rpc("a", rank=rank, world_size=2, rpc_backend_options=options)
        assert not rpc._is_current_rpc_agent_set()


def our_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("rayrpc")]
