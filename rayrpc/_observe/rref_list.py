"""The RRefs of a group, by its workers' reports."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rayrpc._observe.tables import aligned, as_html

__all__ = ["RRefEntry", "RRefList", "rref_report"]

MOST_ROWS = 50  # in a text
_COLUMNS = ("RRef", "owner", "type", "made", "held by")


class RRefEntry(NamedTuple):
    """An RRef that workers hold.

    Args:
        id (tuple[int, int]): the id of the worker that made it, and its number there.
        owner (str): the worker that has the value.
        type (str): of the value; empty: it is not there yet, or its owner does not answer.
        made (str): where: ``at FILE:LINE``, or ``by FUNCTION``; empty: not known.
        holders (dict[str, int]): how many references each worker has.
    """

    id: tuple[int, int]
    owner: str
    type: str
    made: str
    holders: dict[str, int]


class RRefList(list[RRefEntry]):
    """RRefs of a group; ``str()`` gives a table, and a notebook shows it as HTML."""

    @classmethod
    def of(cls, names: Mapping[int, str], reports: Iterable[tuple[int, bytes]]) -> RRefList:
        """Return the RRefs that some workers know.

        Args:
            names: of the workers, by id.
            reports: by the worker's id, what ``rref_report`` returned.
        """
        owners: dict[tuple[int, int], int] = {}
        types: dict[tuple[int, int], str] = {}
        made: dict[tuple[int, int], str] = {}
        counted: dict[tuple[int, int], Counter[int | None]] = {}
        used: dict[tuple[int, int], Counter[int | None]] = {}
        for worker, report in reports:
            found = json.loads(report)
            for pair, kind, where, holders in found["owned"]:
                rref_id = tuple(pair)
                owners[rref_id], types[rref_id] = worker, kind
                counted[rref_id] = Counter(holders)
                made.setdefault(rref_id, where)
            for pair, owner, where in found["used"]:
                rref_id = tuple(pair)
                owners.setdefault(rref_id, owner)
                used.setdefault(rref_id, Counter())[worker] += 1
                if where:  # more than the name of a function
                    made[rref_id] = where

        def name(worker: int | None) -> str:
            return "?" if worker is None else names.get(worker, f"id {worker}")

        return cls(
            RRefEntry(
                rref_id,
                name(owners[rref_id]),
                types.get(rref_id, ""),
                made.get(rref_id, ""),
                # forks on their way are counted by the owner only, new ones by their holders only
                {name(each): count for each, count in _held(rref_id, counted, used).items()},
            )
            for rref_id in sorted(owners)
        )

    def _rows(self) -> list[list[str]]:
        return [
            [
                f"{each.id[0]}:{each.id[1]}",
                each.owner,
                each.type,
                each.made,
                ", ".join(
                    holder if count == 1 else f"{holder} ({count})"
                    for holder, count in each.holders.items()
                ),
            ]
            for each in self[:MOST_ROWS]
        ]

    def __str__(self) -> str:
        if not self:
            return "no RRef is held by a worker"
        more = len(self) - MOST_ROWS
        rest = [f"... and {more} more RRefs"] if more > 0 else []
        return "\n".join([*aligned(_COLUMNS, self._rows()), *rest])

    def _repr_html_(self) -> str:
        return as_html(_COLUMNS, self._rows())


def _held(
    rref_id: tuple[int, int],
    counted: Mapping[tuple[int, int], Counter[int | None]],
    used: Mapping[tuple[int, int], Counter[int | None]],
) -> Counter[int | None]:
    return counted.get(rref_id, Counter()) | used.get(rref_id, Counter())


def rref_report(owned: Sequence[Any], used: Sequence[Any]) -> bytes:
    """Return as JSON what a worker's ``RRefContext.listed`` has returned."""
    return json.dumps({"owned": owned, "used": used}).encode()
