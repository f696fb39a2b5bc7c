"""Keep what workers print in files, one a worker."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from rayrpc.launch.display import Text

__all__ = ["LogFiles"]

logger = logging.getLogger(__name__)

_begun: set[Path] = set()  # files that this process has written to


class LogFiles:
    """The files ``<worker>.log`` in a folder; a program writes over those of an earlier one.

    A file that cannot be written is logged once; the others go on.

    Args:
        folder (str): made if it does not exist.
    """

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder).expanduser()
        self._files: dict[str, BinaryIO | None] = {}  # None: it cannot be written

    def write(self, texts: Iterable[Text]) -> None:
        """Write texts to their workers' files."""
        for worker, fd, data in texts:
            if fd in (1, 2) and data:
                file = self._files[worker] if worker in self._files else self._open(worker)
                if file is not None:
                    try:
                        file.write(data)
                        file.flush()
                    except OSError as exc:
                        self._give_up(worker, exc)

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            if file is not None:
                file.close()
        self._files.clear()

    def _open(self, worker: str) -> BinaryIO | None:
        path = self._folder / (re.sub(r"[^\w.-]", "_", worker) + ".log")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            file = self._files[worker] = path.open("ab" if path in _begun else "wb")
        except OSError as exc:
            self._give_up(worker, exc)
            return None
        _begun.add(path)
        return file

    def _give_up(self, worker: str, error: OSError) -> None:
        file, self._files[worker] = self._files.get(worker), None
        if file is not None:
            with contextlib.suppress(OSError):  # what it still holds is lost
                file.close()
        logger.warning("what %r prints is not kept in %s: %s", worker, self._folder, error)
