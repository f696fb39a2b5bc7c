"""One compliance test: a forked process for each rank, and what came of it.

A rank does what the child process of torch's MultiProcessTestCase does, and sends its Outcome
through a pipe. Its output goes to a file; a rank that must be killed first dumps its stacks there.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import re
import signal
import socket
import sys
import tempfile
import time
import traceback
import typing
import unittest
import warnings
from collections.abc import Container, Iterator, Mapping

HIDDEN = "COMPLIANCE_DEVICES"  # variable: the GPUs that ranks see
BAD = ("fail", "died", "timeout")  # the kinds of a bad outcome, the most telling first
GRACE = 5.0  # seconds that the other ranks get once one has ended badly
TAIL = 60  # lines of a bad rank's output that are kept
FORK = re.compile(r'  File ".*/(compliance/\w+|multiprocessing/(context|popen_fork|process))\.py"')
PR_SET_PDEATHSIG = 1  # <sys/prctl.h>: a signal to get when the parent dies


class Outcome(typing.NamedTuple):
    """What came of one rank: ``pass``, ``skip`` or one of BAD; why, in a line; the traceback."""

    kind: str
    why: str = ""
    text: str = ""


@dataclasses.dataclass(frozen=True)
class Result:
    """What came of one test: an outcome's kind, or ``xfail`` or ``xpass`` where it was to fail."""

    name: str
    verdict: str
    seconds: float
    why: str = ""
    detail: str = ""

    @property
    def ok(self) -> bool:
        return self.verdict in ("pass", "skip", "xfail")


class ForkedTest:
    """A test on its way.

    Args:
        name: ``Suite.test_name``.
        suite: the test case class.
        backend: under ``rayrpc`` its ranks cannot make a native TensorPipe agent.
        timeout: seconds from now until its ranks may be killed.
    """

    def __init__(self, name: str, suite: type, backend: str, timeout: float) -> None:
        self.name = name
        self.started = time.monotonic()
        self.deadline = self.started + timeout
        # of ranks that did not report yet
        self.pipes: dict[int, multiprocessing.connection.Connection] = {}
        self._outcomes: dict[int, Outcome] = {}
        self._processes: list[typing.Any] = []
        self._folder = tempfile.TemporaryDirectory(prefix="rpc-compliance-")
        fork = multiprocessing.get_context("fork")
        method = name.split(".")[1]
        port = _free_port()
        for rank in range(int(suite(method).world_size)):
            receiver, sender = fork.Pipe(duplex=False)
            args = (backend, suite, method, rank, self._folder.name, port, sender)
            process = fork.Process(target=_rank_main, args=args)
            process.start()
            sender.close()
            self._processes.append(process)
            self.pipes[rank] = receiver

    @property
    def over(self) -> bool:
        return not self.pipes or time.monotonic() >= self.deadline

    def receive(self, ready: Container[object]) -> None:
        """Note the outcomes of the ranks whose pipes are ready."""
        for rank, pipe in list(self.pipes.items()):
            if pipe in ready:
                try:
                    outcome = pipe.recv()
                except EOFError:
                    self._processes[rank].join(5)
                    outcome = Outcome("died", f"exit code {self._processes[rank].exitcode}")
                self._note(rank, outcome)
                if outcome.kind in BAD:
                    self.deadline = min(self.deadline, time.monotonic() + GRACE)

    def _note(self, rank: int, outcome: Outcome) -> None:
        self._outcomes[rank] = outcome
        self.pipes.pop(rank).close()

    def finish(self) -> Result:
        """Kill the ranks that are left, and judge."""
        seconds = round(time.monotonic() - self.started, 2)
        late = list(self.pipes)
        for rank in late:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._processes[rank].pid, signal.SIGUSR1)
            self._note(rank, Outcome("timeout", f"still running after {seconds:g} s"))
        if late:
            time.sleep(0.3)  # for their stacks
        for rank, process in enumerate(self._processes):
            process.join(0 if rank in late else 2)
            process.kill()
            process.join()
        result = self._judge(seconds)
        self._folder.cleanup()
        return result

    def _judge(self, seconds: float) -> Result:
        kinds = {outcome.kind for outcome in self._outcomes.values()}
        bad = {rank: out for rank, out in sorted(self._outcomes.items()) if out.kind in BAD}
        if bad:
            verdict = next(kind for kind in BAD if kind in kinds)
            first = next(rank for rank, out in bad.items() if out.kind == verdict)
            why = f"rank {first}: {bad[first].why}"
            return Result(self.name, verdict, seconds, why, "\n".join(self._describe(bad)))
        if len(kinds) > 1:
            return Result(self.name, "fail", seconds, "only some of the ranks skipped it")
        return Result(self.name, kinds.pop(), seconds, self._outcomes[0].why)

    def _describe(self, bad: Mapping[int, Outcome]) -> Iterator[str]:
        """Tell what ranks that ended alike have in common once, then what each of them printed."""
        for outcome in sorted(dict.fromkeys(bad.values()), key=lambda out: BAD.index(out.kind)):
            ranks = [rank for rank, other in bad.items() if other == outcome]
            who = ", ".join(map(str, ranks))
            yield f"rank {who}: {outcome.kind}: {outcome.text or outcome.why}"
            for rank in ranks:
                log = pathlib.Path(self._folder.name, f"rank{rank}.log")
                lines = log.read_text(errors="replace").splitlines() if log.exists() else []
                lines = [line for line in lines if not FORK.match(line)]  # how each stack begins
                yield from (f"rank {rank} | {line}" for line in lines[-TAIL:])


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def hide_devices() -> None:
    """Hide the GPUs from this process, which must not initialize CUDA; ranks see them again."""
    os.environ[HIDDEN] = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    # else torch counts the devices by CUDA, once for all processes that are forked from this one
    os.environ.update(CUDA_VISIBLE_DEVICES="", PYTORCH_NVML_BASED_CUDA_CHECK="1")


