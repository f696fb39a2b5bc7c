"""Leases of a local cluster, whose process is a listener of the test's."""

import contextlib
import os
import socket
import stat
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import ray
from conftest import eventually

from rayrpc._transports.ray import local_lease
from rayrpc._transports.ray.start_worker import SERVER
from rayrpc._transports.ray.worker_forks import FORKS
from rayrpc.config import Settings
from rayrpc.errors import ClusterError

WAIT_SECONDS = 60.0
NOW = Settings(address=None, namespace="names")


class Cluster:
    """Answers its clients, and holds their leases, as a local cluster's process does."""

    def __init__(self, path, answer="ready 1.2.3.4:5"):
        self.path = Path(path)
        self.answer = answer
        self.is_deaf = self.ends_when_told = False
        self.told = []
        self.leases = set()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen(16)
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self.leases.add(client)
                self._threads.append(threading.Thread(target=self._serve, args=(client,)))
                self._threads[-1].start()

    def _serve(self, client):
        with client, contextlib.suppress(OSError):  # the client may have ended
            if self.answer is not None:
                client.sendall(f"{self.answer}\n".encode())
                while (text := client.recv(100)) and not self.ends_when_told:
                    if not self.is_deaf:
                        client.sendall(b"old\n" if text in self.told else b"new\n")
                    self.told.append(text)
        self.leases.discard(client)

    def close(self):
        """End the process; its socket's file stays."""
        with contextlib.suppress(OSError):  # it was closed before
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for lease in list(self.leases):
            with contextlib.suppress(OSError):
                lease.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(WAIT_SECONDS)


