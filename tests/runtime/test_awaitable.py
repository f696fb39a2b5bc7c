"""Await: computed once, where it is first asked for, and like its value in all else."""

import copy
import operator
import pickle
import threading
import weakref

import numpy as np
import pytest
import targets
import torch
from conftest import eventually, keeps_variables
from interrupting import interrupts_wait
from torch import nn

import rayrpc as rpc
from rayrpc._runtime.awaitable import Await
from rayrpc._runtime.rrefs.lazy import LazyRemote
from rayrpc.jit import awaitable, awaitable_nowait, awaitable_wait

WAIT = 60.0


@pytest.fixture
def runs():
    return []


@pytest.fixture
def ones(runs):
    """An Await of a matrix of ones."""

    def make(rows, columns=2):
        runs.append(threading.get_ident())
        return torch.ones(rows, columns)

    return awaitable(make, 2, columns=2)


class TestComputing:
    def test_happens_once_when_it_is_asked_for(self, ones, runs):
        assert repr(ones) == "<Await of make: not computed>" and runs == []
        assert awaitable_wait(ones) is awaitable_wait(ones)
        assert runs == [threading.get_ident()]
        assert repr(ones).startswith("Await(tensor(")

    def test_an_error_is_kept(self, runs):
        def fail():
            runs.append(1)
            raise KeyError("why")

        aw = awaitable(fail)
        for _ in range(2):
            with pytest.raises(KeyError, match="why"):
                aw + 1
        assert runs == [1] and repr(aw) == "<Await of fail: failed with KeyError('why')>"

    def test_threads_that_ask_at_once_get_the_same(self):
        gate, entered = threading.Event(), threading.Event()

        def slow():
            entered.set()
            gate.wait(WAIT)
            return object()

        aw, got = awaitable(slow), []
        threads = [threading.Thread(target=lambda: got.append(aw.wait())) for _ in range(3)]
        for thread in threads:
            thread.start()
        assert entered.wait(WAIT)
        gate.set()
        for thread in threads:
            thread.join(WAIT)
        assert len(got) == 3 and len(set(map(id, got))) == 1

    def test_a_signal_ends_the_wait_for_another_thread(self):
        gate, entered = threading.Event(), threading.Event()
        aw = awaitable(lambda: entered.set() or gate.wait(2 * WAIT))
        thread = threading.Thread(target=aw.wait)
        thread.start()
        assert entered.wait(WAIT)
        with interrupts_wait(gate.set):
            aw.wait()
        gate.set()
        thread.join(WAIT)
        assert aw.wait() is True

    def test_one_that_asks_for_itself_says_so(self):
        aw = awaitable(lambda: aw + 1)
        with pytest.raises(RuntimeError, match="asks for that value itself"):
            aw.wait()

    def test_arguments_are_let_go_of(self):
        class Large:
            pass

        large = Large()
        gone = weakref.ref(large)
        aw = awaitable(lambda _: 1, large)
        assert aw.wait() == 1
        del large
        assert gone() is None

    def test_an_error_keeps_no_variable_of_the_first_that_asks(self):
        def fail():
            try:
                raise KeyError("the cause")
            except KeyError as exc:
                raise ValueError("x") from exc

        aw = awaitable(fail)
        assert not keeps_variables(aw.wait)
        with pytest.raises(ValueError, match="x"):
            aw.wait()

    def test_without_a_function_the_value_is_there(self):
        value = [1]
        aw = awaitable_nowait(value)
        assert awaitable_wait(aw) is value

    def test_those_of_torch_are_waited_for_too(self):
        assert torch.equal(awaitable_wait(torch.jit._awaitable(torch.ones, 2)), torch.ones(2))


