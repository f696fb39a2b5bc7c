import os

import pytest
from simulation.fork_server import output_of

pytestmark = pytest.mark.process
SECONDS = 30.0


def test_it_returns_what_a_function_prints():
    assert output_of("builtins", "print", "a", 1, timeout=SECONDS) == "a 1\n"


def test_each_function_runs_in_a_process_of_its_own():
    first, second = (
        output_of("builtins", "exec", "import os\nprint(os.getpid())", timeout=SECONDS)
        for _ in range(2)
    )
    assert first != second != str(os.getpid())


def test_an_error_has_its_traceback():
    with pytest.raises(AssertionError, match=r"(?s)Traceback.*ValueError: invalid literal"):
        output_of("builtins", "int", "x", timeout=SECONDS)


def test_a_function_for_which_nobody_waits_any_more_is_ended():
    with pytest.raises(TimeoutError):
        output_of("time", "sleep", 2 * SECONDS, timeout=0.5)
    assert output_of("time", "time", timeout=SECONDS) == ""  # after the other


def test_the_end_of_the_process_is_an_error():
    with pytest.raises(AssertionError, match="_exit: its process ended"):
        output_of("os", "_exit", 0, timeout=SECONDS)
