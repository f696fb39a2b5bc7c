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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pipeline", "hybrid", "parameter_server"])
def test_an_example_draws_a_picture_where_asked(run_example, tmp_path, name):
    bound = ("--min-accuracy", "0") if name == "parameter_server" else ()
    run = run_example(f"{name}.py", "--steps", "8", *bound, "--output", str(tmp_path))
    assert run.end() == 0, run.output
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_language_model_has_remote_parts(run_example, tmp_path):
    run = run_example(
        "rnn.py",
        *("--steps", "40", "--words", "4000", "--max-perplexity", "20"),  # a unigram model's: 29
        *("--output", str(tmp_path)),
    )
    assert run.end() == 0, run.output
    assert "the model writes:" in run.output and "unigram model" in run.output
    assert "40/40" in run.output  # the progress bar
    assert (tmp_path / "rnn.png").read_bytes().startswith(b"\x89PNG")


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
def test_a_partitioned_graph_is_sampled(run_example, tmp_path):
    run = run_example(
        "graph_sampling.py",
        *("--samplers", "2", "--nodes", "600", "--epochs", "4", "--min-accuracy", "0.3"),
        *("--output", str(tmp_path)),
    )
    assert run.end() == 0, run.output
    assert "4 epochs of 2 trainers with 2 samplers" in run.output
    assert "accuracy on test nodes" in run.output and "features alone" in run.output
    assert "4/4" in run.output  # the progress bar
    assert (tmp_path / "graph_sampling.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_replay_buffer_is_sampled_by_priority(run_example, tmp_path):
    run = run_example(
        "replay_buffer.py",
        *("--max-iterations", "12", "--target", "0", "--output", str(tmp_path)),
    )
    assert run.end() == 0, run.output
    assert "from 2 shards" in run.output and "mean reward over the last" in run.output
    assert "12/12" in run.output  # the progress bar
    assert (tmp_path / "replay_buffer.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("rnn.py", ("--steps", "1", "--max-perplexity", "1"), "perplexity"),
        (
            "federated.py",
            ("--clients", "2", "--workers", "1", "--rounds", "1", "--min-accuracy", "1.1"),
            "is below 110.0%",
        ),
    ],
)
def test_another_example_that_misses_its_bound_fails(run_example, tmp_path, name, arguments, text):
    run = run_example(name, *arguments, "--output", str(tmp_path))
    assert run.end() == 1
    assert text in run.output and "ProcessRaisedException" in run.output
