"""The examples of docstrings, run."""

from __future__ import annotations

import doctest
from typing import Any

__all__ = ["run_example"]


def run_example(documented: object, **names: Any) -> None:
    """Run the example of a docstring; fail where it prints something else.

    Args:
        documented: has the docstring.
        names: that the example uses.
    """
    (example,) = doctest.DocTestFinder().find(documented, "example", globs=names)
    output: list[str] = []
    results = doctest.DocTestRunner().run(example, out=output.append)
    assert results.attempted and not results.failed, "".join(output)
