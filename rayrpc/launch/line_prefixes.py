"""What is put before each line of a worker: its name, and its host if there are several."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from rayrpc.config import Settings

__all__ = ["line_prefixes"]

# Colours of a terminal: cyan, yellow, green, magenta, blue; red is for errors.
_COLOURS = (36, 33, 32, 35, 34)


def line_prefixes(hosts: Mapping[str, str], settings: Settings, by_default: bool) -> dict[str, str]:
    """Return the prefixes of workers, in colours on a terminal; empty if lines get none.

    Args:
        hosts: by worker, the name of its host.
        settings: say which workers' lines get prefixes.
        by_default: these workers' do, unless the settings say otherwise.
    """
    is_terminal = sys.stdout.isatty()
    wanted = {"always": True, "never": False}.get(settings.prefix_output, by_default or is_terminal)
    if not wanted:
        return {}
    shows_hosts = len(set(hosts.values())) > 1
    is_coloured = is_terminal and sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    prefixes = {}
    for number, (worker, host) in enumerate(hosts.items()):
        text = f"({worker} on {host})" if shows_hosts else f"({worker})"
        if is_coloured:
            text = f"\x1b[{_COLOURS[number % len(_COLOURS)]}m{text}\x1b[0m"
        prefixes[worker] = f"{text} "
    return prefixes
