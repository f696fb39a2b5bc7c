"""The folder that a program has on PYTHONPATH, for the Python processes that it starts.

Python imports ``sitecustomize`` from there when a process starts, whoever starts it.  This module
only edits PYTHONPATH: it loads neither torch nor Ray.
"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["with_folder", "without_folder"]

_FOLDER = str(Path(__file__).resolve().parent)


def with_folder(path: str) -> str:
    """Return a PYTHONPATH with the folder in front."""
    return os.pathsep.join(filter(None, [_FOLDER, without_folder(path)]))


def without_folder(path: str) -> str:
    """Return a PYTHONPATH without the folder."""
    return os.pathsep.join(entry for entry in path.split(os.pathsep) if entry != _FOLDER)
