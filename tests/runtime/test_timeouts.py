"""The timeouts of calls, as users give them."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from rayrpc._runtime.timeouts import MIN_TIMEOUT_SECONDS, resolve_timeout
from rayrpc.errors import ConfigError


@pytest.mark.parametrize("default", [None, 7.0])
def test_minus_one_is_the_default(default):
    assert resolve_timeout(-1, default) == default
    assert resolve_timeout(-1.0, default) == default


@pytest.mark.parametrize("timeout", [0, 0.0, MIN_TIMEOUT_SECONDS / 2, math.inf])
def test_zero_less_than_a_millisecond_and_infinity_are_none(timeout):
    assert resolve_timeout(timeout, 7.0) is None


@pytest.mark.parametrize("timeout", [2, Fraction(2), np.float32(2), torch.tensor(2)])
def test_any_real_number_is_one_in_seconds(timeout):
    seconds = resolve_timeout(timeout, None)
    assert seconds == 2.0 and type(seconds) is float


@pytest.mark.parametrize("timeout", [-2, -0.5, math.nan])
def test_a_negative_one_is_refused(timeout):
    with pytest.raises(ConfigError, match=r"timeout must be 0 \(none\) or more seconds, got"):
        resolve_timeout(timeout, 7.0)


@pytest.mark.parametrize("timeout", ["2", None, torch.ones(2)])
def test_what_is_no_number_is_refused(timeout):
    with pytest.raises(TypeError, match="timeout must be a number of seconds"):
        resolve_timeout(timeout, 7.0)
