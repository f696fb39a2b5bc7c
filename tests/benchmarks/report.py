"""Sum up the rounds of a benchmark and show them: a table, a chart, a file."""

from __future__ import annotations

import contextlib
import json
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cluster import about_text
from measures import Quantity

__all__ = ["Round", "print_table", "summary", "write_chart", "write_json"]

Round = dict[str, dict[str, float]]  # by row, by column

COLORS = {
    "hosted": "#1f5fa8",
    "attached": "#7fb2e5",
    "raw-actor": "#b5b5b5",
    "monarch": "#7b4fa3",
}
OTHER_COLOR = "#5b5b5b"
BASE_COLOR = "#e08a2e"


def summary(
    rounds: list[Round],
    rows: Mapping[str, Quantity],
    against: Mapping[str, tuple[str, ...]],
    references: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return what is to be told of all rounds.

    Args:
        rounds: what was measured.
        rows: what there is, by row.
        against: by column, those that it is compared with.
        references: by row, the row whose result, taken twice, is told as a share of this one's.

    Returns:
        ``medians`` by row and column; ``ratios`` of times per call by row and "column/other";
        ``shares`` by row and column.
    """
    references = references or {}
    measured = list(dict.fromkeys(row for each in rounds for row in each))
    pairs = [(column, other) for column, others in against.items() for other in others]

    def ratio(row: str, column: str, other: str) -> Callable[[Round], float]:
        cost = rows[row].cost
        return lambda each: cost(each[row][column]) / cost(each[row][other])

    def share(row: str, column: str) -> Callable[[Round], float]:
        return lambda each: 2 * each[references[row]][column] / each[row][column]

    def result(row: str, column: str) -> Callable[[Round], float]:
        return lambda each: each[row][column]

    return {
        "medians": {
            row: _medians(rounds, {column: result(row, column) for column in against})
            for row in measured
        },
        "ratios": {
            row: _medians(rounds, {f"{a}/{b}": ratio(row, a, b) for a, b in pairs})
            for row in measured
            if row not in references.values()
        },
        "shares": {
            row: _medians(rounds, {column: share(row, column) for column in against})
            for row in references
            if row in measured
        },
    }


def _medians(rounds: list[Round], values: dict[str, Callable[[Round], float]]) -> dict[str, float]:
    """Return the median of each value over the rounds that have what it takes."""
    medians: dict[str, float] = {}
    for key, value in values.items():
        found = []
        for each in rounds:
            with contextlib.suppress(KeyError):
                found.append(value(each))
        if found:
            medians[key] = statistics.median(found)
    return medians


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _keys(by_row: dict[str, dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(key for values in by_row.values() for key in values))


def print_table(report: dict[str, Any], rows: Mapping[str, Quantity]) -> None:
    """Print medians and ratios, a line a row."""
    medians, ratios = report["medians"], report["ratios"]
    columns, pairs = _keys(medians), _keys(ratios)
    lines = [["", "unit", *columns, *pairs]]
    for row, values in medians.items():
        cells = [_number(values.get(column)) for column in columns]
        times = [ratios.get(row, {}).get(pair) for pair in pairs]
        cells += ["-" if each is None else f"{each:.2f}" for each in times]
        lines.append([rows[row].title, rows[row].unit, *cells])
    for row, values in report["shares"].items():
        cells = [f"{values[c] * 100:.0f}" if c in values else "-" for c in columns]
        lines.append([f"{row}: share of memcpy", "%", *cells, *["-" for _ in pairs]])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        first = [text.ljust(width) for text, width in zip(line[:2], widths[:2], strict=True)]
        rest = [text.rjust(width) for text, width in zip(line[2:], widths[2:], strict=True)]
        print("  ".join(first + rest).rstrip())
    print(
        f"medians of {len(report['rounds'])} round(s) or turns; ratios are of times: above 1 is "
        "slower",
        flush=True,
    )


def write_json(report: dict[str, Any], path: Path) -> None:
    """Write all results."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n")


def write_chart(
    report: dict[str, Any], rows: Mapping[str, Quantity], titles: Mapping[str, str], path: Path
) -> None:
    """Draw the times per call beside those of one column, a group of bars a row.

    Args:
        report: what was measured.
        rows: what there is, by row.
        titles: of the column whose times are 1, and of those that are drawn.
        path: of the PNG.
    """
    base, *others = titles
    ratios = {
        row: {column: values.get(f"{column}/{base}") for column in others}
        for row, values in report["ratios"].items()
    }
    shown = [row for row, values in ratios.items() if any(values.values())]
    drawn = [column for column in others if any(ratios[row][column] for row in shown)]
    if not drawn:
        return
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator, NullLocator

    figure, axis = plt.subplots(figsize=(10, 1.6 + 0.42 * len(shown)), layout="constrained")
    axis.set_xscale("log")
    thick = 0.82 / len(drawn)
    for number, column in enumerate(drawn):
        values = [ratios[row][column] or 1 for row in shown]
        shift = (number - (len(drawn) - 1) / 2) * thick
        bars = axis.barh(
            [place + shift for place in range(len(shown))],
            [value - 1 for value in values],
            thick,
            left=1,
            color=COLORS.get(column, OTHER_COLOR),
            label=titles[column],
        )
        names = [f"{value:.2g}" if value < 10 else f"{value:.0f}" for value in values]
        missing = [ratios[row][column] is None for row in shown]
        names = ["" if gone else name for gone, name in zip(missing, names, strict=True)]
        axis.bar_label(bars, names, padding=3, fontsize=7)
    axis.axvline(1, color=BASE_COLOR, linewidth=1.5, label=f"{titles[base]} = 1")
    low, high = axis.get_xlim()
    axis.set_xlim(min(low / 1.3, 0.5), max(high * 1.3, 2))
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.xaxis.set_major_formatter("{x:g}")
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_yticks(range(len(shown)), [rows[row].title for row in shown], fontsize=9)
    axis.invert_yaxis()
    axis.set_xlabel("time per call, log scale: to the left of the line is faster", fontsize=9)
    axis.tick_params(axis="y", length=0)
    axis.spines[["top", "right", "left"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=len(titles), frameon=False, fontsize=9)
    figure.supxlabel(about_text(report["about"]), fontsize=7, color="#777777")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    plt.close(figure)
