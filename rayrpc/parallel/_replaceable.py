"""Packages in place of single modules, whose names can still be replaced from outside.

A module of machin is a package here.  Where a program or a test replaces a name of the module, as
``unittest.mock.patch("machin.parallel.assigner.GPUtil", ...)`` does, the files of the package that
use it have to see the new value.
"""

from __future__ import annotations

import sys
import types
from typing import Any

__all__ = ["make_replaceable"]

_MISSING: Any = object()


class _Package(types.ModuleType):
    """A package that replaces a name in its modules, too, where they have the same object."""

    def __setattr__(self, name: str, value: Any) -> None:
        replaced = self.__dict__.get(name, _MISSING)
        super().__setattr__(name, value)
        if replaced is _MISSING:
            return  # a new name: that of a module that has just been imported, mostly
        prefix = f"{self.__name__}."
        for module_name, module in list(sys.modules.items()):
            if module_name.startswith(prefix) and vars(module).get(name, _MISSING) is replaced:
                setattr(module, name, value)


def make_replaceable(package: str) -> None:
    """Let names of a package be replaced with effect in all of its modules.

    Args:
        package (str): its name, that of an imported package.
    """
    sys.modules[package].__class__ = _Package
