"""Placement: what workers ask Ray for, and the errors when it is not there."""

from types import SimpleNamespace
from typing import Any

import pytest
import ray
from launching import runner

from rayrpc import config
from rayrpc.config import WorkerResources
from rayrpc.errors import PlacementError
from rayrpc.launch.placement import (
    check_placeable,
    demands,
    named,
    near,
    placed_options,
    release_placement,
    wait_placed,
)


@pytest.fixture
def nodes(monkeypatch):
    """The resources of the cluster's nodes, for the test to fill."""
    alive = []
    monkeypatch.setattr(
        ray,
        "nodes",
        lambda: (
            [{"Alive": True, "Resources": each} for each in alive]
            + [{"Alive": False, "Resources": {"CPU": 999, "GPU": 999}}]
        ),
    )
    monkeypatch.setattr(ray, "available_resources", lambda: {"GPU": 0.5, "CPU": 1.0, "node:h": 1.0})
    return alive


# -- what a worker asks for -----------------------------------------------------------------------


def test_a_worker_asks_for_nothing_by_default():
    assert demands(WorkerResources()) == {}


def test_demands_have_rays_names():
    want = WorkerResources(num_cpus=2, num_gpus=0.5, memory=10, resources={"disk": 1, "none": 0})
    assert demands(want) == {"CPU": 2, "GPU": 0.5, "memory": 10, "disk": 1}


def test_two_workers_of_one_name_have_names_of_their_own_in_ray():
    settings = config.Settings(namespace="space")
    first, second = (named("w", settings) for _ in range(2))
    assert first["name"].startswith("w#") and first["name"] != second["name"]
    assert first["namespace"] == "space"


def test_workers_that_fit_on_a_node_can_be_kept_there(monkeypatch):
    here, there = {"CPU": 2.0}, {"CPU": 8.0, "disk": 1.0}
    first, second = "a" * 56, "b" * 56
    alive = [{"NodeID": first, "Resources": here}, {"NodeID": second, "Resources": there}]
    monkeypatch.setattr(ray, "nodes", lambda: alive)
    wanted = {
        "none": WorkerResources(),
        "two": WorkerResources(num_cpus=2),
        "three": WorkerResources(num_cpus=3),
        "disk": WorkerResources(resources={"disk": 1}),
        "reserved": WorkerResources(),
    }
    options: dict[str, dict[str, Any]] = {worker: {"num_cpus": 1} for worker in wanted}
    options["reserved"]["scheduling_strategy"] = "a group's"
    placed = near(options, wanted, first)
    strategies = {worker: option.get("scheduling_strategy") for worker, option in placed.items()}
    for worker in ("none", "two"):
        strategy: Any = strategies.pop(worker)
        assert (strategy.node_id, strategy.soft) == (first, False)
    assert strategies == {"three": None, "disk": None, "reserved": "a group's"}
    assert all(option["num_cpus"] == 1 for option in placed.values())
    assert near(options, wanted, "") == options and "scheduling_strategy" not in options["none"]


# -- whether some node has it ---------------------------------------------------------------------


def test_workers_that_fit_on_a_node_each_are_placeable(nodes):
    nodes += [{"CPU": 4}, {"CPU": 1, "GPU": 1}]
    check_placeable({f"w{number}": WorkerResources(num_cpus=4) for number in range(3)})
    check_placeable({"w": WorkerResources(num_cpus=1, num_gpus=1), "idle": WorkerResources()})


def test_the_resource_that_no_node_has_enough_of_is_named_with_the_most(nodes):
    nodes += [{"CPU": 4}, {"CPU": 2}]
    with pytest.raises(PlacementError, match=r"'w' asks for CPU: 5, .* is 4 \(2 nodes\)"):
        check_placeable({"ok": WorkerResources(num_cpus=4), "w": WorkerResources(num_cpus=5)})
    with pytest.raises(PlacementError, match=r"'w' asks for GPU: 1, .* is 0 "):
        check_placeable({"w": WorkerResources(num_gpus=1)})


def test_resources_that_no_node_has_together_are_named_together(nodes):
    nodes += [{"CPU": 4}, {"CPU": 1, "GPU": 1}]
    with pytest.raises(PlacementError, match="no single node of the cluster has together"):
        check_placeable({"w": WorkerResources(num_cpus=4, num_gpus=1)})


# -- options and reservations ---------------------------------------------------------------------


