"""Functions of a script, which share their globals in a worker."""

import pytest

pytestmark = pytest.mark.usefixtures("ray_cluster")

MAIN = """
import sys
from rayrpc.parallel.pool import Pool

model, limits = None, {}


def load(value):
    global model
    model = value
    limits["most"] = 2 * value


def even(n):
    return n == 0 or odd(n - 1)


def odd(n):
    return n != 0 and even(n - 1)


def use(x):
    return x + model, limits["most"], even(x)


with Pool(1, load, (10,)) as pool:
    assert pool.map(use, [1, 2]) == [(11, 20, False), (12, 20, True)]
    assert pool.apply(lambda: model) == 10
    model = 5  # changed here, so it is changed there
    assert pool.apply(use, (1,)) == (6, 20, False)

    def even(n):
        return "new"

    assert pool.apply(use, (1,)) == (6, 20, "new")
print("done")
"""


def test_functions_of_a_script_share_their_globals(start, script):
    run = start(script(MAIN))
    assert run.end() == 0, run.output
    assert "done" in run.output
