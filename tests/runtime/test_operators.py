"""Operators of torch: what they refuse, and what they return."""

import pytest
import torch

from rayrpc._runtime.operators import as_schema_says, check_operator, run_operator

ONE = torch.ones(1)

REFUSED = {
    "too many arguments": (torch.add, (ONE, ONE, ONE, 4, 5), {}),
    "an unknown keyword": (torch.add, (ONE, 1), {"nothing": 1}),
    "a text": (torch.add, ("a", 1), {}),
    "an array": (torch.add, (ONE.numpy(), 1), {}),
    "a size that is a text": (torch.zeros, ("a",), {}),
}
TAKEN = {
    "a tensor and a number": (torch.add, (ONE, 1), {}),
    "numbers": (torch.add, (1, 1), {}),
    "shapes that do not fit": (torch.add, (torch.ones(2), torch.ones(3)), {}),
    "sizes without a list": (torch.zeros, (2, 2), {}),
    "no schema for all dtypes": (torch.tensor, ([1],), {}),
    "a function in C": (len, ("abc", 2), {}),
    "a function in Python": (torch.nn.functional.relu, (1, 2, 3), {}),
}


@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED)
def test_arguments_that_no_schema_takes_are_refused(call):
    with pytest.raises(RuntimeError, match="failed to match any schema"):
        check_operator(*call)


@pytest.mark.parametrize("call", TAKEN.values(), ids=TAKEN)
def test_other_calls_are_not(call):
    for _ in range(2):  # the second time it may be known
        check_operator(*call)


def test_a_known_call_of_other_types_is_checked_again():
    check_operator(torch.add, (ONE, 1), {})
    with pytest.raises(RuntimeError, match="schema"):
        check_operator(torch.add, (ONE, "1"), {})


def test_checking_draws_no_random_numbers():
    before = torch.get_rng_state()
    check_operator(torch.randn, (2, 2), {})
    assert torch.equal(torch.get_rng_state(), before)


def test_numbers_give_numbers():
    assert run_operator(torch.add, (1, 2), {}) == 3
    assert type(run_operator(torch.add, (1, 2), {})) is int
    assert type(run_operator(torch.add, (1, 2.5), {})) is float
    assert type(run_operator(torch.add, (ONE, 2), {})) is torch.Tensor
    assert run_operator(abs, (-2,), {}) == 2 and run_operator(max, (1, 2), {}) == 2


def test_several_tensors_are_a_list():
    assert type(run_operator(torch.chunk, (torch.ones(4), 2), {})) is list
    assert type(as_schema_says(torch.split, torch.split(torch.ones(4), 2))) is list


def test_several_results_keep_their_type():
    assert type(run_operator(torch.max, (torch.ones(2, 2), 0), {})) is torch.return_types.max
    assert type(as_schema_says(len, (1, 2))) is tuple
    assert type(run_operator(divmod, (7, 2), {})) is tuple


def test_a_type_error_of_an_operator_is_a_runtime_error():
    with pytest.raises(RuntimeError, match="schema"):
        run_operator(torch.add, ("a", "b"), {})
    with pytest.raises(TypeError):
        run_operator(len, (5,), {})
