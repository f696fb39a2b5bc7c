"""The state of a group as text: totals, and what there was a second."""

import pytest

from rayrpc._observe.group_status import GroupStatus

REPORT = {
    "name": "alice",
    "id": 0,
    "node": "10.0.0.1",
    "pid": 77,
    "hosted": True,
    "seconds": 100.0,
    "memory": 312_000_000,
    "slots": {"limit": 16, "busy": 1, "queued": 0},
    "sent": 1000,
    "served": 500,
    "sent_bytes": {"connection": 30_000, "shared_memory": 1_970_000, "ray": 0},
    "rrefs": {"owned": 0, "held": 3},
    "calls": [],
    "serving": [],
    "threads": [],
}


def cells(status, before=None):
    """Return the cells of the one worker by column."""
    _, header, row = status.text(before).splitlines()
    starts = [header.index(column) for column in ("calls made", "served", "sent", "running")]
    ends = [*starts[1:], None]
    return [row[start:end].split("  ")[0] for start, end in zip(starts, ends, strict=True)]


@pytest.fixture
def now():
    return GroupStatus("group", "", [REPORT])


def test_totals(now):
    assert cells(now) == ["1000", "500", "2.0 MB", "1/16"]
    assert "312 MB" in now.text() and "<td>2.0 MB</td>" in now._repr_html_()


def test_rates_since_an_earlier_status(now):
    bytes_then = {"connection": 30_000, "shared_memory": 970_000, "ray": 0}
    earlier = {**REPORT, "seconds": 98.0, "sent": 600, "sent_bytes": bytes_then}
    assert cells(now, GroupStatus("group", "", [earlier])) == ["200/s", "0/s", "500 kB/s", "1/16"]


def test_a_worker_that_is_new_has_totals(now):
    other = {**REPORT, "pid": 78}
    assert cells(now, GroupStatus("group", "", [other])) == ["1000", "500", "2.0 MB", "1/16"]
