"""What a test must not leave behind: threads, descriptors, processes, actors, shared memory.

A ``Snapshot`` is taken before and after; ``left_over`` compares the two, and waits a little for
what is just ending. What may stay is in the tables below, each line with its reason.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import multiprocessing
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Snapshot", "left_over", "snapshot"]

WAIT_SECONDS = 20.0

# (pattern of a thread's name, reason)
THREADS_THAT_STAY = [
    (r"pytest.*", "pytest's own time-outs"),
    (r"PythonGCThread|ray_.*|AsyncIO Thread.*|Thread-\d+ \(_.*(ray|grpc).*\)", "Ray's own"),
    (r"raylet.*|import_thread.*", "Ray's own"),
    (r"QueueFeederThread|Thread-\d+ \(_serve\)", "multiprocessing's, for as long as the process"),
    (r"rayrpc-watch", "sleeps up to 5 s before it finds that its readers are closed"),
]
# Caches of an agent, whose threads end when idle, or when the agent shuts down.
THREADS_OF_AN_AGENT = [(r"rayrpc-.*", "the agent still runs")]

# (pattern of a descriptor's target, reason)
DESCRIPTORS_THAT_STAY = [
    (r"/dev/(null|urandom|random|nvidia.*)", "opened once, by libraries"),
    (r".*/build/coverage/.*", "coverage's data"),
    (r"socket:unix to .*torch-shm-dir.*", "torch's manager of shared memory"),
    (r"/proc/.*|/sys/.*", "psutil and torch read them"),
]
# With Ray in this process, gRPC opens and closes these when it likes.
DESCRIPTORS_OF_RAY = [
    (r"anon_inode:.*", "gRPC's pollers"),
    (r"socket:tcp", "gRPC's channels, one to each worker that was called"),
    (r".*/session_[^/]*/.*", "Ray's logs"),
]

# The agent keeps its connections; at the end of the module it is gone, and so must they be.
DESCRIPTORS_OF_AN_AGENT = [
    (r"socket:.*|anon_inode:.*|/memfd:rayrpc.*", "connections to workers that were called"),
]

# (pattern of a command line, reason)
PROCESSES_THAT_STAY = [
    (r".*multiprocessing\.(resource_tracker|forkserver).*", "one a process, until it ends"),
    (r".*torch_shm_manager.*", "one a process, until it ends"),
    (r".*simulation\.fork_server.*", "one a process, until it ends"),
]

# (pattern of a class and a name, reason)
ACTORS_THAT_STAY = [
    (r"Directory\w* .*", "it stays some seconds for members that come late"),
    (r"HostedWorker fork-\d+#.*", "the pool of tasks' workers replaces one that died"),
]

# rpc.shutdown() ends the workers that the agent started.
ACTORS_OF_AN_AGENT = [(r"HostedWorker .*", "the agent still runs")]

SHARED_MEMORY = Path("/dev/shm")


class Snapshot(NamedTuple):
    """What exists now: each kind by a key that is not used again."""

    threads: dict[int, threading.Thread]
    descriptors: dict[tuple[int, str], str]
    processes: dict[int, str]
    actors: dict[str, str]
    segments: dict[str, str]


def _matches(text: str, table: list[tuple[str, str]]) -> bool:
    return any(re.fullmatch(pattern, text) for pattern, _ in table)


def _descriptors() -> dict[tuple[int, str], str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing itself
            target = os.readlink(f"/proc/self/fd/{name}")
            if target != f"/proc/{os.getpid()}/fd":
                found[int(name), target] = target
    return found


def _processes() -> dict[int, str]:
    """Return the children of this process, each with no description yet."""
    found = {}
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # the thread has just ended
            for pid in Path(f"/proc/self/task/{task}/children").read_text().split():
                found[int(pid)] = ""
    return found


def _describe_process(pid: int) -> str | None:
    """Return a child's command line; None if it has ended."""
    try:
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            return None
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
    except OSError:
        return None


def ray_is_on() -> bool:
    """Return whether Ray is initialized in this process."""
    ray: Any = sys.modules.get("ray")
    return ray is not None and hasattr(ray, "is_initialized") and bool(ray.is_initialized())


def _actors() -> dict[str, str]:
    if not ray_is_on():
        return {}
    from ray._private import state

    client_mode: Any = sys.modules.get("ray.util.client")
    if client_mode is not None and client_mode.ray.is_connected():
        return {}
    alive: dict[str, dict[str, Any]] = state.actors(actor_state_name="ALIVE")
    return {key: f"{actor['ActorClassName']} {actor['Name']}" for key, actor in alive.items()}


def _segments() -> dict[str, str]:
    try:
        return {name: name for name in os.listdir(SHARED_MEMORY)}
    except OSError:
        return {}


def snapshot() -> Snapshot:
    """Return what exists now, in a fraction of a millisecond."""
    return Snapshot(
        {id(thread): thread for thread in threading.enumerate()},
        _descriptors(),
        _processes(),
        _actors(),
        _segments(),
    )


