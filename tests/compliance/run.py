#!/usr/bin/env python3
"""Run PyTorch's own RPC compliance suites against rayrpc, or against TensorPipe for reference.

The torch wheel holds the suites with which PyTorch checks any RPC agent
(``torch.testing._internal.distributed.rpc_utils``). Here they run unchanged, after
``rayrpc.install()`` or, with ``--backend tensorpipe``, on torch as it is.

    run.py                                   every test of the suites
    run.py -k RpcTest.test_add -k shutdown   those whose names hold one of the texts
    run.py --tests sample.txt                those that a file lists (also looked for beside run.py)
    run.py --cuda                            those for GPUs, instead of all others

Every test gets fresh processes, one a rank, forked from this one, which has imported what they
need and started nothing. Without RAY_ADDRESS (or ``address``) rayrpc gets a local Ray cluster
for the run. A test listed in the file of expected failures counts as ``xfail``, or, should it
pass, as ``xpass``, which fails the run.

Exit status: 0 when nothing failed, 1 when something did, 2 when the command makes no sense.
Needs ``expecttest``, as the suites do.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import functools
import importlib
import json
import multiprocessing.connection
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Mapping
from unittest import mock

HERE = pathlib.Path(__file__).resolve().parent
BRIEF = 400  # lines about a failure that are shown without --verbose
SUITES = ["GENERIC_TESTS", "TENSORPIPE_TESTS"]  # lists of ``rpc_utils``

sys.path.insert(0, str(HERE))
from ranks import BAD, ForkedTest, Result, hide_devices  # noqa: E402


@functools.cache
def load_suites(backend: str) -> Mapping[str, type[unittest.TestCase]]:
    """Import the suites and mix each with the fixture that torch's own TensorPipe tests use.

    Args:
        backend: ``rayrpc`` puts rayrpc in the place of torch's RPC first, for this whole process.
    """
    if backend == "rayrpc":
        importlib.import_module("rayrpc").install()
    from torch.testing._internal.distributed import rpc_utils
    from torch.testing._internal.distributed.rpc import tensorpipe_rpc_agent_test_fixture as fixture

    bases = (fixture.TensorPipeRpcAgentTestFixture, rpc_utils.MultiProcessTestCase)
    suites = {
        suite.__name__: type(suite.__name__, (suite, *bases), {"__module__": __name__})
        for suites in SUITES
        for suite in getattr(rpc_utils, suites)
    }
    globals().update(suites)  # where a pickled reference to one is looked up
    return suites


def all_names(backend: str) -> list[str]:
    """Name every test of the suites, as ``Suite.test_name``."""
    tests_of = unittest.TestLoader().getTestCaseNames
    suites = load_suites(backend).items()
    return [f"{name}.{test}" for name, suite in suites for test in tests_of(suite)]


def run(
    names: Iterable[str],
    *,
    backend: str = "rayrpc",
    address: str | None = None,
    timeout: float = 60.0,
    jobs: int = 1,
    expected: Container[str] = (),
    stop_on_fail: bool = False,
    report: Callable[[Result], object] = lambda result: None,
) -> list[Result]:
    """Run tests, each in fresh forked processes; call it from a process without threads.

    Args:
        names: ``Suite.test_name`` of each test.
        backend: ``rayrpc`` or ``tensorpipe``.
        address: the Ray cluster; without it RAY_ADDRESS, or else a local one for this run.
        timeout: seconds that one test may take.
        jobs: how many tests run at a time.
        expected: names of tests that are known to fail.
        stop_on_fail: end the run with the first test that is not ok.
        report: called with each result as it comes.

    Raises:
        ValueError: a name is in none of the suites.
        RuntimeError: this process has threads, or the Ray cluster did not start.
    """
    names = list(dict.fromkeys(names))
    if unknown := sorted(set(names) - set(all_names(backend))):
        raise ValueError(f"not in the suites: {', '.join(unknown)}")
    results = []
    with _ray_cluster(address) if backend == "rayrpc" else contextlib.nullcontext():
        if backend == "rayrpc":
            # Once, for all ranks. The import starts no thread; nothing here may draw one of Ray's
            # random ids (as @ray.remote on a class does), or all ranks would draw the same ones.
            importlib.import_module("ray")
        _check_threads()
        with contextlib.closing(_results(names, backend, timeout, jobs)) as stream:
            for result in stream:
                if result.name in expected and result.verdict != "skip":
                    verdict = "xfail" if result.verdict in BAD else "xpass"
                    result = dataclasses.replace(result, verdict=verdict)
                report(result)
                results.append(result)
                if stop_on_fail and not result.ok:
                    break
    return results


def _results(names: list[str], backend: str, timeout: float, jobs: int) -> Generator[Result]:
    """Keep ``jobs`` tests going and yield each one's result; end them all when closed."""
    waiting, running = collections.deque(names), list[ForkedTest]()
    suites = load_suites(backend)
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                name = waiting.popleft()
                running.append(ForkedTest(name, suites[name.split(".")[0]], backend, timeout))
            left = min(test.deadline for test in running) - time.monotonic()
            pipes = [pipe for test in running for pipe in test.pipes.values()]
            ready = multiprocessing.connection.wait(pipes, max(left, 0))
            for test in list(running):
                test.receive(ready)
                if test.over:
                    running.remove(test)
                    yield test.finish()
    finally:
        for test in running:
            test.finish()


