"""Tasks on the cluster: fork and wait, with torch.jit's semantics."""

import os
import signal
import time

import pytest
import targets
import torch
from conftest import eventually
from torch import nn

import rayrpc as rpc
from rayrpc import autograd, errors, jit
from rayrpc._runtime import current

SHAPE = (4, 3)


@pytest.fixture(scope="module", autouse=True)
def forkers(ray_cluster):
    """Two workers for tasks; the first ``fork`` starts them."""
    rpc.configure(fork_workers=2)
    assert not current.is_set()
    assert jit.wait(jit.fork(os.getpid)) != os.getpid()
    yield ["fork-0", "fork-1"]
    rpc.shutdown()
    rpc.configure(fork_workers=None)


# -- what tasks run -------------------------------------------------------------------------------


def negate(x):
    return torch.neg(x)


def pid_of(_):
    return os.getpid()


def fibonacci(n):
    if n < 2:
        return n
    one, two = jit.fork(fibonacci, n - 1), jit.fork(fibonacci, n - 2)
    return jit.wait(one) + jit.wait(two)


def grad_mode():
    return torch.is_grad_enabled()


def future_of(x):
    return {"inner": jit.fork(negate, x), "plain": x}


def add_waited(future, x):
    return jit.wait(future) + x


@torch.jit.script
def scripted(x: torch.Tensor, times: int) -> torch.Tensor:
    for _ in range(times):
        x = x + 1
    return x


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.scale = 1.0

    def forward(self, x, twice=False):
        y = torch.tanh(self.linear(x)) * self.scale
        return (y, y * 2) if twice else y

    def halved(self, x):
        return self.forward(x) / 2


@pytest.fixture
def model():
    torch.manual_seed(3)
    return Model()


@pytest.fixture
def x():
    torch.manual_seed(4)
    return torch.rand(*SHAPE)


class TestTasks:
    def test_run_on_workers_and_give_their_results(self, forkers):
        futures = [jit.fork(pid_of, n) for n in range(6)]
        pids = {jit.wait(future) for future in futures}
        assert len(pids) == 2 and os.getpid() not in pids

    def test_take_keywords_lambdas_and_scripted_functions(self, x):
        assert jit.wait(jit.fork(sorted, [2, 3, 1], reverse=True)) == [3, 2, 1]
        assert torch.equal(jit.wait(jit.fork(lambda t: t * 2, x)), x * 2)
        assert torch.equal(jit.wait(jit.fork(scripted, x, 3)), x + 3)
        assert torch.equal(jit.wait(jit.fork(torch.add, x, 1)), x + 1)

    def test_errors_surface_at_wait(self):
        future = jit.fork(targets.fail, "of a task")
        with pytest.raises(ValueError, match="of a task"):
            jit.wait(future)

    def test_grad_mode_travels(self):
        assert jit.wait(jit.fork(grad_mode)) is True
        with torch.no_grad():
            assert jit.wait(jit.fork(grad_mode)) is False

    def test_tasks_fork_tasks(self):
        assert jit.wait(jit.fork(fibonacci, 7)) == 13

    def test_futures_nest(self, x):
        outer = jit.wait(jit.fork(future_of, x))
        assert torch.equal(jit.wait(outer["inner"]), -x) and torch.equal(outer["plain"], x)

    def test_futures_among_the_arguments_are_waited_for(self, x):
        assert torch.equal(jit.wait(jit.fork(add_waited, jit.fork(negate, x), x)), x * 0)
        failed = jit.fork(add_waited, jit.fork(targets.fail, "inside"), x)
        with pytest.raises(ValueError, match="inside"):
            jit.wait(failed)

    def test_waits_for_futures_of_torch(self, x):
        assert torch.equal(jit.wait(torch.jit.fork(negate, x)), -x)


