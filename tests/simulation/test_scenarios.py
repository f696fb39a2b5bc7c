"""Every scenario with a fixed set of seeds, and the seeds that have found a defect."""

import subprocess
import sys
from pathlib import Path

import pytest
from simulation.mutation import Mutation
from simulation.scenarios import SCENARIOS
from simulation.separately import first_failure, in_gate

pytestmark = pytest.mark.process

SEEDS = {
    "connection": 400,
    "agents": 150,
    "rrefs": 150,
    "transport": 200,
}
# The scenario, a seed that has found a defect, and the defect.
REGRESSIONS = [
    (
        "agents",
        31895,
        Mutation(
            "a finalizer in a thread that has just started waits for a call, and others for it",
            "_runtime.interrupting_calls",
            'frame.f_code.co_name == "_bootstrap"',
            'frame.f_code.co_name == "nothing"',
        ),
    ),
    (
        "transport",
        20,
        Mutation(
            "a request that is rerouted has the bytes that the program has written since",
            "_transports.direct.stream",
            "if not is_written and may_change and queue.may_be_unsent(call_id):",
            "if False:",
        ),
    ),
    (
        "connection",
        64,
        Mutation(
            "an error of a callback goes to the thread that had asked for it",
            "_transports.direct.connection_call",
            "                self._report(callback, self._value)\n        except",
            "                callback(Value(self._value.frame()))\n        except",
        ),
    ),
    (
        "connection",
        4,
        Mutation(
            "Ctrl-C in a thread that waits leaves its turn to read with it",
            "_transports.direct.reply_reader",
            "                self._stop_waiting(call, exc)\n            except",
            "                type(exc) is TimeoutError and self._stop_waiting(call, exc)\n"
            "            except",
        ),
    ),
    (
        "transport",
        150,
        Mutation(
            "a message is read twice where its reader was released too early",
            "_transports.direct.reply_reader",
            "                        stream.handled()  # while no other thread reads\n",
            "\n",
            (("self._complete(message, is_handled=True)", "self._complete(message)"),),
        ),
    ),
    (
        "transport",
        31,
        Mutation(
            "a worker that only calls frees no memory",
            "_transports.direct.transport",
            "                    self._watchdog.wake()  # its",
            "                    # its",
            (("        self._watchdog.start()\n", "\n"),),
        ),
    ),
    (
        "transport",
        704,
        Mutation(
            "Ctrl-C before a message is written leaves its segment in use",
            "_transports.direct.shared_memory",
            "        if number:\n",
            "        if False:\n",
        ),
    ),
    (
        "rrefs",
        11956,
        Mutation(
            "an RRef whose owner died while it was sent is a KeyError",
            "_runtime.rrefs.handle",
            '            self._check("fork an UserRRef")\n            raise\n',
            "            raise\n\n",
        ),
    ),
]


@pytest.mark.parametrize("name", SEEDS)
def test_a_scenario_keeps_its_promises(name):
    failure = first_failure(name, range(in_gate(SEEDS[name])))
    assert not failure, failure


def test_every_scenario_is_tested():
    assert SEEDS.keys() == SCENARIOS.keys()


@pytest.mark.parametrize(
    ("name", "seed", "defect"), REGRESSIONS, ids=[defect.name for *_, defect in REGRESSIONS]
)
def test_what_was_found_is_not_there_any_more(name, seed, defect):
    assert first_failure(name, range(seed, seed + 1), defect), "the seed does not find it"
    assert not first_failure(name, range(seed, seed + 1))


def test_a_seed_gives_the_same_run_in_every_process():
    script = str(Path(__file__).parent / "simulate.py")

    def output(hash_seed):
        command = [sys.executable, script, "--seed", "4"]
        environment = {"PYTHONHASHSEED": hash_seed}
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True, timeout=120
        ).stdout

    assert output("1") == output("2") != ""