def _check_threads() -> None:
    """Refuse to fork beside other threads: a lock that one holds would stay locked in a child."""
    if others := [t.name for t in threading.enumerate() if t is not threading.current_thread()]:
        raise RuntimeError(f"cannot fork safely from a process with threads: {', '.join(others)}")
    tasks = pathlib.Path("/proc/self/task")
    if tasks.exists() and (native := len(list(tasks.iterdir())) - 1):
        print(f"note: the ranks are forked beside {native} native thread(s)", file=sys.stderr)


_CLUSTER = """
import os, shutil, sys
from nodes import wait_for_nodes
from ray.cluster_utils import Cluster
wait_for_nodes()
cluster = Cluster(True, head_node_args={"num_cpus": 16, "include_dashboard": False})
try:
    print("ADDRESS", cluster.address, flush=True)
    sys.stdin.read()
finally:
    cluster.shutdown()
    shutil.rmtree(os.environ["RAY_TMPDIR"], ignore_errors=True)
"""


@contextlib.contextmanager
def _ray_cluster(address: str | None) -> Iterator[None]:
    """Set the environment in which the ranks find their cluster; start one where there is none.

    It is started by a process of its own, for Ray's threads must not be in this one. That process
    ends it when its standard input closes, thus also when this process is killed.
    """
    if address or os.environ.get("RAY_ADDRESS"):
        with mock.patch.dict(os.environ, {"RAY_ADDRESS": address} if address else {}):
            yield
        return
    # A folder of its own: no other ray.init() on this machine then finds the cluster by chance.
    # In /tmp, for Ray's sockets lie in it and their paths must be short.
    with (
        tempfile.TemporaryDirectory("-rpc", dir="/tmp", ignore_cleanup_errors=True) as folder,
        mock.patch.dict(
            os.environ,
            {"RAY_AUTH_MODE": "disabled", "RAY_TMPDIR": folder, "RAY_worker_niceness": "0"},
        ),
        open(f"{folder}/cluster.log", "w+") as log,
    ):
        paths = [str(HERE.parents[1]), str(HERE.parent), os.environ.get("PYTHONPATH")]
        process = subprocess.Popen(
            [sys.executable, "-c", _CLUSTER],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,  # an interrupt from the keyboard is for this process alone
        )
        assert process.stdin and process.stdout
        try:
            found = next((line for line in process.stdout if line.startswith("ADDRESS ")), None)
            if found is None:
                log.seek(0)
                raise RuntimeError(f"the local Ray cluster did not start:\n{log.read()[-2000:]}")
            os.environ["RAY_ADDRESS"] = found.split()[1]
            yield
        finally:
            process.stdin.close()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()  # Ray's own reaper then ends the rest
                process.wait()
            process.stdout.close()


def read_list(path: str | os.PathLike[str]) -> dict[str, str]:
    """Read a list of tests, one a line: {name: the comment behind it}."""
    found = pathlib.Path(path)
    if not found.exists() and (HERE / found).exists():
        found = HERE / found
    rows = (line.partition("#") for line in found.read_text().splitlines())
    return {name.strip(): comment.strip() for name, _, comment in rows if name.strip()}


