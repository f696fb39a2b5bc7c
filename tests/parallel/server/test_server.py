"""Servers of machin.parallel: strict versions, models, and gradients reduced in a tree."""

import threading

import pytest
import torch
from conftest import eventually
from torch import nn

import rayrpc as rpc
from rayrpc.parallel.distributed import World, get_world, is_world_initialized
from rayrpc.parallel.server import (
    OrderedServerSimpleImpl,
    PushPullGradServerImpl,
    PushPullModelServer,
    PushPullModelServerImpl,
)

MEMBERS = ["alice", "bob", "driver"]
kept = {}


def enter(name):
    """Make the world and the group; all members at the same time."""
    if not is_world_initialized():
        World(name, init_rpc=False, init_dist=False)
    get_world().create_rpc_group("servers", MEMBERS)


def leave():
    for server in kept.values():
        getattr(server, "stop", lambda: None)()
    kept.clear()
    get_world().stop()


def everywhere(func, *args):
    calls = [rpc.rpc_async(name, func, args=args, timeout=30) for name in MEMBERS]
    return [call.wait() for call in calls]


@pytest.fixture
def group(workers):
    """A group of the two workers and this process."""
    calls = [rpc.rpc_async(name, enter, args=(name,), timeout=30) for name in MEMBERS]
    for call in calls:
        call.wait()
    yield get_world().groups["servers"]
    for name in MEMBERS:
        rpc.rpc_sync(name, leave)


def here():
    return get_world().groups["servers"]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(1, 1, bias=False)
        self.two = nn.Linear(1, 1, bias=False)
        with torch.no_grad():
            self.one.weight.fill_(1)
            self.two.weight.fill_(2)

    def forward(self, x):
        return self.two(self.one(x))

    def weights(self):
        return self.one.weight.item(), self.two.weight.item()


# -- ordered server -------------------------------------------------------------------------------


def serve_ordered(depth):
    kept["ordered"] = OrderedServerSimpleImpl("ordered", here(), version_depth=depth)


def count_up(times):
    """Add to a counter as often as it takes; return the versions that were taken."""
    server = here().get_paired("ordered").to_here()
    server.push("counter", 0, 0, None)
    taken = []
    while len(taken) < times:
        value, version = server.pull("counter")
        if server.push("counter", value + 1, version + 1, version):
            taken.append(version + 1)
    return taken


class TestOrderedServer:
    def test_each_version_follows_the_one_before(self, group):
        rpc.rpc_sync("alice", serve_ordered, args=(1,))
        server = group.get_paired("ordered").to_here()
        assert server.push("a", "value", 1, None)
        assert not server.push("a", "stale", 2, 0)
        assert server.push("a", "value 2", 2, 1)
        assert server.push("a", "value 3", -1, 2)
        assert server.pull("a") == ("value 3", -1)
        assert server.pull("a", 2) == ("value 2", 2)
        assert server.pull("a", 1) is None and server.pull("b") is None

    @pytest.mark.parametrize("depth", [2, 4])
    def test_so_many_old_versions_are_kept(self, group, depth):
        rpc.rpc_sync("bob", serve_ordered, args=(depth,))
        server = group.get_paired("ordered").to_here()
        for version in range(8):
            assert server.push("a", f"value {version}", version, version - 1)
        kept_versions = [v for v in range(8) if server.pull("a", v) is not None]
        assert kept_versions == list(range(7 - depth, 8))

    def test_what_was_pulled_is_the_clients_own(self, group):
        kept["ordered"] = OrderedServerSimpleImpl("ordered", group)
        server = group.get_paired("ordered").to_here()
        sent = torch.ones(2)
        assert server.push("a", sent, 1, None)
        sent += 1
        server.pull("a")[0].add_(5)
        assert torch.equal(server.pull("a")[0], torch.ones(2))

    def test_of_many_clients_none_is_lost(self, group):
        rpc.rpc_sync("alice", serve_ordered, args=(1,))
        calls = [rpc.rpc_async(MEMBERS[n % 3], count_up, args=(20,), timeout=60) for n in range(8)]
        taken = sorted(version for call in calls for version in call.wait())
        assert taken == list(range(1, 161))
        assert group.get_paired("ordered").to_here().pull("counter") == (160, 160)

    def test_a_depth_of_nothing_is_refused(self, group):
        with pytest.raises(ValueError, match="version_depth must be"):
            OrderedServerSimpleImpl("ordered", group, version_depth=0)


# -- model server ---------------------------------------------------------------------------------


def serve_model():
    kept["model"] = PushPullModelServerImpl("models", here())


class TestModelServer:
    def test_one_without_an_ordered_server_says_so(self):
        for call in (PushPullModelServer("model").push, PushPullModelServer("model").pull):
            with pytest.raises(RuntimeError, match="has no ordered server"):
                call(Model())

    def test_what_one_pushes_another_pulls(self, group):
        rpc.rpc_sync("alice", serve_model)
        server = group.get_paired("models").to_here()
        mine, other = Model(), Model()
        assert not server.pull(other)
        for version in range(1, 4):
            with torch.no_grad():
                mine.one.weight += 1
            assert server.push(mine) and mine.pp_version == version
        assert server.pull(other) and other.weights() == (4, 2) and other.pp_version == 3

    def test_a_stale_push_is_refused_and_brings_the_newest(self, group):
        rpc.rpc_sync("alice", serve_model)
        server = group.get_paired("models").to_here()
        mine, other = Model(), Model()
        assert server.push(mine) and server.push(mine)
        with torch.no_grad():
            other.one.weight.fill_(9)
        assert not server.push(other, pull_on_fail=False) and other.weights() == (9, 2)
        assert not server.push(other) and other.weights() == (1, 2) and other.pp_version == 2
        assert server.push(other)


