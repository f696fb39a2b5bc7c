"""Workers, and a program's own tasks and actors, in forked processes of a real cluster."""

import os
import sys
import uuid
from pathlib import Path

import pytest
import ray
from conftest import IS_MEASURED

import rayrpc as rpc

WAIT = 100.0


def _functions():
    """Return functions that are sent by value, as workers do not have this module."""

    def describe():
        """Return whether a process has torch, its parent, and what Ray has limited."""
        return "torch" in sys.modules, os.getppid(), os.environ.get("OMP_NUM_THREADS")

    def describe_task():
        """Return the same of a task that a worker starts."""
        return ray.get(fresh(describe).remote(), timeout=100)

    def fresh(function):
        """Return a task that no process runs which has run others."""
        environ = {"env_vars": {"FRESH": uuid.uuid4().hex}}
        return ray.remote(num_cpus=0)(function).options(runtime_env=environ)

    return describe, describe_task, fresh


describe, describe_task, fresh = _functions()


def has_torch(pid):
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


def test_their_tasks_and_those_of_the_program_find_what_they_find_under_ray(workers):
    loaded, parent, threads = ray.get(fresh(describe).remote(), timeout=WAIT)
    assert not loaded and not has_torch(parent) and threads == "1"
    assert rpc.rpc_sync("bob", describe_task) == (False, parent, "1")


def test_random_numbers_differ(workers):
    def draw():
        import random

        import numpy

        return random.random(), float(numpy.random.rand())

    first, second = (rpc.rpc_sync(name, draw) for name in workers)
    assert first[0] != second[0] and first[1] != second[1]


@pytest.mark.skipif(IS_MEASURED, reason="workers whose coverage is measured are not forked")
def test_what_python_reads_at_its_start_gets_a_process_of_its_own(ray_cluster):
    environ = {"env_vars": {"PYTHONHASHSEED": "7"}}
    options = ray.remote(num_cpus=0)(lambda: (hash("a"), os.getppid())).options(runtime_env=environ)
    first, second = ray.get([options.remote(), options.remote()], timeout=WAIT)
    assert first[0] == second[0] != hash("a")
    assert ray.get(fresh(lambda: os.getppid()).remote(), timeout=WAIT) != first[1]
