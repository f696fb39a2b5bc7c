"""Start one of Ray's daemons: the program that a node runs in place of the daemon's own.

Run as ``python start_daemon.py PROGRAM ARGUMENT...``, it runs that program without the package
``rfc3987_syntax``, which JupyterLab brings.  Ray imports ``jsonschema``, which imports it where it
is installed; that compiles a grammar, for seconds, in each daemon.  Ray checks no text by it.

It is run by its path, for each daemon, so it imports little, and nothing of rayrpc.
"""

from __future__ import annotations

import os
import runpy
import sys

__all__ = ["LEFT_OUT", "main"]

#: the package that a daemon does not import
LEFT_OUT = "rfc3987_syntax"


def main(arguments: list[str]) -> None:
    """Run a daemon.

    Args:
        arguments: the path of its program, and the program's own arguments.
    """
    sys.modules[LEFT_OUT] = None  # type: ignore[assignment]  # its import fails
    sys.argv = arguments
    sys.path[0] = os.path.dirname(arguments[0])
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
