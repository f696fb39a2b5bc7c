"""One Ray cluster for the session and workers on it; markers by what a test uses; leak checks.

A test is ``ray`` if it uses the session's cluster, ``process`` if it starts processes of its own,
and else ``unit``. It may be both of the first two. An explicit marker has precedence.
"""

import contextlib
import functools
import gc
import logging
import multiprocessing.context
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import leaks
import pytest
from gating import post_mortem
from nodes import wait_for_nodes

from rayrpc._transports.ray.node_start import adapt_start
from rayrpc._transports.ray.worker_forks import forked_workers

ROOT = Path(__file__).resolve().parents[1]
# Only a failure reaches these bounds; pytest's own is above them.
TIMEOUT = 120.0
EVENTUALLY_SECONDS = 60.0

# Python processes of the tests find this on their path: it lets them write their stacks.
SITE = str(ROOT / "tests" / "every_process")

# Set before anything imports Ray. This session's cluster is open, and shared with nobody else.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",  # others may use the memory of this machine
    "RAY_prestart_worker_first_driver": "0",  # as local clusters have it
    "RAY_worker_maximum_startup_concurrency": "2",
    # at Ray's own 15 its workers starve beside any other process of the machine
    "RAY_worker_niceness": "0",
    "RAY_worker_register_timeout_seconds": "180",
}
CLUSTER_CPUS = 4

# All tests run, the slow ones too, with new random seeds, and nothing may be left at the end.
RUNS_ALL = os.environ.get("TESTS_ALL") == "1"

# Coverage is measured: processes import and trace more, and workers are not forked.
IS_MEASURED = "COVERAGE_PROCESS_CONFIG" in os.environ

KINDS = ("unit", "ray", "process")
PROCESS_MODULES = ("subprocess", "multiprocessing", "torch.multiprocessing")
PROCESS_STARTERS: dict[str, tuple[Any, str]] = {
    "subprocess.Popen": (subprocess.Popen, "__init__"),
    "os.fork": (os, "fork"),
    "os.posix_spawn": (os, "posix_spawn"),
}


def pytest_configure() -> None:
    # a shell's background jobs ignore Ctrl-C, and so would every process that a test starts
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for what, (owner, name) in PROCESS_STARTERS.items():
        setattr(owner, name, _noted(what, getattr(owner, name)))
    os.environ.pop("RAY_ADDRESS", None)
    os.environ.update(ENVIRONMENT)
    os.environ["PYTHONPATH"] = python_path(*filter(None, [os.environ.get("PYTHONPATH")]))
    if post_mortem.FOLDER not in os.environ:  # else it is the supervisor's, which removes it
        _own_folder.append(Path(tempfile.mkdtemp(prefix="rr-", dir="/tmp")))
        (_own_folder[0] / "stacks").mkdir()
        os.environ[post_mortem.FOLDER] = str(_own_folder[0])
    os.environ["RAY_TMPDIR"] = os.environ[post_mortem.FOLDER]
    runpy.run_path(f"{SITE}/sitecustomize.py")  # for this process, which has started without
    _set_up_hypothesis()


_own_folder: list[Path] = []


def pytest_unconfigure() -> None:
    for folder in _own_folder:
        shutil.rmtree(folder, ignore_errors=True)


def python_path(*folders: str | Path) -> str:
    """Return the PYTHONPATH of a process of the tests that imports from these folders, too."""
    return os.pathsep.join([SITE, *map(str, folders)])


def _set_up_hypothesis() -> None:
    """The gate gives the same answer twice; `make test-all` looks for new examples."""
    from hypothesis import settings

    if RUNS_ALL:
        settings.register_profile("rayrpc", deadline=None, print_blob=True)
    else:
        settings.register_profile("rayrpc", deadline=None, derandomize=True, database=None)
    settings.load_profile("rayrpc")


def pytest_collection_finish() -> None:
    # tests compute little: more threads would only wait for one another on a busy machine
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


