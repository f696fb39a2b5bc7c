"""Every scenario with a fixed set of seeds, and the seeds that have found a defect."""

import subprocess
import sys
from pathlib import Path

import pytest
from simulation.replacing import simulated
from simulation.scenario import run
from simulation.scenarios import SCENARIOS

SEEDS = {"connection": range(400), "agents": range(150), "rrefs": range(150)}
# (scenario, seed, what it has found)
REGRESSIONS = [
    ("connection", 28, "an error of a callback went to the thread that had asked for it"),
    ("rrefs", 3073, "an RRef whose owner died while it was sent was a KeyError"),
]


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_scenario_keeps_its_promises(name):
    with simulated():
        for seed in SEEDS[name]:
            failure = run(SCENARIOS[name], seed).failure
            assert failure is None, (
                f"{failure.summary}\n{failure.details}\n\nTo run it again: "
                f"python tests/simulation/simulate.py {name} --seed {seed}"
            )


@pytest.mark.parametrize(("name", "seed", "what"), REGRESSIONS)
def test_what_was_found_is_not_there_any_more(name, seed, what):
    with simulated():
        assert run(SCENARIOS[name], seed).failure is None


def test_a_seed_gives_the_same_run_in_every_process():
    script = str(Path(__file__).parent / "simulate.py")

    def output(hash_seed):
        command = [sys.executable, script, "--seed", "4"]
        environment = {"PYTHONHASHSEED": hash_seed}
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True, timeout=120
        ).stdout

    assert output("1") == output("2") != ""
