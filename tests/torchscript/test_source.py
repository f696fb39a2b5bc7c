"""TorchScript's own source as Python: it does what the compiled code does."""

import copy
import math

import pytest
import torch
from torch import Tensor
from torch.jit._state import _python_cu

from rayrpc._torchscript.source import compiled_source


def as_python(code):
    return compiled_source(code, code.name, _python_cu.find_function)


@torch.jit.script
def arithmetic(i: int, j: int, x: float):
    a = i // j, i % j, i / j, i * j, i - j, -i, i**2
    b = i < j, i <= j, i > j, i == j, i != j, not i > j, (i > 0 and j > 0) or i == j
    return a, b, x * i, min(i, j), max(i, j), abs(i - j), math.sqrt(x), int(x), float(i), bool(i)


@torch.jit.script
def bits(i: int, j: int):
    return i & j, i | j, i ^ j, i << 1, i >> 1


@torch.jit.script
def lists(items: list[int]):
    items.append(7)
    items.extend([8, 9])
    items.insert(0, 5)
    last = items.pop()
    items[1] = 40
    del items[0]
    doubled = [item * 2 for item in items]
    total = 0
    for position, item in enumerate(items):
        total += position * item
    items.sort()
    return items, last, doubled, total, len(items), items[1:3], items[-1], 7 in items, items + [1]


@torch.jit.script
def dicts(named: dict[str, int]):
    named["z"] = 26
    found = named.get("a", 1)
    keys = [key for key in named]
    items = [(key, value) for key, value in named.items()]
    del named["z"]
    return named, found, keys, items, "z" in named, len(named), list(named.values())


@torch.jit.script
def strings(text: str, number: int):
    parts = text.split(",")
    return parts, text.upper(), "-".join(parts), f"{text}:{number}", text[1:], text + "!", len(text)


@torch.jit.script
def loops(n: int):
    total = 0
    while True:
        total += n
        if total > 10:
            break
        if total % 2 == 0:
            continue
        total += 1
    for i in range(2, n, 2):
        total += i
    return total


@torch.jit.script
def tensors(x: Tensor, n: int):
    made = torch.tensor(n), torch.tensor([1.5, 2.5]), torch.zeros([2, n], dtype=torch.int64)
    y = x + 1
    y += n
    y[0] = 7
    y[1:] = 3
    kinds = x.dtype == y.dtype, x.device, x.to(torch.float64), x.to(torch.device("cpu"))
    return made, y, x.size(0), x.shape, y.sum().item(), torch.stack([x, y]), x[0], kinds


@torch.jit.script
def optional(value: int | None) -> int:
    if value is None:
        return -1
    return value + 1


@torch.jit.script
def helper(x: int) -> int:
    return x * 3


@torch.jit.script
def calls(x: int) -> int:
    return helper(x) + torch.jit.wait(torch.jit.fork(helper, x))


@torch.jit.script
def raises(x: int) -> int:
    if x > 1:
        raise ValueError(f"{x} is too large")
    assert x != 0, "it is none"
    return x


def str_of(value):
    return getattr(value, "name", None)


CALLS: list = [
    *[(arithmetic, (i, j, 2.25)) for i, j in ((7, 2), (-7, 2), (7, -2), (3, 3))],
    *[(bits, (6, 3)), (lists, ([3, 1, 2],)), (lists, ([],)), (dicts, ({"a": 3, "b": 4},))],
    *[(strings, ("a,b", 3)), (loops, (3,)), (loops, (8,)), (tensors, (torch.arange(3.0), 2))],
    *[(optional, (None,)), (optional, (4,)), (calls, (5,)), (raises, (1,))],
]


@pytest.mark.parametrize(("function", "args"), CALLS, ids=str_of)
def test_it_returns_what_compiled_code_returns(function, args):
    expected = function(*map(copied, args))
    assert repr(as_python(function)(*map(copied, args))) == repr(expected)


def copied(value):
    return value.clone() if isinstance(value, Tensor) else copy.copy(value)


@pytest.mark.parametrize(("value", "text"), [(2, "2 is too large"), (0, "it is none")])
def test_it_raises_what_compiled_code_raises(value, text):
    with pytest.raises(torch.jit.Error, match=text):
        raises(value)
    with pytest.raises(torch.jit.Error, match=text):
        as_python(raises)(value)


def test_a_list_that_it_gets_is_changed_in_place():
    items = [1]
    as_python(lists)(items)
    assert items[-1] == 40


def test_a_function_that_is_nowhere_cannot_be_called():
    python = compiled_source(calls, "calls", lambda name: None)
    with pytest.raises(RuntimeError, match=r"__torch__\..*helper of a loaded module cannot be"):
        python(1)
