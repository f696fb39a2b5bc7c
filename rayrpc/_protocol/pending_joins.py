"""Joins to static groups that lack ranks, found by the joins that they belong with."""

from __future__ import annotations

from collections.abc import Iterator

from rayrpc._protocol.membership import Member

__all__ = ["PendingJoins"]

BY_HAND = ""  # no run has this name


class PendingJoins:
    """Hold joins; see ``group`` for which of them can only be meant for the same group.

    Of those, all have one ``world_size``, and no two have the same rank: others are refused.
    """

    def __init__(self) -> None:
        self._by_token: dict[str, Member] = {}
        # by run, or BY_HAND, and rank; empty ones are deleted
        self._together: dict[str, dict[int, Member]] = {}

    def __len__(self) -> int:
        return len(self._by_token)

    def __iter__(self) -> Iterator[Member]:
        return iter(self._by_token.values())

    def __contains__(self, token: str) -> bool:
        return token in self._by_token

    def get(self, token: str) -> Member | None:
        """Return the join with a token."""
        return self._by_token.get(token)

    def belonging_with(self, join: Member) -> Iterator[dict[int, Member]]:
        """Yield those of a join's run, then those by hand if it is so too; by rank."""
        return (self._together.get(scope, {}) for scope in _scopes(join))

    def add(self, join: Member) -> None:
        """Add a join."""
        self._by_token[join.token] = join
        for scope in _scopes(join):
            self._together.setdefault(scope, {})[join.id] = join

    def remove(self, token: str) -> bool:
        """Remove a join; return False if there is none."""
        join = self._by_token.pop(token, None)
        if join is None:
            return False
        for scope in _scopes(join):
            del self._together[scope][join.id]
            if not self._together[scope]:
                del self._together[scope]
        return True


def _scopes(join: Member) -> Iterator[str]:
    if join.origin.run:
        yield join.origin.run
    if join.origin.is_by_hand:
        yield BY_HAND
