"""The examples of docstrings, run."""

from __future__ import annotations

import doctest
import re
from typing import Any

__all__ = ["run_example"]

_OF_RAY = re.compile(r"\x1b\[\d+m\(raylet\)\x1b\[0m ")


class _Checker(doctest.OutputChecker):
    """Compare without what Ray prints to its drivers at any time."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        own = [line for line in got.splitlines(keepends=True) if not _OF_RAY.match(line)]
        return super().check_output(want, "".join(own), optionflags)


def run_example(documented: object, **names: Any) -> None:
    """Run the example of a docstring; fail where it prints something else.

    Args:
        documented: has the docstring.
        names: that the example uses.
    """
    (example,) = doctest.DocTestFinder().find(documented, "example", globs=names)
    output: list[str] = []
    results = doctest.DocTestRunner(_Checker()).run(example, out=output.append)
    assert results.attempted and not results.failed, "".join(output)
