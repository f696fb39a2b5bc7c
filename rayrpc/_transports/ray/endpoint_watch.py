"""The watch of members' endpoints, by which the directory learns who leaves or dies."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from ray.exceptions import ActorUnavailableError, RayError

from rayrpc._protocol.membership import Member
from rayrpc._transports.ray.ray_errors import cause_of

__all__ = ["EndpointWatch"]

# Pause before an endpoint is watched again.
WATCH_RETRY_SECONDS = 0.2
# How often the endpoint of a member that has just joined is looked for.
ENDPOINT_POLL_SECONDS = 0.02


class EndpointWatch:
    """Watch the endpoints of a directory's members, in its event loop.

    Args:
        remove (Callable): removes a member: its token, "left" or "died", and the cause.
    """

    def __init__(self, remove: Callable[[str, str, str], Awaitable[None]]) -> None:
        self._remove = remove
        self._unwatched: dict[str, asyncio.Event] = {}  # by token, until the endpoint is watched
        #: tokens of the members
        self.tokens: set[str] = set()

    async def wait(self, token: str) -> None:
        """Return when the member's endpoint is watched, or it is no member."""
        await self._unwatched.setdefault(token, asyncio.Event()).wait()

    async def watch(
        self,
        member: Member,
        process: Sequence[Any] = (),
        answer: asyncio.Future[Any] | None = None,
    ) -> None:
        """Remove a member when it leaves or dies.

        Args:
            member: whom to watch.
            process: an ObjectRef that Ray fails if the member's process dies.
            answer: to its join, until which its endpoint may not be started.
        """
        if member.token in self.tokens:
            return
        self.tokens.add(member.token)
        while True:
            try:
                actor = await self._endpoint(member, process, answer)
                self.let_go(member.token)
                # `ps` shows it in the process's title while the worker is a member
                await actor.watch.options(name=member.name).remote(member.token)
                kind, cause = "left", ""
            except ValueError:
                kind, cause = "died", "it has ended"
            except ActorUnavailableError:
                await asyncio.sleep(WATCH_RETRY_SECONDS)  # a broken connection, not a death
                continue
            except RayError as exc:
                kind, cause = "died", cause_of(exc)
            break
        await self._remove(member.token, kind, cause)

    async def _endpoint(
        self, member: Member, process: Sequence[Any], answer: asyncio.Future[Any] | None
    ) -> Any:
        """Return the handle of a member's endpoint; wait for one that is not started yet.

        Args:
            member, process, answer: as for ``watch``.

        Raises:
            ValueError: it has ended.
            RayError: the member's process has died.
        """
        loop = asyncio.get_running_loop()
        alive: asyncio.Future[Any] = asyncio.gather(
            *(asyncio.wrap_future(each.future()) for each in process)
        )
        while True:
            try:
                return await loop.run_in_executor(None, member.address.find)
            except ValueError:
                if alive.done():
                    alive.result()
                    raise
            if answer is not None and not answer.done():
                await asyncio.wait([alive, answer], return_when=asyncio.FIRST_COMPLETED)
            else:
                await asyncio.wait([alive], timeout=ENDPOINT_POLL_SECONDS)

    def let_go(self, token: str) -> None:
        """Let who waits for the watch of a member go on."""
        event = self._unwatched.pop(token, None)
        if event is not None:
            event.set()

    def forget(self, token: str) -> None:
        """Drop a member that was removed; it may be watched again."""
        self.let_go(token)
        self.tokens.discard(token)
