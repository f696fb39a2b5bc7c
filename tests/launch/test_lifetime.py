"""How long workers live: what is refused."""

import dataclasses

import pytest

from rayrpc.errors import ConfigError
from rayrpc.launch.lifetime import Lifetime


def test_by_default_workers_live_as_long_as_what_starts_them():
    assert Lifetime() == Lifetime(detached=False, max_restarts=0, on_start=None)


@pytest.mark.parametrize("limit", [-1, 0, 1, 10**6])
def test_a_number_of_restarts_or_no_limit_is_accepted(limit):
    assert Lifetime(max_restarts=limit).max_restarts == limit


@pytest.mark.parametrize("limit", [-2, True, False, 1.0, "3", None])
def test_another_number_of_restarts_is_refused(limit):
    with pytest.raises(ConfigError, match="max_restarts must be a number from 0, or -1 for no lim"):
        Lifetime(max_restarts=limit)


@pytest.mark.parametrize("limit", [1, -1])
def test_detached_workers_have_no_restarts(limit):
    assert Lifetime(detached=True).detached
    with pytest.raises(ConfigError, match="leave out max_restarts, or detached"):
        Lifetime(detached=True, max_restarts=limit)


def test_what_runs_on_start_is_a_function():
    assert Lifetime(on_start=print).on_start is print
    with pytest.raises(TypeError, match=r"on_start must be a function, got 'print'"):
        Lifetime(on_start="print")  # type: ignore[arg-type]


def test_it_does_not_change_and_another_one_is_checked():
    lifetime = Lifetime(detached=True)
    with pytest.raises(dataclasses.FrozenInstanceError):
        lifetime.detached = False  # type: ignore[misc]
    with pytest.raises(ConfigError):
        dataclasses.replace(lifetime, max_restarts=1)