def summary(results: list[Result], head: str) -> str:
    """Draw a table by suite, with the totals under it."""
    columns = ("pass", "fail", "died", "timeout", "skip", "xfail", "xpass")
    table: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    total = table["TOTAL"]
    for result in results:
        table[result.name.split(".")[0]][result.verdict] += 1
        total[result.verdict] += 1
    table["TOTAL"] = table.pop("TOTAL")  # to the end
    lines = [f"{head:36}" + "".join(f"{column:>8}" for column in columns)]
    for row, count in table.items():
        lines.append(f"{row:36}" + "".join(f"{count[column]:8}" for column in columns))
    failed = sum(not result.ok for result in results)
    lines.append(f"{total['pass']} passed, {failed} failed, {total['skip']} skipped")
    return "\n".join(lines)


def _parse() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("--backend", choices=["rayrpc", "tensorpipe"], default="rayrpc")
    add("--tests", metavar="FILE", help="one name a line, '#' starts a comment")
    add("-k", metavar="TEXT", action="append", help="names that contain TEXT (repeatable)")
    add("--cuda", action="store_true", help="the suites for GPUs, instead of the others")
    add("--list", action="store_true", help="print the names and stop")
    add("--timeout", metavar="S", type=float, default=60.0, help="seconds per test (60)")
    add("--jobs", metavar="N", type=int, default=1, help="tests at a time (1)")
    add("--json", metavar="FILE", help="write the results there")
    add("--stop-on-fail", action="store_true")
    add("-v", "--verbose", action="store_true", help="show all failures in full")
    add("--expected-failures", metavar="FILE", help="'Suite.test_name  # reason' on each line;"
        " for rayrpc the file beside run.py is the default")  # fmt: skip
    args = parser.parse_args()
    if args.expected_failures is None and args.backend == "rayrpc" and not args.cuda:
        args.expected_failures = HERE / "expected_failures.txt"
    if args.jobs < 1:
        parser.error("--jobs must be at least 1")
    return parser, args


def main() -> int:
    parser, args = _parse()
    # Before numpy comes: its threads would be the only ones in the process that forks.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    sys.path.insert(0, str(HERE.parents[1]))  # this checkout's rayrpc, installed or not
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the cluster ends with us

    if args.cuda:
        SUITES[:] = ["GENERIC_CUDA_TESTS", "TENSORPIPE_CUDA_TESTS"]
        hide_devices()
    known = all_names(args.backend)
    try:
        names = list(read_list(args.tests)) if args.tests else known
        expected = read_list(args.expected_failures) if args.expected_failures else {}
    except OSError as error:
        parser.error(str(error))
    if unknown := sorted({*names, *expected} - set(known)):
        parser.error(f"not in the suites: {', '.join(unknown)}")
    if unreasoned := [name for name, reason in expected.items() if not reason]:
        parser.error(f"expected to fail, but without a reason: {', '.join(unreasoned)}")
    names = [name for name in names if not args.k or any(text in name for text in args.k)]
    if not names:
        parser.error("no test selected")
    if args.list:
        print("\n".join(names))
        return 0

    def report(result: Result) -> None:
        line = f"{result.verdict:8}{result.seconds:7.2f}s  {result.name}  {result.why[:150]}"
        print(line.rstrip(), flush=True)
        lines = [] if result.ok and not args.verbose else result.detail.splitlines()
        if len(lines) > BRIEF and not args.verbose:
            lines[BRIEF:] = [f"... and {len(lines) - BRIEF} lines (--verbose)"]
        for line in lines:
            print(line, flush=True)

    started = time.monotonic()
    results = run(
        names,
        backend=args.backend,
        timeout=args.timeout,
        jobs=args.jobs,
        expected=expected,
        stop_on_fail=args.stop_on_fail,
        report=report,
    )
    if args.json:
        rows = [dataclasses.asdict(result) for result in results]
        pathlib.Path(args.json).write_text(json.dumps(rows, indent=1) + "\n")
    print("\n" + summary(results, f"{args.backend}, {time.monotonic() - started:.0f} s"))
    return 0 if all(result.ok for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