# -- markers ------------------------------------------------------------------------------------


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if any(item.get_closest_marker(kind) for kind in KINDS):
            continue
        for kind in sorted(_kinds(item)) or ["unit"]:
            item.add_marker(kind)
    # files whose tests take longest first, so that no process of tests waits long for another
    slowest: dict[Path, int] = {}
    for item in items:
        slowest[item.path] = max(slowest.get(item.path, 0), _expense(item))
    items.sort(key=lambda item: -slowest[item.path])


def _expense(item: pytest.Item) -> int:
    """Return a rank of what a test costs, by its markers."""
    ranks = [
        rank
        for rank, marker in enumerate((*KINDS, "compliance"))
        if item.get_closest_marker(marker) is not None
    ]
    return max(ranks)


def _kinds(item: pytest.Item) -> set[str]:
    """Return what a test needs, by its fixtures and the names that its code uses."""
    assert isinstance(item, pytest.Function)
    kinds: set[str] = set()
    seen: set[Any] = set()
    for definitions in item._fixtureinfo.name2fixturedefs.values():
        function = definitions[-1].func
        if function in (_ray_cluster, _start):
            kinds.add("ray" if function is _ray_cluster else "process")
        elif function.__module__ != __name__:
            kinds |= _kinds_of_code(function, seen)
    kinds |= _kinds_of_code(item.function, seen)
    # a fixture over all transports asks for the cluster by name, except for the one in memory
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return kinds - {"ray"} if "memory" in parameters else kinds


def _kinds_of_code(function: Any, seen: set[Any]) -> set[str]:
    """Return what a function needs, and those of its module that it calls."""
    function = getattr(function, "__func__", function)
    if not isinstance(function, types.FunctionType) or function in seen:
        return set()
    seen.add(function)
    kinds: set[str] = {"ray"} if "ray_cluster" in function.__code__.co_consts else set()
    for name in _names(function.__code__):
        used = function.__globals__.get(name)
        if (
            used is Run
            or isinstance(used, multiprocessing.context.BaseContext)
            or getattr(used, "__name__", "") in PROCESS_MODULES
        ):
            kinds.add("process")
        elif isinstance(used, types.FunctionType) and used.__module__ == function.__module__:
            kinds |= _kinds_of_code(used, seen)
        elif isinstance(used, type) and used.__module__ == function.__module__:
            for method in vars(used).values():
                kinds |= _kinds_of_code(method, seen)
    return kinds


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


# -- what tests must not do ---------------------------------------------------------------------

_failed = pytest.StashKey[bool]()
_begun = pytest.StashKey[float]()  # seconds since the epoch
_started: list[str] = []  # processes, since the test began


