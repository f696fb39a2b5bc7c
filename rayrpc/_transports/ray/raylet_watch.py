"""End a process of Ray with its node's raylet.

Ray ends the actors of a raylet that has died, but waits for the calls that they serve.  Some of
rayrpc's return only when a worker leaves, so the processes would stay for ever.

Torch is never imported here.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time

import psutil

__all__ = ["LOST_SECONDS", "end_with_raylet", "wait_for_end"]

logger = logging.getLogger(__name__)

# Within this time after the end of a raylet, Ray tells all others that its node is lost.
LOST_SECONDS = 15.0
# How often a process is looked for where the system does not tell its end.
POLL_SECONDS = 1.0


def end_with_raylet(after: float = 0.0) -> None:
    """End this process when the raylet that started it has ended; does not wait.

    Args:
        after: so many seconds later.
    """
    if not os.environ.get("RAY_RAYLET_PID"):  # no raylet has started it
        return
    raylet = int(os.environ["RAY_RAYLET_PID"])

    def run() -> None:
        wait_for_end(raylet)
        if after:
            logger.error(
                "Ray's node has ended, as its raylet has (process %d): this process ends in %g s",
                raylet,
                after,
            )
            time.sleep(after)
        os._exit(1)

    threading.Thread(target=run, name="rayrpc-raylet", daemon=True).start()


def wait_for_end(pid: int) -> None:
    """Wait until a process has ended, which need not be a child of this one."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except (AttributeError, OSError):  # not Linux, or an old one
        while psutil.pid_exists(pid):
            time.sleep(POLL_SECONDS)
        return
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        poll.poll()
    finally:
        os.close(descriptor)