class TestLikeItsValue:
    @pytest.mark.parametrize(
        "name",
        ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "eq", "lt", "ge"],
    )
    def test_in_operators_on_both_sides(self, name):
        func = getattr(operator, name)
        value, other = torch.full((2, 2), 3.0), torch.full((2, 2), 2.0)
        expected = func(value, other)
        assert torch.equal(func(awaitable_nowait(value), other), expected)
        assert torch.equal(func(value, awaitable_nowait(other)), expected)
        assert torch.equal(func(awaitable_nowait(value), awaitable_nowait(other)), expected)

    def test_numbers(self):
        three = awaitable_nowait(3)
        assert (-three, +three, ~three, abs(three)) == (-3, 3, -4, 3)
        assert (2**three, three % 2, divmod(7, three), divmod(three, 2)) == (8, 1, (2, 1), (1, 1))
        assert (three << 1, 1 << three, three & 1, three | 4, three ^ 1) == (6, 8, 1, 7, 2)
        assert (int(three), float(three), complex(three), bool(three)) == (3, 3.0, 3 + 0j, True)
        assert [0, 1, 2, 9][three] == 9 and f"{three:03}" == "003" and str(three) == "3"
        assert round(awaitable_nowait(1.26), 1) == 1.3 and hash(three) == hash(3)

    def test_containers(self):
        aw = awaitable_nowait({"a": 1})
        aw["b"] = 2
        del aw["a"]
        assert "b" in aw and len(aw) == 1 and list(aw) == ["b"] and aw["b"] == 2
        assert list(reversed(awaitable_nowait([1, 2]))) == [2, 1]
        assert next(awaitable_nowait(iter([5]))) == 5

    def test_attributes_and_calls(self, ones, runs):
        assert ones.shape == (2, 2) and len(runs) == 1
        point = awaitable_nowait(targets.Point(1))
        point.x = 4
        assert awaitable_wait(point).x == 4 and point.moved(1).x == 5
        del point.x
        assert not hasattr(point, "x") and "moved" in dir(point)
        assert awaitable_nowait(max)(1, 2, key=lambda n: -n) == 1
        with awaitable_nowait(threading.Lock()) as held:
            assert held

    def test_functions_and_modules_of_torch(self, ones, runs):
        assert torch.equal(torch.add(ones, 1), torch.full((2, 2), 2.0))
        assert torch.stack([ones, ones]).shape == (2, 2, 2)
        assert torch.equal(torch.zeros(2, 2) + ones, torch.ones(2, 2))
        assert nn.Linear(2, 3)(ones).shape == (2, 3)
        assert nn.LSTM(2, 3)(ones)[0].shape == (2, 3)
        assert np.asarray(ones).tolist() == [[1, 1], [1, 1]] and len(runs) == 1

    def test_gradients_flow(self):
        weight = torch.rand(2, requires_grad=True)
        (awaitable(lambda: weight * 2) * 3).sum().backward()
        torch.testing.assert_close(weight.grad, torch.full((2,), 6.0))

    def test_it_pickles_as_its_value(self, ones):
        for again in (pickle.loads(pickle.dumps(ones)), copy.deepcopy(ones)):
            assert type(again) is torch.Tensor and torch.equal(again, torch.ones(2, 2))


class TestSubclasses:
    """What LazyAwaitable of TorchRec is used for."""

    def test_override_how_it_is_computed(self):
        class Sum(Await):
            def __init__(self, *parts):
                super().__init__()
                self._parts = parts

            def _wait_impl(self):
                return sum(self._parts)

        assert Sum(1, 2, 3) + 1 == 7
        with pytest.raises(NotImplementedError, match="Await has no function"):
            Await().wait()

    def test_callbacks_change_the_value_in_turn(self, runs):
        aw = awaitable(lambda: 1)
        aw.callbacks.append(lambda value: value + 1)
        aw.callbacks.append(lambda value: runs.append(value) or value * 10)
        assert aw == 20 and aw == 20 and runs == [2]


def type_name(value):
    return type(value).__name__


def put(name, value):
    targets.shared[name] = value
    return value


def look_up(name):
    return targets.shared.get(name)


def add_one(lazily):
    return type(lazily).__name__, lazily + 1


class TestRemote:
    def test_becomes_the_result_when_it_is_used(self, workers):
        total = rpc.lazy("alice", torch.add, args=(torch.ones(2), 1))
        assert isinstance(total, LazyRemote)
        assert repr(total).startswith("<LazyRemote of UserRRef(")
        assert repr(total).endswith(") on alice: not computed>")
        assert torch.equal(total * 2, torch.full((2,), 4.0))

    def test_starts_at_once(self, workers):
        value = rpc.lazy("alice", put, args=("lazily", 1))
        assert eventually(lambda: rpc.rpc_sync("alice", look_up, args=("lazily",)) == 1)
        assert value == 1

    def test_errors_are_raised_where_it_is_used(self, workers):
        failing = rpc.lazy("alice", targets.fail, args=("lazily",))
        for _ in range(2):
            with pytest.raises(ValueError, match="lazily"):
                failing + 1

    def test_travels_as_a_reference(self, workers):
        value = rpc.lazy("alice", torch.ones, args=(2,))
        name, result = rpc.rpc_sync("bob", add_one, args=(value,))
        assert name == "LazyRemote" and torch.equal(result, torch.full((2,), 2.0))
        again = rpc.rpc_sync("bob", targets.identity, args=(value,))
        assert isinstance(again, LazyRemote) and torch.equal(again + 0, torch.ones(2))

    def test_an_await_travels_as_its_value(self, workers):
        assert rpc.rpc_sync("alice", type_name, args=(awaitable(lambda: 1),)) == "int"

    def test_of_an_rref(self, workers):
        rref = rpc.remote("alice", torch.ones, args=(2,))
        assert torch.equal(rref.lazy() + 1, torch.full((2,), 2.0))
        own = rpc.RRef([1])
        assert own.lazy() == [1]
