"""Run functions in forks of a process that has imported the simulator, torch and rayrpc.

A fork begins within milliseconds, a new process with these imports after two seconds.  The server
runs one function at a time, in a fork of its own, which it kills when nobody waits for the output
any more, and ends with the process that started it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import os
import pickle
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

__all__ = ["output_of"]

START_SECONDS = 60.0
END_SECONDS = 10.0
CODE = "import sys; from simulation.fork_server import serve; serve(*sys.argv[1:])"
POLL_SECONDS = 0.5
WAIT_SECONDS = 0.01  # for the end of a fork, before it is looked for again
RAN = b"\0ran"  # ends the output of a function that has returned


def output_of(module: str, function: str, *arguments: object, timeout: float) -> str:
    """Return what a function prints.

    Args:
        module: has the function; the server of its name has imported it before it forks.
        function: its name.
        arguments: pickled.
        timeout: in seconds.

    Raises:
        AssertionError: it failed; the message is what it printed, and the traceback.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(timeout)
        connection.connect(_server(module))
        connection.sendall(pickle.dumps((function, arguments)))
        connection.shutdown(socket.SHUT_WR)
        output = _received(connection)
    assert output.endswith(RAN), output.decode() or f"{function}: its process ended"
    return output.removesuffix(RAN).decode()


@functools.cache
def _server(module: str) -> str:
    """Start a server; return its address."""
    folder = tempfile.mkdtemp(prefix="rr-fork-")
    address = str(Path(folder) / "s")
    tests = str(Path(__file__).parent.parent)
    process = subprocess.Popen(
        [sys.executable, "-c", CODE, module, address, str(os.getpid())],
        env={**os.environ, "PYTHONPATH": tests},
        stdin=subprocess.DEVNULL,
    )
    atexit.register(_end, process, folder)
    end = time.monotonic() + START_SECONDS
    while not Path(address).exists():
        assert process.poll() is None and time.monotonic() < end, "the fork server did not start"
        time.sleep(0.05)
    return address


def _end(process: subprocess.Popen[bytes], folder: str) -> None:
    process.terminate()
    process.wait(END_SECONDS)
    shutil.rmtree(folder, ignore_errors=True)


def serve(module: str, address: str, starter: str) -> None:
    """Run the functions that are asked for, until the process that started this one ends."""
    imported = importlib.import_module(module)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{address}.new")
        listener.listen()
        os.rename(f"{address}.new", address)
        listener.settimeout(POLL_SECONDS)
        while os.getppid() == int(starter):
            with contextlib.suppress(TimeoutError):
                connection, _ = listener.accept()
                with connection:
                    if child := os.fork():
                        _wait(child, connection)
                    else:
                        listener.close()
                        _run(imported, connection)
                        os._exit(0)


def _wait(child: int, connection: socket.socket) -> None:
    """Wait until a fork has ended; kill it when the other side has closed the connection."""
    poll = select.poll()
    poll.register(connection, 0)  # tells the hang-up alone
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if poll.poll(1000 * WAIT_SECONDS):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return


def _run(module: object, connection: socket.socket) -> None:
    with connection.makefile("w") as output, contextlib.redirect_stdout(output):
        try:
            function, arguments = pickle.loads(_received(connection))
            getattr(module, function)(*arguments)
            print(end=RAN.decode())
        except BaseException:
            traceback.print_exc(file=output)


def _received(connection: socket.socket) -> bytes:
    parts = []
    while part := connection.recv(1 << 16):
        parts.append(part)
    return b"".join(parts)