class TestModules:
    def test_modules_and_their_methods_run_there(self, model, x):
        with torch.no_grad():
            assert torch.equal(jit.wait(jit.fork(model, x)), model(x))
            assert torch.equal(jit.wait(jit.fork(model.halved, x)), model.halved(x))
            got = jit.wait(jit.fork(model, x, twice=True))
            assert torch.equal(got[1], model(x) * 2)
            script = torch.jit.script(nn.Sequential(nn.Linear(3, 2), nn.ReLU()))
            assert torch.equal(jit.wait(jit.fork(script, x)), script(x))

    def test_a_module_is_sent_once(self, model, x, monkeypatch):
        sent = []
        caller = current.get_agent().caller
        real = caller.remote

        def remote(to, invocation, timeout):
            sent.append(to.name)
            return real(to, invocation, timeout)

        monkeypatch.setattr(caller, "remote", remote)
        with torch.no_grad():
            for _ in range(3):
                for future in [jit.fork(model, x) for _ in range(4)]:
                    jit.wait(future)
        assert sorted(sent) == ["fork-0", "fork-1"]

    @pytest.mark.parametrize(
        "change",
        [
            lambda m: m.linear.weight.data.mul_(2),
            lambda m: m.load_state_dict({k: v + 1 for k, v in m.state_dict().items()}),
            lambda m: setattr(m, "scale", 3.0),
        ],
    )
    def test_a_module_that_was_changed_is_sent_again(self, model, x, change):
        with torch.no_grad():
            for _ in range(2):
                assert torch.equal(jit.wait(jit.fork(model, x)), model(x))
                assert torch.equal(jit.wait(jit.fork(model, x)), model(x))
                change(model)

    def test_workers_drop_their_copies_of_a_collected_module(self, x, forkers):
        model = Model()
        for future in [jit.fork(model, x) for _ in range(2)]:
            jit.wait(future)
        owned = sum(rpc.rpc_sync(name, targets.count_owned) for name in forkers)
        assert owned
        del model, future
        assert eventually(
            lambda: sum(rpc.rpc_sync(name, targets.count_owned) for name in forkers) < owned
        )


class TestGradients:
    def expected(self, model, x):
        leaves = [x, *model.parameters()]
        return torch.autograd.grad((model(x * 2).sum() + x.sum()), leaves)

    def test_reach_parameters_and_arguments_in_a_local_pass(self, model, x):
        x.requires_grad_()
        loss = jit.wait(jit.fork(model, x * 2)).sum() + x.sum()
        loss.backward()
        for leaf, gradient in zip([x, *model.parameters()], self.expected(model, x), strict=True):
            torch.testing.assert_close(leaf.grad, gradient)

    def test_reach_them_in_a_context_of_distributed_autograd(self, model, x):
        x.requires_grad_()
        with autograd.context() as context_id:
            loss = jit.wait(jit.fork(model, x * 2)).sum() + x.sum()
            autograd.backward(context_id, [loss])
            got = autograd.get_gradients(context_id)
        for leaf, gradient in zip([x, *model.parameters()], self.expected(model, x), strict=True):
            torch.testing.assert_close(got[leaf], gradient)
            assert leaf.grad is None

    def test_a_pass_can_be_run_again(self, model, x):
        loss = jit.wait(jit.fork(model, x)).sum()
        loss.backward(retain_graph=True)
        first = model.linear.weight.grad.clone()
        loss.backward()
        torch.testing.assert_close(model.linear.weight.grad, first * 2)

    def test_without_grad_mode_there_is_no_graph(self, model, x):
        with torch.no_grad():
            assert not jit.wait(jit.fork(model, x)).requires_grad


class TestScript:
    def test_code_that_forks_stays_in_python_and_other_code_is_compiled(self, x):
        def forks(t):
            future = jit.fork(negate, t)
            return jit.wait(future)

        assert jit.script(forks) is forks
        assert isinstance(jit.script(negate), torch.jit.ScriptFunction)

        class Forks(nn.Module):
            def forward(self, t):
                return jit.wait(jit.fork(negate, t))

        module = nn.Sequential(Forks())
        assert jit.script(module) is module and torch.equal(module(x), -x)


def test_a_worker_that_dies_is_an_error(forkers):
    pids = {name: rpc.rpc_sync(name, os.getpid) for name in forkers}
    future = jit.fork(time.sleep, 60)
    os.kill(pids["fork-0"], signal.SIGKILL)
    os.kill(pids["fork-1"], signal.SIGKILL)
    with pytest.raises(errors.WorkerDiedError, match="fork-"):
        jit.wait(future)
    agent = current.get_agent()
    assert eventually(lambda: not {info.name for info in agent.get_worker_infos()} & {*forkers})
    assert jit.wait(jit.fork(pid_of, 0)) not in pids.values()  # others take their place
