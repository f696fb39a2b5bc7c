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
@pytest.mark.parametrize("name", ["pipeline", "hybrid", "parameter_server"])
def test_an_example_draws_a_picture_where_asked(run_example, tmp_path, name):
    bound = ("--min-accuracy", "0") if name == "parameter_server" else ()
    run = run_example(f"{name}.py", "--steps", "8", *bound, "--output", str(tmp_path))
    assert run.end() == 0, run.output
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arguments", "texts"),
    [
        (
            "cartpole",
            (
                *("--observers", "2", "--envs-per-observer", "2", "--max-iterations", "2"),
                *("--target", "0"),
            ),
            ("mean reward over the last", "2/2", "RPC calls/s"),
        ),
        (
            "rnn",  # the perplexity of a unigram model is 29
            ("--steps", "40", "--words", "4000", "--max-perplexity", "20"),
            ("the model writes:", "unigram model", "40/40"),
        ),
        (
            "graph_sampling",
            ("--samplers", "2", "--nodes", "600", "--epochs", "4", "--min-accuracy", "0.3"),
            (
                "4 epochs of 2 trainers with 2 samplers",
                *("accuracy on test nodes", "features alone", "4/4"),
            ),
        ),
        (
            "replay_buffer",
            ("--max-iterations", "12", "--target", "0"),
            ("from 2 shards", "mean reward over the last", "12/12"),
        ),
    ],
)
def test_an_example_learns_and_draws_its_curve(run_example, tmp_path, name, arguments, texts):
    """The texts with a slash are those of the progress bars."""
    run = run_example(f"{name}.py", *arguments, "--output", str(tmp_path))
    assert run.end() == 0, run.output
    assert all(text in run.output for text in texts), run.output
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_federated_averaging_goes_on_without_the_late(run_example, tmp_path):
    run = run_example(
        "federated.py",
        *("--clients", "4", "--workers", "2", "--fraction", "1", "--rounds", "3"),
        *("--timeout", "3", "--min-accuracy", "0.2", "--output", str(tmp_path)),
    )
    assert run.end() == 0, run.output
    assert "round   3: accuracy" in run.output and "best client alone" in run.output
    left_out = run.wait_for("answers left out").split(", ")[1]
    assert int(left_out.split()[0]) >= 3  # the straggler, in each round
    assert (tmp_path / "federated.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        (
            "parameter_server.py",
            ("--trainers", "1", "--steps", "1", "--min-accuracy", "1.1"),
            "is below 110.0%",
        ),
        ("pipeline.py", ("--steps", "1", "--tolerance=-1"), "losses differ by"),
        ("rnn.py", ("--steps", "1", "--max-perplexity", "1"), "perplexity"),
        (
            "federated.py",
            ("--clients", "2", "--workers", "1", "--rounds", "1", "--min-accuracy", "1.1"),
            "is below 110.0%",
        ),
    ],
)
def test_an_example_that_misses_its_bound_fails(run_example, tmp_path, name, arguments, text):
    run = run_example(name, *arguments, "--output", str(tmp_path))
    assert run.end() == 1
    assert text in run.output and "ProcessRaisedException" in run.output
