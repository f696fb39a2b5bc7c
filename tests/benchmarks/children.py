"""Processes that answer questions: a line of JSON there, a line of JSON back.

A child ends when its standard input does, so that none outlives the process that started it.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

__all__ = ["Child", "ChildError", "answer"]

SCRIPT = Path(__file__).with_name("bench_rpc.py")
END_SECONDS = 15.0


class ChildError(RuntimeError):
    """A child failed; the message is its."""


class Child:
    """Start this benchmark's script in another role.

    Args:
        role: which.
        options: of the script, as on a command line.
        rests: stop it, and its process group, which is its own then, while nothing is asked.
    """

    def __init__(self, role: str, *options: str, rests: bool = False) -> None:
        self.role = role
        self._rests = rests
        self._process = subprocess.Popen(
            [sys.executable, str(SCRIPT), "--role", role, *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def wait_ready(self) -> None:
        """Wait until it is set up."""
        self._read()
        self._signal(signal.SIGSTOP)

    def ask(self, question: dict[str, Any]) -> Any:
        """Return the answer to a question.

        Raises:
            ChildError: it failed, or is gone.
        """
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            return self._read()
        except BrokenPipeError:
            raise ChildError(f"{self.role} is gone") from None
        finally:
            self._signal(signal.SIGSTOP)

    def _signal(self, number: int) -> None:
        # should this process be killed, the kernel wakes the group, and ends it by SIGHUP
        if self._rests:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ChildError(f"{self.role} is gone (exit status {self._process.wait()})")
        reply = json.loads(line)
        if "error" in reply:
            raise ChildError(f"{self.role}: {reply['error']}")
        return reply["value"]

    def release(self) -> None:
        """Tell it to end."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def close(self) -> None:
        """End it."""
        assert self._process.stdout is not None
        self.release()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


def answer(setup: Any, reply: Any, close: Any) -> None:
    """Be a child: set up, answer until the standard input ends, close.

    Args:
        setup, close: called without arguments.
        reply: called with a question, returns the answer.
    """
    # what Ray or a worker prints must not come between the answers
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def tell(work: Any, *args: Any) -> bool:
        try:
            message = {"value": work(*args)}
        except Exception as exc:
            message = {"error": f"{type(exc).__name__}: {exc}"}
        out.write(json.dumps(message) + "\n")
        out.flush()
        return "value" in message

    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read_lines, args=(lines,), daemon=True).start()
    try:
        if tell(setup):
            while line := lines.get():
                tell(reply, json.loads(line))
    except BrokenPipeError:
        pass  # who asked is gone
    finally:
        close()


def _read_lines(lines: queue.SimpleQueue[str]) -> None:
    for line in sys.stdin:
        lines.put(line)
    lines.put("")
    time.sleep(END_SECONDS)
    os._exit(1)  # it hangs in its setup, or waits for somebody who is gone
