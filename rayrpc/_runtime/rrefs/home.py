"""The worker that handles of RRefs belong to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from rayrpc._protocol.ids import GloballyUniqueId, WorkerInfo
from rayrpc._protocol.membership import Member
from rayrpc._runtime.members import Members
from rayrpc._runtime.objects import ObjectStore
from rayrpc._runtime.rrefs.context import RRefContext
from rayrpc._runtime.user_api import UserApi
from rayrpc.errors import NotInitializedError

__all__ = ["Home", "NO_AGENT", "get_home", "set_home"]


# torch's text
NO_AGENT = (
    "Current RPC agent is not set! Did you initialize the RPC framework (e.g. by calling "
    "`rpc.init_rpc`)?"
)


class Fetcher(Protocol):
    """What handles need of the caller."""

    def fetch(
        self, to: Member, rref_id: GloballyUniqueId, handle: object, timeout: float | None
    ) -> Any:
        """Return a copy of the value of an RRef."""

    def run_callback(self, task: Callable[[], None]) -> None:
        """Run a task that may run users' code."""


class Home(Protocol):
    """What handles need of their worker; the agent is one."""

    #: the key of its group
    key: str

    @property
    def has_left(self) -> bool:
        """Whether it has left its group."""

    @property
    def info(self) -> WorkerInfo:
        """The worker."""

    @property
    def rrefs(self) -> RRefContext:
        """Its RRefs."""

    @property
    def caller(self) -> Fetcher:
        """Makes its calls."""

    @property
    def objects(self) -> ObjectStore:
        """The object store of its cluster."""

    @property
    def user_api(self) -> UserApi:
        """The functions that its users call."""

    @property
    def members(self) -> Members:
        """Those of its group."""

    def resolve_timeout(self, timeout: float) -> float | None:
        """Return a call's timeout in seconds; None: it has none."""


_home: Home | None = None


def set_home(home: Home | None) -> None:
    """Make a worker, or none, that of the default group; ``current.set_agent`` calls it."""
    global _home
    _home = home


def get_home() -> Home:
    """Return this process's worker in the default group.

    Raises:
        NotInitializedError: there is none.
    """
    if _home is None:
        raise NotInitializedError(NO_AGENT)
    return _home
