"""Learn that Ray ends the actor in whose process a worker runs.

Ray ends an actor that its users have let go, or that calls ``ray.actor.exit_actor``, once the calls
that its process has made have returned.  A worker always has some under way, which wait for its
peers' calls and for changes of its group: so it has to leave the group first.

Torch is never imported here.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import ray
from ray._private import state, worker

from rayrpc._concurrency.waiting import Event
from rayrpc._transports.ray.cluster import through_client
from rayrpc._transports.ray.endpoint import hosted_endpoint

__all__ = ["ActorExit", "HAS_EXIT_FLAG"]

logger = logging.getLogger(__name__)

#: whether Ray tells that an actor calls ``exit_actor``; old Rays, which do not, kill actors that
#: are let go, and one that exits has to call ``rpc.shutdown()`` before
HAS_EXIT_FLAG = hasattr(ray._raylet.CoreWorker, "get_current_actor_should_exit")  # type: ignore[attr-defined]

# How often the process looks whether its actor calls ``exit_actor`` ...
POLL_SECONDS = 0.1
# ... and asks Ray's control service whether the actor was let go.
ASK_SECONDS = 1.0
# How long an end of the watch waits for the control service's answer.
CLOSE_SECONDS = 2.0


class ActorExit:
    """Watch for the end of the actor of a program in whose process this is, if it is one's.

    The actors of hosted workers are rayrpc's own, and are not watched.

    Args:
        on_exit (Callable): called once, in a thread of its own, when Ray ends the actor.
    """

    def __init__(self, on_exit: Callable[[], None]) -> None:
        self._on_exit = on_exit
        self._closed = Event()
        self._thread: threading.Thread | None = None
        if hosted_endpoint() is None and not through_client():
            process = worker.global_worker
            if process.mode == ray.WORKER_MODE and not process.actor_id.is_nil():
                self._thread = threading.Thread(
                    target=self._watch,
                    args=(process.actor_id.hex(),),
                    name="rayrpc-exit",
                    daemon=True,
                )
                self._thread.start()

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(CLOSE_SECONDS)  # else Python could end while it asks Ray

    def _watch(self, actor: str) -> None:
        asked = time.monotonic()
        while not self._closed.wait(POLL_SECONDS):
            core: Any = getattr(worker.global_worker, "core_worker", None)
            if core is None:  # Ray is just shutting down
                return
            ends = HAS_EXIT_FLAG and core.get_current_actor_should_exit()
            if not ends and time.monotonic() >= asked + ASK_SECONDS:
                ends = _was_let_go(actor)
                asked = time.monotonic()
            if ends:
                logger.info("Ray ends the actor of this process: the worker leaves its group")
                self._on_exit()
                return


def _was_let_go(actor: str) -> bool:
    """Tell whether Ray's control service has ended an actor."""
    try:
        return bool(state.actors(actor).get("State") == "DEAD")
    except Exception:  # the control service has ended, too
        logger.debug("Ray's control service does not answer", exc_info=True)
        return False