def _noted(what: str, start: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that notes that it starts a process.

    An audit hook would note it, too, but runs inside of ``sys.settrace`` as well; when threads are
    switched there, Python 3.11 refuses to trace another one, which ends.
    """

    @functools.wraps(start)
    def noted(*args: Any, **kwargs: Any) -> Any:
        _started.append(what)
        return start(*args, **kwargs)

    return noted


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    report = yield
    if report.failed:
        item.stash[_failed] = True
        if item.get_closest_marker("unit") is None:
            folder = Path(os.environ[post_mortem.FOLDER])
            text = post_mortem.describe(folder, item.stash.get(_begun, 0.0))
            report.sections.append(("processes", text))
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[_begun] = time.time()


def _check_leaks(before: leaks.Snapshot, where: str) -> None:
    if found := leaks.left_over(before):
        pytest.fail(f"{where} left behind:\n  " + "\n  ".join(found), pytrace=False)


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves something behind, or that is a ``unit`` test and starts something."""
    is_unit = request.node.get_closest_marker("unit") is not None
    if request.node.get_closest_marker("ray") is not None:
        request.getfixturevalue("ray_cluster")  # else the first test to ask would leave it behind
    had_ray = leaks.ray_is_on()
    _started.clear()
    before = leaks.snapshot()
    yield
    if request.node.stash.get(_failed, False):
        return  # its error may well hold what is left
    if is_unit and (_started or leaks.ray_is_on() > had_ray):
        what = ", ".join(_started) or "Ray"
        pytest.fail(f"a unit test started {what}: give it the marker it needs", pytrace=False)
    if is_unit:  # what tests with Ray leave is checked once, when its cluster ends
        _check_leaks(before, "the test")


@pytest.fixture(scope="module", autouse=True)
def no_leaks_of_a_module(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a module whose fixtures leave something behind."""
    failed = request.session.testsfailed
    _module_before[:] = [leaks.snapshot()]
    yield
    gc.collect()  # what it warns about is this module's
    if request.session.testsfailed == failed and not leaks.ray_is_on():
        _check_leaks(_module_before[0], "the module's fixtures")


_module_before: list[leaks.Snapshot] = []  # of the present module


# -- fixtures -----------------------------------------------------------------------------------


def _ray_cluster(request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of the session's Ray cluster, which this process is connected to."""
    import ray

    wait_for_nodes()
    adapt_start()
    with forked_workers(Path(os.environ["RAY_TMPDIR"]) / "session.forks"):
        ray.init(
            num_cpus=CLUSTER_CPUS,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
        address = ray.get_runtime_context().gcs_address
        os.environ["RAY_ADDRESS"] = address
        before = leaks.snapshot()
        _module_before[:] = [before]  # a session's fixture, though a module may be first
        try:
            yield address
            gc.collect()
            if RUNS_ALL and not request.session.testsfailed:
                _check_leaks(before, "tests with Ray")
        finally:
            os.environ.pop("RAY_ADDRESS", None)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ResourceWarning)  # Ray ends processes without wait
                ray.shutdown()
                gc.collect()


ray_cluster = pytest.fixture(scope="session", name="ray_cluster")(_ray_cluster)


@pytest.fixture(scope="session")
def hosts_cluster() -> Iterator[Any]:
    """Three hosts and a cluster over them, for tests of ``tests/hosts`` that leave both whole."""
    from host_cluster import cluster_of_hosts  # there once a test of that folder is collected

    with cluster_of_hosts(peer_timeout=5.0) as made:
        _module_before[:] = [leaks.snapshot()]
        yield made


@pytest.fixture(scope="module")
def workers(ray_cluster: str) -> Iterator[list[str]]:
    """Two hosted workers; this process is "driver" in their group."""
    import rayrpc as rpc

    names = ["alice", "bob"]
    try:
        rpc.start_workers(names)
        yield names
    finally:
        if rpc._is_current_rpc_agent_set():
            rpc.shutdown()


@pytest.fixture
def installed() -> Iterator[None]:
    """Put rayrpc in torch's place in this process."""
    from rayrpc import compat

    compat.install()
    yield
    compat.uninstall()


@pytest.fixture
def start_in_memory(installed: None) -> Iterator[Callable[..., Any]]:
    """Start workers of one group, in memory; see ``memory_group``."""
    from memory_workers import memory_group

    from rayrpc._runtime import current

    before = current.get_agent() if current.is_set() else None
    with memory_group() as start:
        yield start
        current.set_agent(before)


@pytest.fixture
def worker_a(start_in_memory: Callable[..., Any]) -> Any:
    """A worker in memory, which is that of this process."""
    from rayrpc._runtime import current

    made = start_in_memory("a")
    current.set_agent(made.agent)
    return made


@pytest.fixture
def worker_b(worker_a: Any, start_in_memory: Callable[..., Any]) -> Any:
    return start_in_memory("b")


@pytest.fixture
def callee() -> Iterator[Any]:
    """A callee in this process, to whose server tests connect; see ``direct_ends``."""
    from direct_ends import Callee

    callee = Callee()
    yield callee
    callee.close()


@pytest.fixture
def unstartable(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Beginnings of the names of threads that the system does not start; none yet."""
    beginnings: set[str] = set()
    start = threading.Thread.start

    def start_or_fail(thread: threading.Thread) -> None:
        if thread.name.startswith(tuple(beginnings)):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_or_fail)
    return beginnings


@pytest.fixture
def quick_switches() -> Iterator[None]:
    """Have threads take turns as often as they can."""
    before = sys.getswitchinterval()
    # where threads are traced, Python 3.11 fails to start one while it starts another
    sys.setswitchinterval(1e-6 if threading.gettrace() is None else before)
    yield
    sys.setswitchinterval(before)


@pytest.fixture
def leaves():
    """Two small matrices that require grad."""
    import torch

    torch.manual_seed(1)
    return torch.rand(3, 3, requires_grad=True), torch.rand(3, 3, requires_grad=True)


class Run:
    """A process under test: its output so far, and its end."""

    def __init__(self, command: list[str], environ: dict[str, str], cwd: Path) -> None:
        self.process = subprocess.Popen(
            command,
            env=environ,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.append(line)

    @property
    def output(self) -> str:
        return "".join(self._lines)

    def wait_for(self, text: str, timeout: float = TIMEOUT) -> str:
        """Return the first line with ``text``, as soon as it was printed."""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            for line in list(self._lines):
                if text in line:
                    return line.strip()
            if self.process.poll() is not None and not self._reader.is_alive():
                break
            time.sleep(0.02)
        pytest.fail(f"{text!r} was not printed; the output is:\n{self.output}")

    def end(self, timeout: float = TIMEOUT) -> int:
        """Return the exit status."""
        try:
            status = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGABRT)  # Python then writes what its threads do
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(5)
            self.process.kill()
            self._reader.join(5)
            pytest.fail(f"no end after {timeout} s; the output is:\n{self.output}")
        self._reader.join(5)
        return status

    def close(self) -> None:
        """Kill the process if it still runs, and close its output."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait(10)
        if self.process.stdout is not None:
            self._reader.join(5)
            self.process.stdout.close()


def _start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Start ``python ARGS`` in a folder of the test's own."""
    runs: list[Run] = []

    def start_one(*arguments: str, **environ: str | None) -> Run:
        full = {**os.environ, "PYTHONPATH": python_path(ROOT), "PYTHONUNBUFFERED": "1"}
        full["PYTHONFAULTHANDLER"] = "1"
        for name, value in environ.items():
            full.pop(name, None)
            if value is not None:
                full[name] = value
        runs.append(Run([sys.executable, *arguments], full, tmp_path))
        return runs[-1]

    try:
        yield start_one
    finally:
        for run in runs:
            run.close()


start = pytest.fixture(name="start")(_start)


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    """Write a script into the test's folder; return its path."""

    def write(text: str, name: str = "script.py") -> str:
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


def in_thread(function: Callable[..., Any], *args: Any) -> Callable[[float], Any]:
    """Run a function in a thread, and return what waits for its result, or its error.

    Args:
        function, args: what to run.

    Returns:
        Takes a timeout in seconds, and returns the result, or the Exception that was raised.
    """
    outcomes: list[Any] = []

    def run() -> None:
        try:
            outcomes.append(function(*args))
        except Exception as exc:
            outcomes.append(exc)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def outcome(timeout: float) -> Any:
        thread.join(timeout)
        return outcomes[0]

    return outcome


def run_in_threads(
    run: Callable[..., object], ways: Iterable[tuple[Any, ...]], timeout: float
) -> None:
    """Call a function in a thread for each tuple of arguments; fail if one raises, or goes on.

    Args:
        run, ways: the function, and its arguments by thread.
        timeout: for each thread to end, in seconds.
    """
    failed: list[BaseException] = []

    def guarded(*args: Any) -> None:
        try:
            run(*args)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=guarded, args=way, daemon=True) for way in ways]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout)
    assert not failed and not any(thread.is_alive() for thread in threads)


def keeps_variables(fail: Callable[[], object]) -> bool:
    """Return whether the error of ``fail`` keeps its caller's variables alive once it is caught."""

    class Variable:
        pass

    def call() -> None:
        variable = Variable()
        seen.append(weakref.ref(variable))
        fail()

    seen: list[weakref.ref[Variable]] = []
    text = ""
    try:
        call()
    except Exception as exc:
        text = str(exc)
    assert text, "it has not failed"

    def is_gone() -> bool:
        gc.collect()
        return seen[0]() is None

    return not eventually(is_gone, 5.0)  # a thread may be about to drop the error


def eventually(check: Callable[[], object], timeout: float = EVENTUALLY_SECONDS) -> bool:
    """Return whether ``check`` becomes true within ``timeout`` seconds."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        if check():
            return True
        time.sleep(0.05)
    return bool(check())
