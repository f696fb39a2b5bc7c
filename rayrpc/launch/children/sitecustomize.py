"""Put rayrpc in place in a Python process that a program has started, when it imports torch.

Python imports this module by its name, before anything else runs; see the package.  A process that
does not import torch is left as it is, and so are Ray's own.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Callable
from typing import Any

_SHIM = "RAYRPC_INTERNAL_SHIM"


class _AfterTorch(importlib.abc.MetaPathFinder):
    """Finds torch as others do, and enters the shim when torch is loaded.

    If that is while rayrpc itself is being loaded, it does so at a later import.

    Args:
        text (str): the shim; one that another value has replaced meanwhile is not entered.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._is_due = False

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        """Return torch's spec."""
        if self._is_due:
            self._enter()
            return None
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(fullname)
        sys.meta_path.insert(0, self)
        if spec is not None and spec.loader is not None:
            load: Callable[[Any], None] = spec.loader.exec_module

            def load_and_enter(module: Any) -> None:
                load(module)
                self._is_due = True
                self._enter()

            spec.loader.exec_module = load_and_enter
        return spec

    def _enter(self) -> None:
        if any(_is_loading(name) for name in list(sys.modules) if name.startswith("rayrpc")):
            return
        sys.meta_path.remove(self)
        if os.environ.get(_SHIM) != self._text:
            return
        try:
            process = importlib.import_module("rayrpc.launch.process")
        except ImportError as exc:
            sys.stderr.write(
                f"rayrpc: process {os.getpid()} ({sys.executable}) uses torch's own RPC, since "
                f"rayrpc cannot be imported there: {exc}. Install rayrpc for that Python.\n"
            )
        else:
            process.enter_in_child(self._text)


def _is_loading(name: str) -> bool:
    return bool(getattr(getattr(sys.modules.get(name), "__spec__", None), "_initializing", False))


def _load_next() -> None:
    """Load the ``sitecustomize`` that this one hides."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != here]
    mine = sys.modules.pop("sitecustomize", None)
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module("sitecustomize")
    if mine is not None:
        sys.modules.setdefault("sitecustomize", mine)


def _is_of_ray() -> bool:
    part = os.path.join("", "ray", "_private", "")
    return any(part in argument for argument in sys.orig_argv[:4])


if __name__ == "sitecustomize":
    _load_next()
    if _SHIM in os.environ and not _is_of_ray():
        sys.meta_path.insert(0, _AfterTorch(os.environ[_SHIM]))
