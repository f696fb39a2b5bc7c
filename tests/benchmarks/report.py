"""Show what was measured: a table, a chart."""

from __future__ import annotations

from typing import Any

from measures import ROWS

__all__ = ["print_table", "write_plot"]

COLORS = {
    "raw-actor": "#9db8d2",
    "raw-driver": "#c9c9c9",
    "hosted": "#1f5fa8",
    "attached": "#5b5b5b",
    "tensorpipe": "#e08a2e",
}
OTHER_COLOR = "#7b4fa3"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _keys(by_row: dict[str, dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(key for values in by_row.values() for key in values))


def print_table(report: dict[str, Any]) -> None:
    """Print medians and ratios, a line a row."""
    medians, ratios = report["medians"], report["ratios"]
    columns, pairs = _keys(medians), _keys(ratios)
    lines = [["", "unit", *columns, *pairs]]
    for row, values in medians.items():
        cells = [_number(values.get(column)) for column in columns]
        times = [ratios[row].get(pair) for pair in pairs]
        cells += ["-" if each is None else f"{each:.2f}" for each in times]
        lines.append([ROWS[row].title, ROWS[row].unit, *cells])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        first = [text.ljust(width) for text, width in zip(line[:2], widths[:2], strict=True)]
        rest = [text.rjust(width) for text, width in zip(line[2:], widths[2:], strict=True)]
        print("  ".join(first + rest).rstrip())
    print(
        f"medians of {len(report['rounds'])} round(s); ratios are of times per call: above 1 is "
        "slower"
    )


def write_plot(report: dict[str, Any], path: str) -> None:
    """Draw a panel a row, a bar a column."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    medians = report["medians"]
    wide = min(5, len(medians))
    deep = -(-len(medians) // wide)
    figure, axes = plt.subplots(deep, wide, figsize=(3.4 * wide, 3.2 * deep), squeeze=False)
    for axis in axes.flat[len(medians) :]:
        axis.axis("off")
    for axis, (row, values) in zip(axes.flat, medians.items(), strict=False):
        colors = [COLORS.get(column, OTHER_COLOR) for column in values]
        bars = axis.bar(range(len(values)), list(values.values()), color=colors)
        axis.bar_label(bars, [_number(value) for value in values.values()], fontsize=7)
        better = "more is better" if ROWS[row].unit == "/s" else "less is better"
        axis.set_title(f"{ROWS[row].title}\n({ROWS[row].unit}, {better})", fontsize=8)
        axis.set_xticks(range(len(values)), list(values), rotation=30, ha="right", fontsize=7)
        axis.tick_params(axis="y", labelsize=7)
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(y=0.15)
    about = report["about"]
    figure.suptitle(", ".join(f"{key} {value}" for key, value in about.items()), fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)
