"""Start a worker process of Ray: the program that the raylet runs in place of Ray's own.

Run as ``python start_worker.py ARGUMENT...``, with what Ray gives its own program, it asks the fork
server (``fork_server.py``) for a process that goes on as the worker, and ends.  What only a new
interpreter can do, and all that the fork server does not confirm, it leaves to Ray's own program,
which takes its place.

It is run by its path, for each worker, so it imports little, and nothing of rayrpc.
"""

from __future__ import annotations

import array
import importlib.util
import json
import os
import resource
import signal
import socket
import struct
import sys
from typing import Any

__all__ = ["HEADER", "SERVER", "main"]

#: the variable with the path of the fork server's socket
SERVER = "RAYRPC_INTERNAL_FORK_SERVER"
#: how a request begins: the lengths of what it asks for, and of the rest, in bytes
HEADER = struct.Struct("!II")

CONFIRM_SECONDS = 60.0  # what is to be loaded may be loading, on a busy machine
# How the names of variables begin that the interpreter and the C library read when they start.
READ_AT_START = ("GCONV_", "GLIBC_", "LANG", "LC_", "LD_", "LOCPATH", "MALLOC_", "PYTHON", "TZ")
# Keys of Ray's RuntimeEnvContext that ask for another command line.
OTHER_COMMANDS = ("command_prefix", "override_worker_entrypoint", "java_jars")
WORKER_PROGRAM = os.path.join("ray", "_private", "workers", "default_worker.py")


def main(arguments: list[str]) -> None:
    """Start a worker process.

    Args:
        arguments: those of Ray's own program.
    """
    path = os.environ.get(SERVER)
    request = _request_of(arguments) if path else None
    if request is None or not _ask(path or "", *request):
        spec = importlib.util.find_spec("ray")
        assert spec is not None and spec.submodule_search_locations is not None
        folder = next(iter(spec.submodule_search_locations))
        program = os.path.join(folder, "_private", "workers", "setup_worker.py")
        os.execv(sys.executable, [sys.executable, program, *arguments])


def _request_of(arguments: list[str]) -> tuple[dict[str, str], dict[str, Any]] | None:
    """Return what a forked process needs to become the worker.

    Args:
        arguments: those of Ray's own program.

    Returns:
        Its cluster and job, and the rest; None: it needs an interpreter of its own.
    """
    context: dict[str, Any] = {}
    command: list[str] = []
    for argument in arguments:
        name, _, value = argument.partition("=")
        if name == "--serialized-runtime-env-context":
            context = json.loads(value or "{}")
        elif name == "--language":
            if value != "PYTHON":
                return None
        else:
            command.append(argument)
    variables: dict[str, str] = context.get("env_vars") or {}
    if (
        not command
        or not command[0].endswith(WORKER_PROGRAM)
        or any(each.startswith("--worker-type=") and each[14:] != "WORKER" for each in command)
        or any(context.get(key) for key in OTHER_COMMANDS)
        or context.get("py_executable") not in (None, "", sys.executable)
        or any(name.startswith(READ_AT_START) for name in variables)
    ):
        return None
    environ = {**os.environ, **variables}
    prefix = "--gcs-address="
    cluster = next((each[len(prefix) :] for each in command if each.startswith(prefix)), "")
    with open("/proc/self/oom_score_adj") as file:
        oom_score_adj = file.read().strip()
    return {"cluster": cluster, "job": environ.get("RAY_JOB_ID", "")}, {
        "command": command,
        "environ": environ,
        "cwd": os.getcwd(),
        "leads_group": os.getpgrp() == os.getpid(),
        "oom_score_adj": oom_score_adj,
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "limits": _limits(),
        "ignored": [
            int(each)
            for each in signal.valid_signals()
            if each not in (signal.SIGPIPE, signal.SIGXFSZ)  # which Python ignores itself
            and signal.getsignal(each) is signal.SIG_IGN
        ],
        "blocked": [int(each) for each in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
    }


def _limits() -> dict[str, tuple[int, int]]:
    """Return the resource limits of this process."""
    names = [name for name in vars(resource) if name.startswith("RLIMIT_")]
    return {name: resource.getrlimit(getattr(resource, name)) for name in names}


def _ask(path: str, what: dict[str, str], request: dict[str, Any]) -> bool:
    """Ask the fork server for a process; return False if there will be none."""
    parts = [json.dumps(each).encode() for each in (what, request)]
    descriptors = array.array("i", [0, 1, 2])
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(CONFIRM_SECONDS)
        try:
            connection.connect(path)
            connection.sendmsg(
                [HEADER.pack(*map(len, parts))],
                [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)],
            )
            connection.sendall(b"".join(parts))
            return bool(connection.recv(1))
        except TimeoutError:
            pass
        except OSError:
            return False
        try:
            # from here on a process that is late cannot confirm, and ends
            connection.shutdown(socket.SHUT_RD)
            return bool(connection.recv(1))
        except OSError:
            return False


if __name__ == "__main__":
    main(sys.argv[1:])