# -- gradient server ------------------------------------------------------------------------------


def serve_gradients(method, secondary, batch):
    server = kept["gradients"] = PushPullGradServerImpl(
        "gradients",
        here(),
        primary_reducer="alice",
        secondary_reducers=secondary,
        reduce_method=method,
        reduce_batch_size=batch,
    )
    if here().get_cur_name() == "alice":
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        server.manage_model(model, optimizer, scheduler)
    server.start()


def learning_rate():
    kept["gradients"].watch()
    return kept["gradients"].lr_scheduler.get_last_lr()[0]


def push_gradients(times):
    server = here().get_paired("gradients").to_here()
    model = Model()
    for _ in range(times):
        model.load_state_dict(Model().state_dict())
        model(torch.ones(1, 1)).backward()
        server.push(model)
        assert all(p.grad is None or not p.grad.any() for p in model.parameters())


class TestGradServer:
    # the gradients of a fresh model are 2 and 1
    @pytest.mark.parametrize(
        ("method", "weights"), [("mean", (1 - 2, 2 - 1)), ("sum", (1 - 8, 2 - 4))]
    )
    def test_gradients_are_reduced_in_a_tree(self, group, method, weights):
        everywhere(serve_gradients, method, ["bob"], 2)
        server = group.get_paired("gradients").to_here()
        model = Model()
        assert not server.pull(model)
        calls = [rpc.rpc_async(name, push_gradients, args=(2,)) for name in ("alice", "driver")]
        for call in calls:
            call.wait()
        assert eventually(lambda: server.pull(model))
        assert model.weights() == weights
        assert rpc.rpc_sync("alice", learning_rate) == 0.5

    def test_of_many_clients_no_gradient_is_lost(self, group):
        everywhere(serve_gradients, "sum", MEMBERS, 2)
        calls = [rpc.rpc_async(MEMBERS[n % 3], push_gradients, args=(12,)) for n in range(8)]
        for call in calls:
            call.wait()

        # 96 sets: all but what fills no batch is reduced; a step takes two reduced ones
        assert eventually(lambda: sum(n for n, _ in everywhere(queued)) <= 3)
        assert eventually(lambda: sum(n for _, n in everywhere(queued)) <= 1)

    def test_a_parameter_without_a_gradient_is_an_error(self, group):
        everywhere(serve_gradients, "sum", ["bob"], 2)
        server = group.get_paired("gradients").to_here()
        with pytest.raises(RuntimeError, match=r"Parameter one\.weight doesn't have gradient"):
            server.push(Model())

    def test_only_the_primary_reducer_manages_a_model(self, group):
        server = PushPullGradServerImpl("mine", group, primary_reducer="alice")
        with pytest.raises(RuntimeError, match="'driver' cannot manage the model"):
            server.manage_model(Model(), None)

    def test_arguments_are_checked(self, group):
        with pytest.raises(ValueError, match="reduce_method must be"):
            PushPullGradServerImpl("mine", group, reduce_method="max")
        with pytest.raises(ValueError, match="reduce_batch_size must be"):
            PushPullGradServerImpl("mine", group, reduce_batch_size=1)
        with pytest.raises(ValueError, match="'nobody' is not in group"):
            PushPullGradServerImpl("mine", group, secondary_reducers=["nobody"])

    def test_an_error_of_the_reducer_is_raised_by_watch(self, group):
        server = PushPullGradServerImpl(
            "mine", group, primary_reducer="driver", reduce_batch_size=2
        )
        model = Model()
        server.manage_model(model, torch.optim.SGD(model.parameters(), lr=1.0))
        server.start()
        server.watch()
        bad = {"one.weight": torch.ones(1, 1)}
        for _ in range(4):
            group.registered_sync("mine/driver/_push_service", (bad, _secondary()))
        with pytest.raises(KeyError, match=r"two\.weight"):
            assert eventually(lambda: server.watch() is not None)
        with pytest.raises(KeyError, match=r"two\.weight"):
            group.registered_sync("mine/driver/_push_service", (bad, _secondary()))
        server.stop()

    def test_the_queue_is_bounded(self, group, caplog):
        server = PushPullGradServerImpl("mine", group, reduce_batch_size=2, max_queue_size=3)
        for number in range(5):
            server._push_service({"n": torch.tensor(number)}, _secondary())
        assert [int(each["n"]) for each in server._queues[_secondary()]] == [2, 3, 4]
        assert "mine dropped gradients" in caplog.text


def queued():
    """Return how many sets of gradients wait, at the secondary and at the primary level."""
    kept["gradients"].watch()
    primary, secondary = kept["gradients"]._queues.values()
    return len(secondary), len(primary)


def _secondary():
    from rayrpc.parallel.server.grad_server import ReduceType

    return ReduceType.REDUCE_SECONDARY


def test_threads_of_reducers_end(group):
    before = threading.active_count()
    server = PushPullGradServerImpl("mine", group, reduce_batch_size=2)
    server.start()
    server.start()
    assert threading.active_count() == before + 1
    server.stop()
    server.stop()
    assert threading.active_count() == before
