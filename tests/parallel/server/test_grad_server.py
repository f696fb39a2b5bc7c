"""Gradient servers: gradients of many clients are reduced in a tree."""

import threading

import pytest
import torch
from conftest import eventually
from interrupting import interrupted
from server_group import MEMBERS, Model, everywhere, here, server_group, servers

import rayrpc as rpc
from rayrpc._concurrency import threads, waiting
from rayrpc.parallel.server import PushPullGradServerImpl, grad_server
from rayrpc.parallel.server.grad_server import ReduceType


@pytest.fixture
def group(workers):
    with server_group() as group:
        yield group


def serve_gradients(method, secondary, batch):
    server = servers["gradients"] = PushPullGradServerImpl(
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
    servers["gradients"].watch()
    return servers["gradients"].lr_scheduler.get_last_lr()[0]


def push_gradients(times):
    server = here().get_paired("gradients").to_here()
    model = Model()
    for _ in range(times):
        model.load_state_dict(Model().state_dict())
        model(torch.ones(1, 1)).backward()
        server.push(model)
        assert all(p.grad is None or not p.grad.any() for p in model.parameters())


# the gradients of a fresh model are 2 and 1
@pytest.mark.parametrize(("method", "weights"), [("mean", (1 - 2, 2 - 1)), ("sum", (1 - 8, 2 - 4))])
def test_gradients_are_reduced_in_a_tree(group, method, weights):
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


def test_no_gradient_of_many_clients_is_lost(group):
    everywhere(serve_gradients, "sum", MEMBERS, 2)
    calls = [rpc.rpc_async(MEMBERS[n % 3], push_gradients, args=(12,)) for n in range(8)]
    for call in calls:
        call.wait()

    # 96 sets: all but what fills no batch is reduced; a step takes two reduced ones
    assert eventually(lambda: sum(n for n, _ in everywhere(queued)) <= 3)
    assert eventually(lambda: sum(n for _, n in everywhere(queued)) <= 1)


def test_a_parameter_without_a_gradient_is_an_error(group):
    everywhere(serve_gradients, "sum", ["bob"], 2)
    server = group.get_paired("gradients").to_here()
    with pytest.raises(RuntimeError, match=r"Parameter one\.weight doesn't have gradient"):
        server.push(Model())


def test_only_the_primary_reducer_manages_a_model(group):
    server = PushPullGradServerImpl("mine", group, primary_reducer="alice")
    with pytest.raises(RuntimeError, match="'driver' cannot manage the model"):
        server.manage_model(Model(), None)  # type: ignore[arg-type]


def test_wrong_arguments_are_refused(group):
    with pytest.raises(ValueError, match="reduce_method must be"):
        PushPullGradServerImpl("mine", group, reduce_method="max")
    with pytest.raises(ValueError, match="reduce_batch_size must be"):
        PushPullGradServerImpl("mine", group, reduce_batch_size=1)
    with pytest.raises(ValueError, match="'nobody' is not in group"):
        PushPullGradServerImpl("mine", group, secondary_reducers=["nobody"])


def test_an_error_of_the_reducer_is_raised_by_watch(group):
    server = PushPullGradServerImpl("mine", group, primary_reducer="driver", reduce_batch_size=2)
    model = Model()
    server.manage_model(model, torch.optim.SGD(model.parameters(), lr=1.0))
    server.start()
    server.watch()

    def watch():
        server.watch()
        return False

    bad = {"one.weight": torch.ones(1, 1)}
    for _ in range(4):
        group.registered_sync("mine/driver/_push_service", (bad, ReduceType.REDUCE_SECONDARY))
    with pytest.raises(KeyError, match=r"two\.weight"):
        assert eventually(watch)
    with pytest.raises(KeyError, match=r"two\.weight"):
        group.registered_sync("mine/driver/_push_service", (bad, ReduceType.REDUCE_SECONDARY))
    server.stop()


def test_the_oldest_gradients_are_dropped_when_too_many_wait(group, caplog):
    server = PushPullGradServerImpl("mine", group, reduce_batch_size=2, max_queue_size=3)
    for number in range(5):
        server._push_service({"n": torch.tensor(number)}, ReduceType.REDUCE_SECONDARY)
    assert [int(each["n"]) for each in server._queues[ReduceType.REDUCE_SECONDARY]] == [2, 3, 4]
    assert "mine dropped gradients" in caplog.text


def queued():
    """Return how many sets of gradients wait, at the secondary and at the primary level."""
    servers["gradients"].watch()
    primary, secondary = servers["gradients"]._queues.values()
    return len(secondary), len(primary)


def reducers(name):
    return [t for t in threading.enumerate() if t.name == f"rayrpc-reducer-{name}"]


def test_stop_ends_the_thread(group):
    server = PushPullGradServerImpl("mine", group, reduce_batch_size=2)
    server.start()
    server.start()
    assert eventually(lambda: len(reducers("mine")) == 1)
    server.stop()
    server.stop()
    assert eventually(lambda: not reducers("mine"))


def test_after_an_interrupt_of_start_or_stop_another_call_goes_on(group):
    server = PushPullGradServerImpl("interrupted", group)
    files = [grad_server.__file__, threads.__file__, waiting.__file__]
    number = 1
    while interrupted(lambda: (server.start(), server.stop()), files, number):
        server.start()
        server.stop()
        assert eventually(lambda: not reducers("interrupted"))
        number += 1
    assert number > 10
