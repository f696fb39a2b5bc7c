"""Ray's functions in threads that outlive what they wait for."""

import pytest

PROGRAM = """
import threading, time
import ray
from ray.exceptions import GetTimeoutError
from rayrpc import config
from rayrpc._transports.ray import ray_api
from rayrpc._transports.ray.cluster import connect

connect(config.settings())

@ray.remote(num_cpus=0)
def late(seconds):
    time.sleep(seconds)
    return seconds

outcomes = []

def get(ref, timeout=None):
    begin = time.monotonic()
    try:
        outcomes.append(ray_api.get(ref, timeout=timeout))
    except GetTimeoutError:
        outcomes.append(time.monotonic() - begin)
    except SystemExit:
        outcomes.append("ended")

def in_thread(*args):
    thread = threading.Thread(target=get, args=args, daemon=True)
    thread.start()
    return thread

{code}
print("done", flush=True)
"""
LATE = """
in_thread(late.remote(2.5 * ray_api.STEP_SECONDS)).join(60)
assert outcomes == [2.5 * ray_api.STEP_SECONDS], outcomes
in_thread(late.remote(600), 1.5 * ray_api.STEP_SECONDS).join(60)
assert 1.4 < outcomes[1] / ray_api.STEP_SECONDS < 10, outcomes
"""
ENDED = """
thread = in_thread(late.remote(600))
time.sleep(0.5)
ray_api.end_waits()
assert outcomes == ["ended"], outcomes
in_thread(late.remote(0)).join(60)
assert outcomes == ["ended"] * 2, outcomes
get(late.remote(0))
assert outcomes[2] == 0, "the main thread goes on"
"""


@pytest.mark.parametrize("code", [LATE, ENDED], ids=["late answers", "waits that are ended"])
def test_threads_wait_in_steps(ray_cluster, start, script, code):
    run = start(script(PROGRAM.replace("{code}", code)))
    assert run.end(120) == 0 and "done" in run.output, run.output