def _agent_runs() -> bool:
    """Return whether this process has an agent: its own, or that of its pools."""
    current: Any = sys.modules.get("rayrpc._runtime.current")
    pools: Any = sys.modules.get("rayrpc.launch.worker_pool")
    is_in_group = current is not None and current.is_set()
    return bool(is_in_group or (pools is not None and pools._membership._agent is not None))


def _new_threads(before: Snapshot, now: Snapshot) -> Iterator[str]:
    may_stay = THREADS_THAT_STAY + (THREADS_OF_AN_AGENT if _agent_runs() else [])
    for key, thread in now.threads.items():
        if before.threads.get(key) is thread or isinstance(thread, threading._DummyThread):
            continue
        if not _matches(thread.name, may_stay):
            yield f"thread {thread.name}{'' if thread.daemon else ', not a daemon'}{_place(thread)}"


def _place(thread: threading.Thread) -> str:
    """Say where a thread is."""
    frame = sys._current_frames().get(thread.ident or 0)
    if frame is None:
        return ""
    stack = itertools.islice(traceback.walk_stack(frame), 4)
    return ", at " + " < ".join(f"{each.f_code.co_filename}:{line}" for each, line in stack)


def _kind(descriptor: int, target: str) -> str:
    """Name a socket by its family; gRPC's are TCP."""
    if not target.startswith("socket:"):
        return target
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as found:
        if found.family != socket.AF_UNIX:
            return "socket:tcp"
        with contextlib.suppress(OSError):
            return f"socket:unix to {found.getpeername()!r}"
        return "socket:unix"
    return target


def _of_multiprocessing() -> set[int | None]:
    """Return the descriptors of what multiprocessing starts once for this process."""
    tracker: Any = sys.modules.get("multiprocessing.resource_tracker")
    sharer: Any = sys.modules.get("multiprocessing.resource_sharer")
    server: Any = sys.modules.get("multiprocessing.forkserver")
    found = [tracker and tracker._resource_tracker._fd]
    found += [server and server._forkserver._forkserver_alive_fd]
    if sharer is not None and sharer._resource_sharer._listener is not None:
        found.append(sharer._resource_sharer._listener._listener._socket.fileno())
    return set(found)


def _new_descriptors(before: Snapshot, now: Snapshot) -> Iterator[str]:
    may_stay = DESCRIPTORS_THAT_STAY + (DESCRIPTORS_OF_RAY if ray_is_on() else [])
    may_stay = may_stay + (DESCRIPTORS_OF_AN_AGENT if _agent_runs() else [])
    kept = _of_multiprocessing()
    for descriptor, target in now.descriptors.keys() - before.descriptors.keys():
        if descriptor in kept:
            continue
        kind = _kind(descriptor, target)
        if not _matches(kind, may_stay):
            yield f"descriptor {descriptor}: {kind}"


def _new_processes(before: Snapshot, now: Snapshot) -> Iterator[str]:
    for pid in now.processes.keys() - before.processes.keys():
        command = _describe_process(pid)
        if command is not None and not _matches(command, PROCESSES_THAT_STAY):
            yield f"process {pid}: {command[:200]}"


def _new_actors(before: Snapshot, now: Snapshot) -> Iterator[str]:
    may_stay = ACTORS_THAT_STAY + (ACTORS_OF_AN_AGENT if _agent_runs() else [])
    for key in now.actors.keys() - before.actors.keys():
        if not _matches(now.actors[key], may_stay):
            yield f"actor {now.actors[key]}"


def _new_segments(before: Snapshot, now: Snapshot) -> Iterator[str]:
    for name in now.segments.keys() - before.segments.keys():
        if name not in _foreign and not _is_ours(name):
            _foreign.add(name)
        if name not in _foreign:
            yield f"shared memory {name}"


_foreign: set[str] = set()


def _is_ours(segment: str) -> bool:
    """Return whether these tests use a segment, and not another program on this machine."""
    if f"_{os.getpid()}_" in segment:
        return True
    session = f"RAY_TMPDIR={os.environ.get('RAY_TMPDIR', '')}\0".encode()  # this session's alone
    path = f"{SHARED_MEMORY}/{segment}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if path in (folder / "maps").read_bytes():
                environment = (folder / "environ").read_bytes()
                return session in environment or int(folder.name) == os.getpid()
    return False


def _compare(before: Snapshot) -> list[str]:
    now = snapshot()
    found: list[str] = []
    for kind in (_new_threads, _new_descriptors, _new_processes, _new_actors, _new_segments):
        found += kind(before, now)
    return sorted(found)


def left_over(before: Snapshot, wait_seconds: float = WAIT_SECONDS) -> list[str]:
    """Describe what is there now and was not before.

    Args:
        before: when it was not.
        wait_seconds: how long to wait for what is just ending; not at all if there is nothing.
    """
    found = _compare(before)
    end = time.monotonic() + wait_seconds
    pause = 0.001
    while found and time.monotonic() < end:
        time.sleep(pause)
        pause = min(2 * pause, 0.1)
        if pause > 0.01:
            gc.collect()
            multiprocessing.active_children()  # reaps those that have ended
        found = _compare(before)
    return found