def _show_devices() -> None:
    devices = os.environ.pop(HIDDEN, None)
    if devices:
        os.environ["CUDA_VISIBLE_DEVICES"] = devices
    elif devices is not None:
        del os.environ["CUDA_VISIBLE_DEVICES"]


def _rank_main(
    backend: str,
    suite: type,
    method: str,
    rank: int,
    folder: str,
    port: int,
    pipe: multiprocessing.connection.Connection,
) -> None:
    log = open(f"{folder}/rank{rank}.log", "w", buffering=1)  # noqa: SIM115  open until the end
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    sys.stdout = sys.stderr = log
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's affair
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    warnings.simplefilter("default")  # not as strict as pytest may be in the parent
    faulthandler.enable(log)
    faulthandler.register(signal.SIGUSR1, log)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    _show_devices()
    try:
        outcome = _run_method(backend, suite, method, rank, f"{folder}/rendezvous")
    except BaseException as error:
        why = traceback.format_exception_only(error)[-1].strip().splitlines()[0]
        outcome = Outcome("fail", why, traceback.format_exc())
    pipe.send(outcome)
    log.flush()
    os._exit(0)


def _run_method(backend: str, suite: type, method: str, rank: int, rendezvous: str) -> Outcome:
    from torch.testing._internal.common_distributed import TEST_SKIPS
    from torch.testing._internal.common_utils import set_rng_seed

    if backend == "rayrpc":
        _forbid_native_agent()
    set_rng_seed()
    case = suite(method)
    case.rank = rank
    case.file_name = rendezvous
    skips = {skip.exit_code: skip.message for skip in TEST_SKIPS.values()}
    try:
        getattr(case, method)()
    except unittest.SkipTest as skip:
        return Outcome("skip", str(skip))
    except SystemExit as end:  # how torch's decorators skip
        if end.code in skips:
            return Outcome("skip", skips[end.code])
        if end.code:
            return Outcome("died", f"sys.exit({end.code!r})")
    return Outcome("pass")


class _NoNativeAgent:
    def __new__(cls, *args: object, **kwargs: object) -> typing.NoReturn:
        raise RuntimeError("a native TensorPipe agent was asked for under --backend rayrpc")


def _forbid_native_agent() -> None:
    """Make sure that what passes under rayrpc has passed on rayrpc."""
    import torch.distributed.rpc as rpc

    if not rpc.init_rpc.__module__.startswith("rayrpc"):
        raise RuntimeError("rayrpc.install() left torch.distributed.rpc.init_rpc as it was")
    for module in list(sys.modules.values()):
        agent = getattr(module, "__dict__", {}).get("TensorPipeAgent")
        if getattr(agent, "__module__", "").startswith("torch._C"):
            vars(module)["TensorPipeAgent"] = _NoNativeAgent
