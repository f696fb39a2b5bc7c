"""Ranks that are child processes: their arguments, their errors, and their end by Ctrl-C."""

import os
import re
import signal
import textwrap

import pytest
from conftest import eventually
from launching import alive

RANKS = """
import os, signal, time

from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

from rayrpc.launch import child_ranks
from rayrpc.launch.child_ranks import spawn, start_processes


def main(rank, text):
    print(f"<{text} {rank} {signal.getsignal(signal.SIGINT) is signal.default_int_handler}>",
          flush=True)


def fail(rank):
    if rank == 1:
        raise ValueError("as expected")
    time.sleep(100)


def leave(rank):
    os._exit(7)


def finds_place(rank):
    print(f"<ready {os.getpid()}>", flush=True)
    time.sleep(100)


def hangs_in_here(rank):
    if rank == 1:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    finds_place(rank)


if __name__ == "__main__":
CODE
"""


@pytest.fixture
def run(start, script):
    """Run a program with these ranks; forked ones start at once."""
    return lambda code: start(script(RANKS.replace("CODE", textwrap.indent(code, "    "))))


def test_they_end_as_torchs_do(run):
    one = run(
        """
assert start_processes(main, ("forked",), 2, start_method="fork") is None
context = start_processes(main, ("joined",), 2, join=False, start_method="fork")
while not context.join(60):
    pass
print("joined again:", context.join(), len(context.pids()))
for function, error in ((fail, ProcessRaisedException), (leave, ProcessExitedException)):
    try:
        start_processes(function, nprocs=2, start_method="fork")
    except error as exc:
        text = str(exc).strip().splitlines()[-1]
        print(type(exc).__name__, exc.error_index if function is fail else exc.exit_code, text)
spawn(main, ("spawned",), 1)
"""
    )
    assert one.end() == 0, one.output
    for how, count in (("forked", 2), ("joined", 2), ("spawned", 1)):
        for rank in range(count):
            assert f"<{how} {rank} True>" in one.output
    assert "joined again: True 2" in one.output
    assert "ProcessRaisedException 1 ValueError: as expected" in one.output
    assert "ProcessExitedException 7" in one.output


def test_a_ctrl_c_ends_those_that_can_end_and_those_that_hang_and_shows_where_each_was(run):
    one = run(
        """
child_ranks.EXIT_SECONDS = 0.5  # for the one that hangs
context = start_processes(hangs_in_here, nprocs=2, join=False, start_method="fork")
pids = context.pids()
os.write(1, f"<ranks {pids[0]} {pids[1]}>\\n".encode())  # at once: the ranks print, too

try:
    while not context.join():
        pass
except KeyboardInterrupt:
    print("interrupted:", [process.exitcode for process in context.processes], flush=True)
    raise
"""
    )
    assert eventually(lambda: one.output.count("<ready") == 2 and "<ranks" in one.output)
    found = re.search(r"<ranks (\d+) (\d+)>", one.output)
    assert found is not None, one.output
    pids = [int(pid) for pid in found.groups()]
    os.killpg(one.process.pid, signal.SIGINT)  # as a terminal does
    assert one.end() != 0
    assert eventually(lambda: not any(map(alive, pids)))
    assert f"-- Process 0 (pid {pids[0]}) was at:" in one.output
    assert one.output.count("in finds_place") >= 2 and "in hangs_in_here" in one.output
    assert "Process 1 (pid" not in one.output  # faulthandler writes without a header
    assert "interrupted: [0, -9]" in one.output
