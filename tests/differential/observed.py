"""What came of a probe, in a form in which two backends can be compared.

An outcome is JSON: a value's description, or an error's class, the classes above it and its text.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["agree", "describe", "describe_error"]

ADDRESS = re.compile(r"0x[0-9a-f]+")


def describe(value: Any) -> Any:
    """Describe a value: by its type, and by what it holds for the types that probes return."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return f"float {value!r}"
    if isinstance(value, BaseException):
        return describe_error(value)
    if isinstance(value, torch.Tensor):
        kind = f"{value.dtype} {list(value.shape)} {value.device.type} {value.requires_grad}"
        return {"tensor": kind, "values": repr(value.detach().tolist())}
    if isinstance(value, type):
        return f"class {value.__qualname__}"
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if isinstance(value, Mapping):
        items = [[describe(key), describe(each)] for key, each in value.items()]
        return {type(value).__qualname__: items}
    if isinstance(value, (list, tuple, set, frozenset)):
        members = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
        return {type(value).__qualname__: [describe(each) for each in members]}
    return f"a {type(value).__qualname__}"


def describe_error(error: BaseException) -> dict[str, Any]:
    """Describe an error by its class, the classes above it, and the start of its text."""
    classes = [each.__name__ for each in type(error).__mro__ if each is not object]
    return {"error": classes, "text": ADDRESS.sub("0x", str(error))[:2000]}


def agree(torchs: Any, ours: Any, words: tuple[str, ...] = ()) -> bool:
    """Return whether a program that handles torch's outcome handles ours.

    An error agrees with each error that is an instance of its class too: ``except`` finds it.

    Args:
        torchs: the outcome on torch's own RPC.
        ours: the outcome on rayrpc.
        words: what programs look for in the text of an error; each that is in torch's text, in
            any case of letters, has to be in ours.
    """
    if isinstance(torchs, dict) and "error" in torchs:
        if not isinstance(ours, dict) or torchs["error"][0] not in ours.get("error", ()):
            return False
        theirs = torchs["text"].lower()
        return all(word in ours["text"].lower() for word in words if word in theirs)
    if isinstance(torchs, dict) and isinstance(ours, dict):
        return torchs.keys() == ours.keys() and all(
            agree(torchs[key], ours[key], words) for key in torchs
        )
    if isinstance(torchs, list) and isinstance(ours, list):
        return len(torchs) == len(ours) and all(
            agree(one, other, words) for one, other in zip(torchs, ours, strict=True)
        )
    return bool(torchs == ours)
