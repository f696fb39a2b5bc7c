"""Times and sizes for people, and tables of them."""

import pytest

from rayrpc._observe.tables import aligned, as_html, duration, size


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (312, "312 B"),
        (999.4, "999 B"),
        (999.6, "1.0 kB"),
        (4_249, "4.2 kB"),
        (9_960, "10 kB"),
        (37_400_000, "37 MB"),
        (999_600_000, "1.0 GB"),
        (2.5e15, "2500 TB"),
    ],
)
def test_sizes(count, text):
    assert size(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.314, "0.31 s"), (12.44, "12.4 s"), (432, "7 min 12 s"), (11_100, "3 h 5 min")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_columns_are_aligned_and_escaped():
    rows = [["a", "<1>"], ["longer", "2"]]
    assert aligned(["name", "count"], rows) == ["  name    count", "  a       <1>", "  longer  2"]
    assert aligned(["name"], []) == []
    assert "<td>&lt;1&gt;</td>" in as_html(["name", "count"], rows)