@pytest.fixture
def folder(monkeypatch):
    """The folder of this user's local clusters; its path is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="ll-", dir="/tmp") as home:
        monkeypatch.setenv("HOME", home)
        monkeypatch.setenv("RAY_TMPDIR", home)
        names = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ADDRESS", SERVER)
        for name in (*names, "RAYRPC_INTERNAL_LOCAL"):
            monkeypatch.delenv(name, raising=False)
        yield local_lease.own_folder()


@pytest.fixture
def run(folder):
    """Run a cluster at a path."""
    clusters = []

    def run(path, *answer):
        clusters.append(Cluster(path, *answer))
        return clusters[-1]

    yield run
    for cluster in clusters:
        cluster.close()


class Starts:
    """Takes the place of the processes that are started."""

    def __init__(self, run):
        self.run = run
        self.answer = "ready 1.2.3.4:5"
        self.listens = True
        self.commands = []
        self.environ = {}
        self.log = Path()

    def __call__(self, command, env, stdout, **options):
        self.commands.append(command)
        self.environ, self.log = env, Path(stdout.name)
        assert options["start_new_session"]  # a Ctrl-C in the terminal does not end it
        if self.listens:
            self.cluster = self.run(command[3], self.answer)


@pytest.fixture
def starts(run, monkeypatch):
    """A cluster runs as soon as its process is started."""
    starts = Starts(run)
    monkeypatch.setattr("rayrpc._transports.ray.local_lease.subprocess.Popen", starts)
    return starts


@pytest.fixture(autouse=True)
def leases(monkeypatch):
    """This process has no lease, and has none after the test."""
    for name in ("_lease", "_held"):
        monkeypatch.setattr(local_lease, name, None)
    monkeypatch.setattr(local_lease, "_ahead", {})
    yield
    for lease in (local_lease._lease, local_lease._held, *local_lease._ahead.values()):
        if lease is not None:
            lease.close()


class TestJoin:
    def test_it_starts_a_cluster_where_none_runs_and_keeps_its_lease(self, starts, folder):
        assert local_lease.join_local(NOW, starts=True) == "1.2.3.4:5"
        ((_, _, module, path, namespace, cpus, dashboard),) = starts.commands
        assert module == "rayrpc._transports.ray.local_cluster"
        assert Path(path) == local_lease.local_file(NOW, ".sock") and Path(path).parent == folder
        assert (namespace, cpus, dashboard) == ("names", "0", "0")
        assert local_lease.fork_server() == Path(path).with_suffix(FORKS)

    def test_what_the_program_is_told_of_clusters_does_not_reach_the_new_one(
        self, starts, monkeypatch
    ):
        monkeypatch.setenv("RAY_ADDRESS", "local")
        monkeypatch.setenv("RAYRPC_INTERNAL_SHIM", "1")
        monkeypatch.setenv("RAY_worker_niceness", "7")
        local_lease.join_local(NOW, starts=True)
        assert "RAY_ADDRESS" not in starts.environ
        assert "RAYRPC_INTERNAL_SHIM" not in starts.environ
        assert starts.environ["RAY_AUTH_MODE"] == "token"
        assert starts.environ["RAY_worker_niceness"] == "7"  # the user's own setting

    def test_its_log_is_the_users_alone(self, starts, folder):
        before = os.umask(0)
        try:
            local_lease.join_local(NOW, starts=True)
        finally:
            os.umask(before)
        assert starts.log.parent == folder
        assert stat.S_IMODE(starts.log.stat().st_mode) == 0o600

    def test_it_takes_a_lease_of_one_that_runs(self, starts, run):
        cluster = run(local_lease.local_file(NOW, ".sock"), "ready 9.9.9.9:1")
        assert local_lease.join_local(NOW, starts=True) == "9.9.9.9:1"
        assert not starts.commands and len(cluster.leases) == 1

    def test_it_replaces_one_that_was_killed(self, starts, run):
        path = local_lease.local_file(NOW, ".sock")
        run(path).close()
        assert path.exists()
        assert local_lease.join_local(NOW, starts=True) == "1.2.3.4:5"
        assert len(starts.commands) == 1

    def test_an_error_of_the_start_is_told_and_ends_the_lease(self, starts):
        starts.answer = "failed RuntimeError: no memory"
        with pytest.raises(
            ClusterError,
            match=r"^no local Ray cluster could be started: failed RuntimeError: no memory$",
        ) as caught:
            local_lease.join_local(NOW, starts=True)
        # though the error refers to the frames that it has passed
        assert caught.tb is not None and eventually(lambda: not starts.cluster.leases)

    def test_where_the_process_ends_its_log_is_named(self, starts):
        starts.answer = None
        with pytest.raises(ClusterError, match=r"could be started: see .*cluster-\w+\.log$"):
            local_lease.join_local(NOW, starts=True)

    def test_where_the_process_does_not_listen_its_log_is_named(self, starts, monkeypatch):
        monkeypatch.setattr(local_lease, "START_SECONDS", 0.05)
        starts.listens = False
        with pytest.raises(ClusterError, match=r"could be started in 0\.05 s; see .*\.log$"):
            local_lease.join_local(NOW, starts=True)

    def test_a_cluster_that_does_not_answer_in_time_is_an_error(self, run, monkeypatch):
        monkeypatch.setattr(local_lease, "START_SECONDS", 0.05)
        path = local_lease.local_file(NOW, ".sock")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
            silent.bind(str(path))
            silent.listen(1)
            with pytest.raises(ClusterError, match=r"could be started: see .*\.log$"):
                local_lease.join_local(NOW, starts=True)


class TestJoinWithoutAStart:
    def test_the_error_says_how_to_name_a_cluster(self, starts, folder):
        with pytest.raises(ClusterError, match="name one by --address, RAY_ADDRESS or the config"):
            local_lease.join_local(NOW, starts=False)
        assert not starts.commands

    def test_ones_own_cluster_comes_first_then_the_youngest(self, run):
        own = local_lease.local_file(NOW, ".sock")
        paths = [own.with_name(f"cluster-{name}.sock") for name in ("old", "new", "gone")]
        for number, path in enumerate(paths):
            run(path, f"ready {path.stem}")
            os.utime(path, (1000.0 + number,) * 2)
        run(own, "ready own").close()
        assert local_lease.join_local(NOW, starts=False) == "cluster-gone"
        end_lease()
        paths[2].unlink()
        assert local_lease.join_local(NOW, starts=False) == "cluster-new"
        end_lease()
        own.unlink()
        run(own, "ready own")
        os.utime(own, (1.0, 1.0))
        assert local_lease.join_local(NOW, starts=False) == "own"


class TestStartAhead:
    def test_its_lease_is_that_of_the_join_that_follows(self, starts):
        forks = local_lease.start_ahead(NOW)
        assert forks == local_lease.local_file(NOW, FORKS)
        assert local_lease.start_ahead(NOW) == forks
        path = starts.commands[0][3]
        assert local_lease.join_local(NOW, starts=True) == "1.2.3.4:5"
        assert len(starts.cluster.leases) == 1
        assert len(starts.commands) == 1 and local_lease.fork_server() == Path(path).with_suffix(
            FORKS
        )

    def test_another_namespace_does_not_use_it(self, starts):
        local_lease.start_ahead(NOW)
        local_lease.join_local(Settings(namespace="other"), starts=True)
        assert len({command[3] for command in starts.commands}) == 2

    @pytest.mark.parametrize("named", ["setting", "variable"])
    def test_none_is_started_where_a_cluster_is_named(self, starts, monkeypatch, named):
        settings = NOW
        if named == "setting":
            settings = NOW.replace(address="10.0.0.1:6379")
        else:
            monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
        assert local_lease.start_ahead(settings) is None and not starts.commands

    def test_where_none_can_be_started_the_join_says_so(self, starts, monkeypatch):
        monkeypatch.setattr(local_lease, "START_SECONDS", 0.05)
        starts.listens = False
        assert local_lease.start_ahead(NOW) is None


class TestKeep:
    def test_a_cluster_is_kept_and_released_without_a_lease(self, starts, run):
        path = local_lease.local_file(NOW, ".sock")
        cluster = run(path)
        assert local_lease.keep(NOW, 0.5) == (True, path.with_suffix(FORKS))
        assert local_lease.keep(NOW, 0.5) == (False, path.with_suffix(FORKS))
        assert local_lease.keep(NOW, 0.0)[0]
        assert local_lease.release(NOW) and not local_lease.release(NOW)
        assert list(dict.fromkeys(cluster.told)) == [b"keep 0.5\n", b"keep 0\n", b"release\n"]
        assert eventually(lambda: not cluster.leases) and not starts.commands

    def test_one_that_does_not_run_is_started_to_be_kept_only(self, starts):
        assert not local_lease.release(NOW) and not starts.commands
        assert local_lease.keep(NOW, 3.0)[0] and len(starts.commands) == 1

    def test_one_that_does_not_answer_is_named(self, run, monkeypatch):
        cluster = run(local_lease.local_file(NOW, ".sock"))
        cluster.is_deaf = True
        # above the time of the first answer on a busy machine
        monkeypatch.setattr(local_lease, "START_SECONDS", 2.0)
        for ask in (local_lease.release, lambda settings: local_lease.keep(settings, 1.0)):
            with pytest.raises(ClusterError, match=r"has not answered for 2 s; see .*\.log"):
                ask(NOW)

    def test_one_that_ends_meanwhile_is_not_kept(self, run):
        cluster = run(local_lease.local_file(NOW, ".sock"))
        cluster.ends_when_told = True
        assert not local_lease.release(NOW)
        with pytest.raises(ClusterError, match=r"ended while it was told to stay; try again"):
            local_lease.keep(NOW, 1.0)

    def test_one_that_could_not_start_is_not_released(self, run):
        run(local_lease.local_file(NOW, ".sock"), "failed RuntimeError: x")
        assert not local_lease.release(NOW)

    def test_threads_that_need_it_at_once_start_one(self, starts):
        threads = [
            threading.Thread(target=local_lease.keep, args=(NOW, seconds)) for seconds in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_SECONDS)
        assert len(starts.commands) == 1


class TestOthers:
    def test_those_that_run_are_named_but_for_ones_own(self, run, folder, monkeypatch):
        for name, answer in (
            ("b", "ready 2.2.2.2:2"),
            ("a", "ready 1.1.1.1:1"),
            ("c", "failed RuntimeError: x"),
            ("d", None),
        ):
            run(folder / f"cluster-{name}.sock", answer)
        run(folder / "cluster-e.sock").close()
        monkeypatch.setattr(ray, "is_initialized", lambda: False)
        assert local_lease.other_local_clusters() == ["1.1.1.1:1", "2.2.2.2:2"]
        monkeypatch.setattr(ray, "is_initialized", lambda: True)
        monkeypatch.setattr(ray, "get_runtime_context", context_of("1.1.1.1:1"))
        assert local_lease.other_local_clusters() == ["2.2.2.2:2"]

    def test_a_worker_that_outlives_its_program_holds_its_own_cluster(
        self, run, folder, monkeypatch
    ):
        clusters = {name: run(folder / f"cluster-{name}.sock", f"ready {name}") for name in "abc"}
        monkeypatch.setattr(ray, "get_runtime_context", context_of("b"))
        local_lease.hold_local_cluster()
        assert eventually(lambda: [len(each.leases) for each in clusters.values()] == [0, 1, 0])

    def test_on_a_cluster_of_others_it_holds_none(self, run, folder, monkeypatch):
        cluster = run(folder / "cluster-a.sock", "ready a")
        monkeypatch.setattr(ray, "get_runtime_context", context_of("elsewhere"))
        local_lease.hold_local_cluster()
        assert eventually(lambda: not cluster.leases)


def end_lease():
    """End the lease of this process."""
    lease: Any = local_lease._lease
    lease.close()


def context_of(address):
    """Return what tells the address of the cluster that this process is connected to."""

    class Context:
        gcs_address = address

    return Context


class TestFiles:
    def test_each_namespace_and_python_has_a_cluster_of_its_own(self, folder, monkeypatch):
        names = {local_lease.local_file(NOW, ".sock").name}
        names.add(local_lease.local_file(Settings(namespace="other"), ".sock").name)
        monkeypatch.setattr("sys.prefix", "/another/environment")
        names.add(local_lease.local_file(NOW, ".sock").name)
        assert len(names) == 3 and all(name.endswith(".sock") for name in names)

    def test_local_means_one_for_this_program_and_its_children(self, folder, monkeypatch):
        local = NOW.replace(address="local")
        path = local_lease.local_file(local, ".sock")
        assert path != local_lease.local_file(NOW, ".sock") and str(os.getpid()) in path.name
        assert os.environ["RAYRPC_INTERNAL_LOCAL"] == str(os.getpid())
        monkeypatch.setattr(os, "getpid", lambda: 1)  # a child, which has the environment
        assert local_lease.local_file(local, ".sock") == path

    def test_a_worker_knows_the_fork_server_by_its_environment(self, folder, monkeypatch):
        assert local_lease.fork_server() is None
        monkeypatch.setenv(SERVER, "/there/a.forks")
        assert local_lease.fork_server() == Path("/there/a.forks")

    def test_a_lock_is_held_by_one_at_a_time_and_ends_with_an_error(self, tmp_path, quick_switches):
        inside, overlaps = [], []

        def enter():
            for _ in range(50):
                with local_lease.locked(tmp_path / "lock"):
                    inside.append(1)
                    overlaps.append(len(inside) > 1)
                    time.sleep(0)
                    inside.pop()

        threads = [threading.Thread(target=enter) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_SECONDS)
        assert len(overlaps) == 200 and not any(overlaps)
        with pytest.raises(RuntimeError), local_lease.locked(tmp_path / "lock"):
            raise RuntimeError
        with local_lease.locked(tmp_path / "lock"):
            pass
