"""Which version of its session each member has applied, and waits until all have one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable

__all__ = ["AppliedVersions"]


class AppliedVersions:
    """Versions by member; for one event loop.

    A member that notes a version costs one step for each wait that it holds up, and none where
    nobody waits: in quiet, each member notes its version every few seconds.
    """

    def __init__(self) -> None:
        self._versions: dict[str, int] = {}  # by token
        # for each wait: the version, the tokens of the members that lack it, and its Future
        self._waits: list[tuple[int, set[str], asyncio.Future[None]]] = []

    def note(self, token: str, version: int) -> None:
        """Note that a member has applied a version."""
        self._versions[token] = version
        if self._waits:
            self._take(token, version)

    def forget(self, token: str) -> None:
        """Remove a member; nobody waits for it any more."""
        self._versions.pop(token, None)
        self._take(token, None)

    async def wait(self, tokens: Iterable[str], version: int, timeout: float) -> bool:
        """Wait until members have applied a version, or are removed.

        Args:
            tokens: of the members.
            version: that each has to apply.
            timeout: in seconds.

        Returns:
            False if one had not in time.
        """
        lacking = {token for token in tokens if self._versions.get(token, -1) < version}
        if not lacking:
            return True
        done = asyncio.get_running_loop().create_future()
        wait = (version, lacking, done)
        self._waits.append(wait)
        try:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(done, timeout)
        finally:
            self._waits.remove(wait)
        return not lacking

    def _take(self, token: str, applied: int | None) -> None:
        """Take a member from those that are waited for; ``applied``: its version; None: any."""
        for version, lacking, done in self._waits:
            if applied is None or applied >= version:
                lacking.discard(token)
                if not lacking and not done.done():
                    done.set_result(None)
