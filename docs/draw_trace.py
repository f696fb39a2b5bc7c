"""Draw a trace of a few calls as Perfetto shows it: ``python docs/draw_trace.py [TRACE.json]``.

Without a trace, three workers record one. ``docs/trace.png`` is drawn anew.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import torch
from matplotlib import pyplot as plt
from matplotlib.patches import Patch

PICTURE = Path(__file__).with_name("trace.png")
COLORS = {"encode": "#e6b34d", "decode": "#e6b34d", "queued": "#c9c9c9", "reply": "#7aa874"}
SHORTEST_US = 20.0  # slice that is drawn
FUNCTION, CALL = "#4f81bd", "#b7cbe6"  # that runs, and that is waited for

Event = dict[str, Any]


def layer(x: torch.Tensor) -> torch.Tensor:
    """Take a while."""
    time.sleep(0.002)
    return x @ x


def forward(x: torch.Tensor) -> torch.Tensor:
    """Compute a part here, and the rest on the next worker."""
    import rayrpc as rpc

    return rpc.rpc_sync("worker1", layer, args=(layer(x),))


def record(path: Path) -> None:
    """Record a few calls among three workers."""
    import rayrpc as rpc

    rpc.start_workers(["worker0", "worker1"])
    x = torch.ones(64, 64)
    for recorded in (False, True):  # once before, so that all is connected
        with rpc.profile(path) if recorded else rpc.profile():
            rest = rpc.rpc_async("worker0", layer, args=(x,))
            rpc.rpc_sync("worker0", forward, args=(x,))
            rest.wait()
    rpc.shutdown()


def slices(events: list[Event]) -> list[Event]:
    """Return the slices of threads, and those beside the threads as slices of thread 0."""
    begun = {each["id"]: each for each in events if each["ph"] == "b"}
    beside = [
        {**begun[each["id"]], "dur": each["ts"] - begun[each["id"]]["ts"]}
        for each in events
        if each["ph"] == "e"
    ]
    return beside + [each for each in events if each["ph"] == "X"]


def color(event: Event) -> str:
    """Return the color of a slice by what it is."""
    if "->" in event["name"]:
        return CALL
    return COLORS.get(event["name"].partition(":")[0], FUNCTION)


def row(event: Event) -> tuple[int, int]:
    """Return the process and the thread of an event."""
    return event["pid"], event["tid"]


def levels(shown: list[Event]) -> list[int]:
    """Return of each slice how many longer ones of its row it is inside of."""
    return [
        sum(
            row(other) == row(each)
            and other["ts"] <= each["ts"]
            and other["ts"] + other["dur"] >= each["ts"] + each["dur"]
            and other["dur"] > each["dur"]
            for other in shown
        )
        for each in shown
    ]


def draw(trace: dict[str, Any], picture: Path) -> None:
    """Draw a trace: a block for each process, rows for each thread, what is inside below."""
    events = trace["traceEvents"]
    shown = [each for each in slices(events) if each["dur"] >= SHORTEST_US]
    begin = min(each["ts"] for each in shown)
    names = {each["pid"]: each["args"]["name"] for each in events if each["name"] == "process_name"}
    placed = list(zip(shown, levels(shown), strict=True))
    at: dict[tuple[int, int], float] = {}
    bottom = 0.0
    rows = {*map(row, shown), *(row(event) for event in events if event["ph"] in "Xf")}
    for each in sorted(rows):
        at[each] = bottom
        bottom -= 1.4 + max((level for event, level in placed if row(event) == each), default=0)
    figure, axes = plt.subplots(figsize=(11, 0.5 - 0.33 * bottom), layout="constrained")
    for event, level in placed:
        left, width = (event["ts"] - begin) / 1e3, event["dur"] / 1e3
        where = at[row(event)] - level
        axes.barh(where, width, 0.9, left, color=color(event), edgecolor="white", linewidth=0.5)
        name = event["name"].replace("__main__.", "")
        if width > 0.075 * len(name):
            axes.text(left + 0.03, where, name, va="center", fontsize=7)

    def point(event: Event) -> tuple[float, float]:
        """Return where an arrow begins or ends: at the innermost slice there."""
        over = [
            level
            for each, level in placed
            if row(each) == row(event) and each["ts"] <= event["ts"] < each["ts"] + each["dur"]
        ]
        return (event["ts"] - begin) / 1e3, at[row(event)] - max(over, default=0)

    arrow = {"arrowstyle": "->", "color": "#444444", "shrinkA": 0, "shrinkB": 0}
    starts = {each["id"]: each for each in events if each["ph"] == "s"}
    for end in (each for each in events if each["ph"] == "f"):
        axes.annotate("", point(end), point(starts[end["id"]]), arrowprops=arrow)
    labels = [
        f"{names[pid].partition(' (')[0]}: {'calls' if tid == 0 else 'thread'}" for pid, tid in at
    ]
    axes.set_yticks(list(at.values()), labels, fontsize=8)
    axes.set_xlabel("ms")
    kinds = {"a call": CALL, "the function": FUNCTION, "encoding, decoding": COLORS["encode"]}
    axes.legend([Patch(color=each) for each in kinds.values()], kinds, fontsize=8, frameon=False)
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.savefig(picture, dpi=110)
    plt.close(figure)


def main() -> None:
    """Draw the trace that the command names, or one that is recorded for it."""
    if len(sys.argv) > 1:
        draw(json.loads(Path(sys.argv[1]).read_text()), PICTURE)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        record(path)
        draw(json.loads(path.read_text()), PICTURE)


if __name__ == "__main__":
    main()