class Reservation:
    """Stands for a placement group.

    Args:
        comes: its resources become free.
    """

    def __init__(self, comes):
        self.comes = comes
        self.bundles = self.strategy = self.timeout = None
        self.removed = 0

    def wait(self, timeout):
        self.timeout = timeout
        return self.comes


@pytest.fixture
def reserve(monkeypatch):
    """Return a function that makes the reservation of a test, which Ray then gives."""

    def make(comes):
        made = Reservation(comes)

        def placement_group(bundles, strategy):
            made.bundles, made.strategy = bundles, strategy
            return made

        def remove(group):
            group.removed += 1

        def strategy(group, placement_group_bundle_index):
            return SimpleNamespace(placement_group=group, index=placement_group_bundle_index)

        monkeypatch.setattr(ray.util, "placement_group", placement_group)
        monkeypatch.setattr(ray.util, "remove_placement_group", remove)
        schedule = ray.util.scheduling_strategies
        monkeypatch.setattr(schedule, "PlacementGroupSchedulingStrategy", strategy)
        return made

    return make


WANTED = {"a": WorkerResources(num_cpus=2, memory=5), "b": WorkerResources()}


def test_without_a_strategy_nothing_is_reserved():
    options = placed_options(WANTED, None, 1.0)
    assert options == {
        "a": {"num_cpus": 2, "num_gpus": 0, "resources": {}, "memory": 5},
        "b": {"num_cpus": 0, "num_gpus": 0, "resources": {}},
    }
    release_placement(options)


def test_a_strategy_reserves_for_all_workers_together(reserve):
    group = reserve(comes=True)
    options = placed_options(WANTED, "SPREAD", 3.0)
    assert (group.strategy, group.timeout) == ("SPREAD", 3.0)
    assert group.bundles == [{"CPU": 2, "memory": 5}, {"CPU": 0.001}]
    assert [each["scheduling_strategy"].index for each in options.values()] == [0, 1]
    release_placement(options)
    assert group.removed == 1


def test_a_reservation_that_does_not_come_is_removed(reserve, nodes):
    group = reserve(comes=False)
    with pytest.raises(PlacementError, match=r"a, b could not be placed with PACK in 3 s"):
        placed_options(WANTED, "PACK", 3.0)
    assert group.removed == 1


class Starting:
    """Stands for an actor whose process may be late."""

    def __init__(self, ref):
        self.pid = SimpleNamespace(remote=lambda: ref)


def starting(*refs: Any) -> Any:
    return {name: Starting(ref) for name, ref in zip("ab", refs, strict=True)}


def test_process_ids_are_returned_by_worker(monkeypatch):
    monkeypatch.setattr(ray, "wait", lambda refs, num_returns, timeout: (refs, []))
    monkeypatch.setattr(ray, "get", lambda refs: [100 * ref for ref in refs])
    assert wait_placed(starting(1, 2), WANTED, 1.0) == {"a": 100, "b": 200}


def test_a_worker_that_does_not_start_in_time_is_named(monkeypatch, nodes):
    monkeypatch.setattr(ray, "wait", lambda refs, num_returns, timeout: ([2], [1]))
    with pytest.raises(PlacementError) as caught:
        wait_placed(starting(1, 2), WANTED, 1.0)
    text = str(caught.value)
    assert "'a' was not started in 1 s: it asks for {'CPU': 2.0, 'memory': 5}" in text
    assert "free are {'CPU': 1.0, 'GPU': 0.5}" in text


# -- on a cluster ---------------------------------------------------------------------------------


@pytest.fixture
def run(start, script):
    return runner(start, script)


@pytest.mark.usefixtures("ray_cluster")
def test_a_rank_that_cannot_be_placed_names_the_missing_resource(run):
    one = run(
        "import torch.multiprocessing as mp\nimport time\n"
        "def main(rank): pass\n"
        "if __name__ == '__main__':\n"
        "    start = time.monotonic()\n"
        "    try:\n"
        "        mp.spawn(main, nprocs=2)\n"
        "    finally:\n"
        "        print('seconds', int(time.monotonic() - start), flush=True)\n",
        options=("--set", 'workers={"rank*": {"num_gpus": 1}}'),
    )
    assert one.end() == 1
    assert "PlacementError" in one.output and "'rank0' asks for GPU: 1" in one.output
    assert int(one.wait_for("seconds").split()[1]) < 15
