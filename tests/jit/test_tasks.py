"""Tasks without a worker: which worker is chosen, how a task is packed."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.futures import Future

from rayrpc._jit import tasks
from rayrpc._jit.module_copies import ModuleCopies
from rayrpc._jit.tasks import WORKER_PREFIX, _DoneFuture, _ModuleCopy, _TensorSlot
from rayrpc._runtime import current
from rayrpc._runtime.invocation import Invocation
from rayrpc._runtime.started_call import StartedCall


def none_to_start(prefix):
    raise AssertionError("there are workers")


def start_task(func, *args):
    return tasks.start_task(Invocation(func, args), none_to_start)


class FakeAgent:
    """A member of a group."""

    def __init__(self, monkeypatch, *names, is_static_group=False, name="driver"):
        self.info = SimpleNamespace(name=name, id=0)
        self.members = SimpleNamespace(is_static=is_static_group)
        self.names = [name, *names]
        self.calls = []
        self.caller = SimpleNamespace(remote=self.remote)
        self.default_timeout = None
        monkeypatch.setattr(current, "get_agent", lambda: self)
        monkeypatch.setattr(current, "is_set", lambda: True)
        monkeypatch.setattr(tasks, "_workers", tasks._Workers())
        monkeypatch.setattr(tasks, "_copies", ModuleCopies())
        monkeypatch.setattr(tasks, "RRef", LocalRRef)
        monkeypatch.setattr(tasks, "call_without_context", self.call)
        monkeypatch.setattr(tasks, "start_without_context", self.start)

    def get_worker_infos(self):
        return [SimpleNamespace(name=name) for name in self.names]

    def lookup(self, name):
        return SimpleNamespace(id=self.names.index(name), token=name)

    def remote(self, member, invocation, timeout):
        self.calls.append((member.token, invocation.func))
        return LocalRRef(invocation(), member.token)

    def call(self, agent, worker_id, func, args, timeout):
        """Run a function here, as a worker would."""
        self.calls.append((self.names[worker_id], func))
        return func._wrapped_async_rpc_function(*args)

    def start(self, agent, worker_id, func, args, timeout):
        return StartedCall(lambda unwanted: func(*args), lambda: None)


class LocalRRef:
    def __init__(self, value, worker="driver"):
        self._value = value

    def local_value(self):
        return self._value

    def owner(self):
        return SimpleNamespace(id=0)


@pytest.fixture
def agent(monkeypatch):
    return FakeAgent(monkeypatch, "fork-0", "fork-1")


@pytest.fixture
def x():
    return torch.rand(2, 3, requires_grad=True)


class TestWorkers:
    def test_those_for_tasks_run_them(self, monkeypatch):
        FakeAgent(monkeypatch, "fork-0", "other", "fork-1")
        assert tasks._workers._members() == ["fork-0", "fork-1"]

    def test_others_run_them_in_a_group_of_fixed_size(self, monkeypatch):
        FakeAgent(monkeypatch, "b", "a", is_static_group=True)
        assert tasks._workers._members() == ["a", "b"]
        FakeAgent(monkeypatch, is_static_group=True)
        assert tasks._workers._members() == ["driver"]

    def test_there_are_none_in_another_group(self, monkeypatch):
        FakeAgent(monkeypatch, "a", "b")
        assert tasks._workers._members() == []

    def test_they_are_started_with_the_first_task(self, monkeypatch):
        agent = FakeAgent(monkeypatch)

        def start_workers(prefix):
            assert prefix == WORKER_PREFIX
            agent.names.append("fork-0")

        assert tasks._workers.acquire(start_workers) == "fork-0"

    def test_the_one_with_the_fewest_tasks_is_next(self, agent):
        workers = tasks._workers
        assert {workers.acquire(none_to_start), workers.acquire(none_to_start)} == {
            "fork-0",
            "fork-1",
        }
        workers.release("fork-1")
        assert [workers.acquire(none_to_start), workers.acquire(none_to_start)].count("fork-1") >= 1
        for _ in range(2):
            workers.release("fork-0")
        assert workers.acquire(none_to_start) == "fork-0"

    def test_a_worker_is_released_by_a_task_that_cannot_be_sent(self, agent, monkeypatch):
        def fail(*_):
            raise TypeError("cannot be pickled")

        monkeypatch.setattr(tasks, "call_without_context", fail)
        with pytest.raises(TypeError):
            start_task(sorted, [])
        assert set(tasks._workers._tasks.values()) == {0}


class TestPacking:
    def test_replaces_tensors_that_require_grad(self, agent, x):
        plain = torch.ones(3)
        task, leaves = tasks._pack(
            Invocation(torch.add, ([x, plain],), {"other": x * 2}), True, "fork-0"
        )
        assert task.args == ([_TensorSlot(0), plain],) and task.kwargs == {"other": _TensorSlot(1)}
        assert not any(each.requires_grad for each in task.inputs)
        assert leaves[0] is x and len(leaves) == 2

    def test_without_grad_mode_nothing_gets_gradients(self, agent, x):
        task, leaves = tasks._pack(Invocation(nn.Linear(3, 2), (x,), {}), False, "fork-0")
        assert leaves == [] and not task.grad

    def test_replaces_modules_and_their_methods(self, agent):
        module = nn.Linear(3, 2)
        module.bias.requires_grad_(False)
        task, leaves = tasks._pack(Invocation(module.extra_repr, (module,), {}), True, "fork-0")
        (copy,) = task.args
        assert isinstance(copy, _ModuleCopy) and copy.rref.local_value() is module
        assert (task.func.rref, task.func.method) == (copy.rref, "extra_repr")
        assert task.modules == [copy] and leaves == [module.weight]

    def test_replaces_futures_by_their_outcome(self, agent):
        done, failed = Future(), Future()
        done.set_result(3)
        failed.set_exception(KeyError("why"))
        task, _ = tasks._pack(Invocation(sorted, (done, failed), {}), True, "fork-0")
        one, other = task.args
        assert isinstance(one, _DoneFuture) and one.future().wait() == 3
        with pytest.raises(KeyError, match="why"):
            other.future().wait()


class TestTasks:
    def test_results_come_back_with_their_graph(self, agent, x):
        module = nn.Linear(3, 2)
        y, again = start_task(lambda t: (module(t), t.detach()), x * 2).wait()
        assert y.requires_grad and not again.requires_grad
        y.sum().backward()
        (expected,) = torch.autograd.grad(module(x * 2).sum(), x)
        torch.testing.assert_close(x.grad, expected)

    def test_modules_get_gradients(self, agent, x):
        module = nn.Linear(3, 2)
        start_task(module, x).wait().sum().backward()
        torch.testing.assert_close(module.bias.grad, torch.full((2,), 2.0))

    def test_a_result_without_gradients_gives_none(self, agent, x):
        one, other = start_task(lambda t: (t * 2, t * 3), x).wait()
        one.sum().backward()
        assert x.grad.tolist() == [[2.0] * 3] * 2 and other.requires_grad

    def test_they_wait_for_futures_among_their_arguments(self, agent):
        future = Future()
        result = start_task(lambda f: f.wait() + 1, future)
        assert not result.done() and agent.calls == []
        future.set_result(1)
        assert result.wait() == 2

    def test_they_wait_for_futures_in_their_result(self, agent):
        future = Future()
        result = start_task(lambda: {"later": future})
        assert not result.done()
        future.set_result(1)
        assert result.wait()["later"].wait() == 1

    def test_workers_are_released_when_they_end(self, agent):
        for _ in range(3):
            start_task(int).wait()
        assert set(tasks._workers._tasks.values()) == {0}
