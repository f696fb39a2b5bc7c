"""What a call runs: functions of Python, scripted ones, and operators of torch."""

from typing import Any

import pytest
import torch

from rayrpc._runtime import running
from rayrpc._runtime.invocation import Invocation
from rayrpc.functions import async_execution


def run(func, *args, is_async=False, **kwargs):
    return running.run(Invocation(func, args, kwargs), is_async)


def join(*args, **kwargs):
    return args, kwargs


@torch.jit.script
def scripted(x: torch.Tensor, factor: int = 2) -> torch.Tensor:
    return x * factor


@torch.jit.script
def fails(x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        raise RuntimeError("too large")
    return x


@torch.jit.script
def five(x: torch.Tensor) -> torch.Tensor:
    return x.view(5)


@async_execution
@torch.jit.script
def scripted_later(x: torch.Tensor) -> torch.jit.Future[torch.Tensor]:
    return torch.jit.fork(scripted, x)


class TestPython:
    def test_a_function_returns_what_it_returns(self):
        assert run(join, 1, x=2) == ((1,), {"x": 2})
        pair = torch.ones(1), torch.ones(2)
        assert run(lambda: pair) is pair

    def test_an_error_of_a_function_is_its_own(self):
        with pytest.raises(ZeroDivisionError):
            run(lambda: 1 / 0)
        with pytest.raises(TypeError, match="unexpected keyword"):
            run(abs_of, 1, other=2)

    def test_an_async_function_returns_its_future(self):
        future = torch.futures.Future()
        func: Any = lambda: future
        assert run(async_execution(func), is_async=True) is future


def abs_of(x):
    return abs(x)


class TestOperators:
    def test_one_of_numbers_returns_a_number(self):
        assert run(torch.add, 1, 2) == 3 and type(run(torch.add, 1, 2)) is int

    def test_several_tensors_are_a_list(self):
        assert type(run(torch.unbind, torch.ones(2))) is list
        assert type(run(torch.split, torch.ones(4), 2)) is list  # whose function is Python's

    def test_arguments_that_it_does_not_take_are_torchs_error(self):
        with pytest.raises(RuntimeError, match="failed to match any schema"):
            run(torch.add, "text", 2)

    def test_other_functions_in_c_are_called(self):
        assert run(len, "abc") == 3
        with pytest.raises(TypeError):
            run(len, 3)


class TestScripted:
    def test_it_runs_compiled(self):
        assert run(scripted, torch.ones(1)).item() == 2
        assert run(scripted, torch.ones(1), factor=5).item() == 5

    def test_a_number_may_be_given_for_a_tensor(self):
        for result in (run(scripted, 3), run(scripted, x=3, factor=2)):
            assert isinstance(result, torch.Tensor) and result.item() == 6
        compiled = torch.jit.CompilationUnit("def double(x: Tensor):\n    return x * 2\n")
        assert run(compiled.double, 3).item() == 6

    def test_an_error_of_its_own_runs_it_once(self):
        runs = []

        @torch.jit.ignore
        def note(x: torch.Tensor) -> None:
            runs.append(x)
            scripted("text")

        @torch.jit.script
        def fails(x: torch.Tensor):
            note(x)

        with pytest.raises(RuntimeError, match="Expected a value of type 'Tensor'"):
            run(fails, torch.ones(1))
        assert len(runs) == 1

    def test_a_number_beside_a_name_that_it_does_not_take_is_torchs_error(self):
        with pytest.raises(RuntimeError, match="Unknown keyword argument 'other'"):
            run(scripted, 3, other=1)

    def test_all_else_of_another_type_is_refused(self):
        for args in (("text",), (torch.ones(1), "two"), (3, 2.5)):
            with pytest.raises(RuntimeError, match="Expected a value of type"):
                run(scripted, *args)

    def test_an_error_of_its_own_is_not_run_again(self):
        with pytest.raises(RuntimeError, match="failed in the TorchScript interpreter"):
            run(five, torch.ones(1))
        with pytest.raises(torch.jit.Error, match="too large"):
            run(fails, torch.ones(1))

    def test_a_traced_one_runs(self):
        traced = torch.jit.trace(lambda x: x * 2, torch.ones(1))
        assert run(traced, torch.ones(1)).item() == 2

    def test_an_async_one_is_run_beneath_its_wrapper(self):
        future = run(scripted_later, torch.ones(1), is_async=True)
        assert future.wait().item() == 2
