"""The checks of a call, beside those that torch makes of the same call."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from rayrpc._torchscript.signature import Signature


class Point(NamedTuple):
    x: int
    y: int


@torch.jit.script
def nothing():
    return ()


@torch.jit.script
def scalars(i: int, f: float, b: bool, s: str, n: int | None = None, g: float = 2.0):
    return i, f, b, s, n, g


@torch.jit.script
def containers(
    ints: list[int], named: dict[str, float], pair: tuple[int, str], point: Point, t: Tensor
):
    return ints, named, pair, point, t


@torch.jit.script
def untyped(x, y=torch.tensor([3, 3])):
    return x, y


GOOD: list = [
    (nothing, (), {}),
    (scalars, (1, 2, True, "s"), {}),
    (scalars, (1, 2.5, False, ""), {"g": 1, "n": 3}),
    (scalars, (), {"s": "s", "b": True, "f": 1.0, "i": 0}),
    (containers, ([1], {"a": 1}, (1, "x"), Point(1, 2), torch.ones(2)), {}),
    (untyped, (torch.ones(2),), {}),
    (untyped, (torch.ones(2),), {"y": torch.ones(1)}),
]
BAD: list = [
    (nothing, (1,), {}),
    (scalars, (1, 2.0, True), {}),
    (scalars, (1, 2.0, True, "s", None, 1.0, 7), {}),
    (scalars, ("1", 2.0, True, "s"), {}),
    (scalars, (1, 2.0, True, "s"), {"other": 1}),
    (scalars, (1, 2.0, True, "s"), {"i": 1}),
    (scalars, (1, 2.0, True, "s", "three"), {}),
    (containers, ([1.5], {"a": 1}, (1, "x"), Point(1, 2), torch.ones(2)), {}),
    (containers, ([1], {1: 1}, (1, "x"), Point(1, 2), torch.ones(2)), {}),
    (containers, ([1], {"a": 1}, (1,), Point(1, 2), torch.ones(2)), {}),
    (containers, (), {}),
]


@pytest.mark.parametrize(("function", "args", "kwargs"), GOOD)
def test_arguments_are_those_that_compiled_code_gets(function, args, kwargs):
    values = Signature(function.schema).bind(args, kwargs)
    expected = function(*args, **kwargs)
    assert repr(values) == repr(expected)
    assert [type(value).__name__ for value in values] == [
        type(value).__name__ for value in expected
    ]


@pytest.mark.parametrize(("function", "args", "kwargs"), BAD)
def test_an_error_is_torchs(function, args, kwargs):
    with pytest.raises(RuntimeError) as torchs:
        function(*args, **kwargs)
    with pytest.raises(RuntimeError) as ours:
        Signature(function.schema).bind(args, kwargs)
    assert str(ours.value) == str(torchs.value)


def test_a_list_is_a_copy_as_for_compiled_code():
    ints = [1]
    values = Signature(containers.schema).bind((ints, {}, (1, "x"), Point(1, 2), torch.ones(1)), {})
    assert values[0] == ints and values[0] is not ints


def test_a_tensor_is_the_very_one():
    tensor = torch.ones(2)
    assert Signature(untyped.schema).bind((tensor,), {})[0] is tensor


def test_rrefs_are_checked_and_are_the_very_ones(worker_a):
    from torch.distributed.rpc import RRef

    @torch.jit.script
    def take(
        rref: RRef[Tensor],
        rrefs: list[RRef[Tensor]],
        named: dict[str, RRef[Tensor]],
        maybe: RRef[Tensor] | None = None,
    ) -> int:
        return 0

    signature = Signature(take.schema)
    rref = RRef(1)
    assert signature.bind((rref, [rref], {"a": rref}), {}) == (rref, [rref], {"a": rref}, None)
    assert signature.bind((rref, [], {}, rref), {})[3] is rref
    for args in ((1, [], {}), (rref, [1], {}), (rref, [], {"a": 1}), (rref, [], {}, 1)):
        with pytest.raises(RuntimeError, match=r"take\(\) Expected a value of type '.*RRef\["):
            signature.bind(args, {})


def test_a_named_tuple_with_rrefs_keeps_its_class(worker_a):
    from torch.distributed.rpc import RRef

    class Pair(NamedTuple):
        rref: RRef[Tensor]
        number: int

    @torch.jit.script
    def take(pair: Pair, plain: tuple[RRef[Tensor], int]) -> int:
        return Pair(pair.rref, pair.number).number

    signature = Signature(take.schema)
    pair = Pair(RRef(torch.ones(1)), 2)
    assert signature.bind((pair, (pair.rref, 3)), {})[0] is pair
    for wrong in (3, (pair.rref,), (1, 2)):
        with pytest.raises(RuntimeError, match=r"take\(\) Expected a value of type"):
            signature.bind((wrong, (pair.rref, 3)), {})


def test_futures_are_the_very_ones():
    @torch.jit.script
    def take(future: torch.futures.Future[Tensor]):
        return future.wait()

    signature = Signature(take.schema)
    future = torch.futures.Future()
    assert signature.bind((future,), {})[0] is future
    with pytest.raises(RuntimeError, match=r"Expected a value of type 'Future\[Tensor\]'"):
        signature.bind((torch.ones(1),), {})
