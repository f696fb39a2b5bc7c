"""The fork server and the program that asks it, with a program in the place of Ray's worker."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
from conftest import eventually

from rayrpc._transports.ray import fork_server, start_worker, worker_forks

pytestmark = pytest.mark.process

SECONDS = 60.0
# What a worker here does: it tells about itself, by its stdout, and waits for the end of its stdin.
WORKER = """
import json, multiprocessing, os, random, resource, signal, sys
print(json.dumps({
    "argv": sys.argv, "orig_argv": sys.orig_argv[1:], "path": sys.path[0], "cwd": os.getcwd(),
    "environ": dict(os.environ), "pid": os.getpid(), "parent": os.getppid(),
    "group": os.getpgrp(), "nice": os.nice(0), "main": __name__,
    "oom": open("/proc/self/oom_score_adj").read().strip(),
    "files": resource.getrlimit(resource.RLIMIT_NOFILE),
    "ignored": signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN,
    "interrupted": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
    "children": signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL,
    "blocked": [int(each) for each in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
    "drawn": [random.random(), multiprocessing.current_process().authkey.hex()],
    "heavy": getattr(sys.modules.get("heavy"), "AT_LOAD", None), "slow": "slow" in sys.modules,
    "descriptors": sorted(int(each) for each in os.listdir("/proc/self/fd"))[:-1],
}), flush=True)
sys.stdin.read()
sys.exit(3)
"""
CLUSTER, JOB = "127.0.0.1:1234", "01000000"
PLAIN = "print('plain'); import sys; sys.stdin.read()"


@pytest.fixture
def folder(tmp_path):
    """A folder with a package that has the two programs of Ray, and with modules to load."""
    workers = tmp_path / "ray" / "_private" / "workers"
    workers.mkdir(parents=True)
    (tmp_path / "ray" / "__init__.py").write_text("raise ImportError('Ray is loaded')")
    (workers / "default_worker.py").write_text(WORKER)
    (workers / "setup_worker.py").write_text(PLAIN)
    (tmp_path / "heavy.py").write_text("import os; AT_LOAD = os.environ.get('HEAVY_SIZE', '-')")
    (tmp_path / "slow.py").write_text("")
    (tmp_path / "broken.py").write_text("raise ImportError('broken')")
    return tmp_path


@pytest.fixture
def server(folder, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setenv("HEAVY_SIZE", "9")
    monkeypatch.setattr(worker_forks, "LIGHT", ("multiprocessing",))
    with worker_forks._serve(folder / "forks") as server:
        yield server


class Worker:
    """A worker that was asked for."""

    def __init__(self, folder, *arguments, program="", context=(), **options):
        code = ["-c", f"{program}; start_worker.main(__import__('sys').argv[1:])"]
        if program:
            code[1] = f"import start_worker; {code[1]}"
            options["env"] = {**os.environ, "PYTHONPATH": os.path.dirname(start_worker.__file__)}
            options["env"]["PYTHONPATH"] += os.pathsep + str(folder)
        environ = options.pop("env", dict(os.environ))
        environ |= {start_worker.SERVER: str(folder / "forks"), "RAY_JOB_ID": JOB}
        script = folder / "ray" / "_private" / "workers" / "default_worker.py"
        self.process = subprocess.Popen(
            [
                sys.executable,
                *(code if program else [start_worker.__file__]),
                str(script),
                f"--gcs-address={CLUSTER}",
                *arguments,
                f"--serialized-runtime-env-context={json.dumps(dict(context))}",
                *(() if "--language=JAVA" in arguments else ("--language=PYTHON",)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environ,
            **options,
        )

    def tells(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return line.strip() if line.startswith("plain") else json.loads(line)

    def close(self):
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(SECONDS)


@pytest.fixture
def ask(folder, server):
    workers = []

    def ask(*arguments, **options):
        workers.append(Worker(folder, *arguments, **options))
        return workers[-1]

    yield ask
    for worker in workers:
        worker.close()


def ends(pid):
    def has_ended():
        try:
            with open(f"/proc/{pid}/stat") as file:
                return file.read().rpartition(")")[2].split()[0] == "Z"
        except (FileNotFoundError, ProcessLookupError):
            return True

    return eventually(has_ended, SECONDS)


def need(modules=("heavy",), later=(), files=None, version="1", size="5"):
    return worker_forks.Load(modules, later, files or {}, version, {"HEAVY_SIZE": size}, ["HEAVY_"])


@pytest.fixture
def loaded(folder):
    """Have the workers of a job find something loaded, within a block."""

    def loaded(what=None, job=JOB, cluster=CLUSTER):
        return worker_forks.loaded(folder / "forks", what or need(), cluster, job)

    return loaded


def test_a_worker_is_forked_and_is_as_the_raylet_starts_it(ask, server, tmp_path):
    def prepare():
        os.setpgid(0, 0)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("900")
        import resource

        resource.setrlimit(resource.RLIMIT_NOFILE, (200, 300))
        os.nice(3)

    context = {"env_vars": {"GIVEN": "1"}, "command_prefix": [], "py_executable": sys.executable}
    worker = ask("--flag=1", context=context, preexec_fn=prepare, cwd=str(tmp_path))
    told = worker.tells()
    assert worker.process.wait(SECONDS) == 0  # the one that has asked
    assert told["parent"] == server.pid and told["pid"] != worker.process.pid
    script = str(tmp_path / "ray" / "_private" / "workers" / "default_worker.py")
    assert told["argv"] == told["orig_argv"] == [script, f"--gcs-address={CLUSTER}", "--flag=1"]
    assert told["path"] == os.path.dirname(script) and told["cwd"] == str(tmp_path)
    given = {start_worker.SERVER: str(tmp_path / "forks"), "RAY_JOB_ID": JOB, "GIVEN": "1"}
    assert told["environ"] == {**os.environ, **given}
    assert told["main"] == "__main__" and told["group"] == told["pid"]
    assert told["oom"] == "900" and told["files"] == [200, 300]
    assert told["nice"] == min(os.nice(0) + 3, 19)
    assert told["ignored"] and told["interrupted"] and told["children"]
    assert told["blocked"] == [signal.SIGUSR2]
    assert told["descriptors"] == [0, 1, 2]
    os.kill(told["pid"], 0)
    worker.process.stdin.close()
    assert ends(told["pid"])


def test_what_is_ignored_is_and_a_group_of_others_stays(ask):
    told = ask(preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)).tells()
    assert not told["interrupted"] and not told["ignored"]
    assert told["group"] != told["pid"]


@pytest.mark.parametrize(
    "context",
    [
        {"command_prefix": ["nice"]},
        {"py_executable": "/another/python"},
        {"override_worker_entrypoint": "/another/worker.py"},
        {"env_vars": {"LD_PRELOAD": ""}},
        {"env_vars": {"PYTHONHASHSEED": "0"}},
    ],
    ids=str,
)
def test_what_needs_an_interpreter_of_its_own_is_left_to_ray(ask, context):
    worker = ask(context=context)
    assert worker.tells() == "plain"
    assert worker.process.poll() is None  # in place of the one that would have asked


@pytest.mark.parametrize("argument", ["--worker-type=SPILL_WORKER", "--language=JAVA"])
def test_other_programs_are_left_to_ray(ask, argument):
    assert ask(argument).tells() == "plain"
    assert isinstance(ask("--worker-type=WORKER").tells(), dict)


def test_without_a_fork_server_workers_are_left_to_ray(ask, server, folder):
    server.kill()
    assert ask().tells() == "plain"
    (folder / "forks").unlink()
    assert ask().tells() == "plain"


def test_a_worker_that_nobody_waits_for_any_more_does_not_run(ask, server):
    os.kill(server.pid, signal.SIGSTOP)
    try:
        worker = ask(program="start_worker.CONFIRM_SECONDS = 0.2")
        assert worker.tells() == "plain"
    finally:
        os.kill(server.pid, signal.SIGCONT)
    told = ask().tells()
    time.sleep(0.5)  # the late one, forked before, has had its time
    worker.process.stdin.close()
    assert worker.process.stdout.read() == ""
    assert told["parent"] == server.pid


def test_requests_of_another_kind_do_no_harm(ask, server, folder):
    import socket

    for message in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 8):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(folder / "forks"))
            connection.sendall(message)
    assert ask().tells()["parent"] == server.pid


def test_workers_draw_different_numbers(ask):
    first, second = ask().tells()["drawn"], ask().tells()["drawn"]
    assert first[0] != second[0] and first[1] != second[1]
    assert first[0] != random.random()


def test_workers_of_a_job_have_loaded_what_it_needs_as_if_by_themselves(ask, server, loaded):
    with loaded():
        first, second = (ask().tells() for _ in range(2))
        with loaded(need(size="7"), job="02000000"), loaded(need(size="8"), cluster="another:1"):
            third = ask().tells()
    assert first["heavy"] == second["heavy"] == third["heavy"] == "5"
    assert first["parent"] == second["parent"] == third["parent"] != server.pid
    assert first["environ"]["HEAVY_SIZE"] == "9"  # which the worker itself then sets
    assert first["descriptors"] == [0, 1, 2]
    fourth = ask().tells()  # of a program of theirs
    assert fourth["heavy"] is None and fourth["parent"] == server.pid


def test_another_need_has_a_loader_of_its_own(ask, loaded):
    told = []
    for version, size in [("1", "5"), ("1", "6"), ("2", "5"), ("1", "5")]:
        with loaded(need(version=version, size=size)):
            told.append(ask().tells())
    assert [each["heavy"] for each in told] == ["5", "6", "5", "5"]
    loaders = [each["parent"] for each in told]
    assert len(set(loaders)) == 3 and loaders[0] == loaders[3]


def test_the_loader_that_was_not_used_longest_ends(ask, loaded):
    def loader(size):
        with loaded(need(size=str(size))):
            return ask().tells()["parent"]

    loaders = [loader(size) for size in range(fork_server.MAX_LOADERS + 1)]
    assert ends(loaders[0])
    assert loader(1) == loaders[1]


@pytest.mark.parametrize(
    "asked", [{"modules": ("broken",)}, {"files": {"heavy": "/another/heavy.py"}}], ids=str
)
def test_a_worker_does_without_what_cannot_be_loaded(ask, server, loaded, asked):
    with loaded(need(**asked)):
        assert ask().tells() == "plain"  # it was told too late
        told = ask().tells()
    assert told["heavy"] is None and told["parent"] == server.pid


def test_a_loader_that_is_killed_is_not_asked_again(ask, server, loaded):
    with loaded():
        loader = ask().tells()["parent"]
        os.kill(loader, signal.SIGKILL)
        assert ends(loader)
        told = ask().tells()
    assert told == "plain" or told["parent"] == server.pid


def test_an_idle_loader_loads_what_may_be_of_use(ask, loaded):
    with loaded(need(later=("broken", "slow"))):
        first = ask().tells()
        assert not first["slow"]

        def is_loaded():
            told = ask().tells()
            time.sleep(2 * fork_server.IDLE_SECONDS)
            return told["slow"] and told["parent"] == first["parent"]

        assert eventually(is_loaded, SECONDS)


def test_modules_are_loaded_before_there_is_a_worker(ask, folder, loaded):
    path = folder / "forks"
    assert not worker_forks.load(path, need())  # which waits for nothing
    assert worker_forks.load(path, need(), SECONDS)
    assert not worker_forks.load(path, need(modules=("broken",)), SECONDS)
    assert not worker_forks.load(folder / "no", need(), SECONDS)
    with loaded():
        assert ask().tells()["heavy"] == "5"


def test_all_but_the_workers_end_with_their_starter(server, ask, loaded):
    with loaded():
        worker = ask()
        told = worker.tells()
    server.stdin.close()
    assert server.wait(SECONDS) == 0
    assert ends(told["parent"])
    os.kill(told["pid"], 0)
    worker.process.stdin.close()
    assert ends(told["pid"])
