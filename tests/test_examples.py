"""The examples run as their docstrings say, at a smaller size."""

import itertools
import socket

import pytest
from conftest import ROOT

EXAMPLES = ROOT / "examples"
ports = itertools.count(29600)  # parts of keys: no port is bound, except by collectives.py


@pytest.fixture
def run_example(ray_cluster, start):
    """Start ``rayrpc run examples/NAME ARGS``, in a group of the test's own."""

    def run_one(name, *arguments, port=None):
        return start(
            *("-m", "rayrpc", "run", str(EXAMPLES / name)),
            *arguments,
            MASTER_PORT=str(port or next(ports)),
        )

    return run_one


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "updates"), [("async", "80 updates"), ("batch", "40 updates")])
def test_the_parameter_server_learns(run_example, mode, updates):
    arguments = ("--mode", mode, "--trainers", "2", "--steps", "40", "--min-accuracy", "0.8")
    run = run_example("parameter_server.py", *arguments)
    assert run.end() == 0, run.output
    summary = run.wait_for(f"{mode}: ")
    assert updates in summary and "accuracy" in summary


@pytest.mark.slow
def test_an_example_that_misses_its_bound_fails(run_example):
    arguments = ("--trainers", "1", "--steps", "1", "--min-accuracy", "1.1")
    run = run_example("parameter_server.py", *arguments)
    assert run.end() == 1
    assert "is below 110.0%" in run.output and "ProcessRaisedException" in run.output


def test_two_processes_say_hello(run_example):
    port = next(ports)
    runs = [run_example("hello.py", "--rank", str(rank), port=port) for rank in range(2)]
    assert [run.end() for run in runs] == [0, 0], runs[0].output + runs[1].output
    for text in (
        "hello worker0, this is worker1",
        "rpc_async: [20.0, 20.0, 20.0]",
        "counter on worker1 is 42",
        "copy is 1042, original is 42",
        "worker0: done",
    ):
        assert text in runs[0].output
    assert "worker1: done" in runs[1].output


@pytest.mark.slow
def test_cartpole_draws_its_learning_curve(run_example, tmp_path):
    run = run_example(
        "cartpole.py",
        *("--observers", "2", "--envs-per-observer", "2", "--max-iterations", "2"),
        *("--target", "0", "--output", str(tmp_path)),
    )
    assert run.end() == 0, run.output
    assert "mean reward over the last" in run.output
    assert "2/2" in run.output and "RPC calls/s" in run.output  # the progress bar
    assert (tmp_path / "cartpole.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_training_goes_on_through_deaths(run_example, tmp_path):
    path = tmp_path / "elastic.png"
    run = run_example("elastic.py", "--updates", "300", "--plot", str(path))
    assert run.end() == 0, run.output
    assert "trainer0 trains again" in run.output and "ps goes on from update" in run.output
    assert "through 2 deaths" in run.output and "Traceback" not in run.output
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pipeline.py", "hybrid.py"])
def test_split_models_train_as_in_one_process(run_example, name):
    run = run_example(name, "--steps", "8")
    assert run.end() == 0, run.output
    assert "largest difference" in run.output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("collectives.py", ("--processes", "2", "--tolerance", "0.05"), "together: 3.1"),
        ("services.py", ("--stock", "12"), "{'apple': 0, 'melon': 0}"),
        ("ordered_server.py", ("--clients", "2", "--rounds", "40"), "80 rolls"),
        (
            "gradient_server.py",
            ("--processes", "2", "--steps", "150", "--min-accuracy", "0.6"),
            "300",
        ),
    ],
)
def test_programs_of_machin_parallel(run_example, name, arguments, text):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    run = run_example(name, *arguments, "--port", str(port))
    assert run.end() == 0, run.output
    assert text in run.output


@pytest.mark.slow
def test_split_models_that_train_differently_fail(run_example):
    run = run_example("pipeline.py", "--steps", "1", "--tolerance=-1")
    assert run.end() == 1 and "losses differ by" in run.output
