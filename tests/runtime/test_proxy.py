"""Proxies of RRefs: their methods run on the value, at its owner."""

import pickle
import threading
from typing import Any

import pytest
import torch
from conftest import keeps_variables
from memory_workers import WAIT, memory_group
from torch.futures import Future

from rayrpc import api
from rayrpc._runtime import current
from rayrpc._runtime.rrefs.handle import RRef
from rayrpc._runtime.rrefs.proxy import RRefProxy
from rayrpc.errors import CallTimeoutError
from rayrpc.functions import async_execution

go = threading.Event()


class Counter:
    count = 0

    def add(self, number, /, *, times=1):
        self.count += number * times
        return self.count

    def fail(self):
        raise KeyError("as expected")

    def thread(self):
        return threading.get_ident()

    @async_execution
    def add_later(self, number):
        future = Future()
        future.set_result(self.add(number))
        return future

    def wait(self):
        go.wait(WAIT)

    @staticmethod
    def double(number):
        return number * 2

    @classmethod
    def name(cls):
        return cls.__name__

    def func_name(self, func_name, rref, timeout):
        return func_name, rref, timeout


def make_slowly():
    go.wait(WAIT)
    return Counter()


@pytest.fixture
def workers():
    """Two workers, of which the first one is this process's."""
    go.clear()
    with memory_group() as start:
        a, b = start("a"), start("b")
        current.set_agent(a.agent)
        yield a, b
        go.set()
        current.set_agent(None)


@pytest.fixture(params=["user", "owner"])
def rref(workers, request):
    """An RRef of a counter on the other worker, or on this one."""
    a, b = workers
    return a.remote(b, Counter) if request.param == "user" else RRef(Counter())


def value_of(way, result):
    return {"rpc_sync": lambda: result, "rpc_async": lambda: result.wait()}.get(
        way, lambda: result.to_here()
    )()


@pytest.mark.parametrize("way", ["rpc_sync", "rpc_async", "remote"])
class TestEachWay:
    def test_a_method_changes_the_value_itself(self, rref, way):
        proxy = getattr(rref, way)()
        assert value_of(way, proxy.add(2)) == 2
        assert value_of(way, proxy.add(3, times=2)) == 8
        assert rref.to_here().count == 8

    def test_an_async_method_replies_with_the_value_of_its_future(self, rref, way):
        assert value_of(way, getattr(rref, way)().add_later(5)) == 5

    def test_static_and_class_methods_are_called_too(self, rref, way):
        proxy = getattr(rref, way)()
        assert value_of(way, proxy.double(4)) == 8 and value_of(way, proxy.name()) == "Counter"

    def test_an_error_of_the_method_is_raised_where_the_result_is(self, rref, way):
        with pytest.raises(KeyError, match="as expected"):
            value_of(way, getattr(rref, way)().fail())

    def test_a_method_that_is_missing_is_an_error_of_the_call(self, rref, way):
        with pytest.raises(AttributeError, match="has no attribute 'missing'"):
            value_of(way, getattr(rref, way)().missing())

    @pytest.mark.parametrize(
        "fail",
        [
            lambda proxy: proxy.fail(),
            lambda proxy: proxy.missing(),
            lambda proxy: proxy.add(threading.Lock()),
        ],
        ids=["its error", "missing", "cannot be sent"],
    )
    def test_no_error_keeps_variables_of_the_program(self, rref, way, fail):
        assert not keeps_variables(lambda: value_of(way, fail(getattr(rref, way)())))

    def test_arguments_may_have_the_names_of_the_proxys_own(self, rref, way):
        method = getattr(rref, way)().func_name
        result = method(func_name="x", rref=1, timeout=2)
        assert value_of(way, result) == ("x", 1, 2)


class TestUnknownType:
    """The type of a value, which tells how a method is called, may not be known yet."""

    def test_rpc_async_does_not_wait_for_it(self, workers):
        a, b = workers
        rref = a.remote(b, make_slowly)
        future = rref.rpc_async().add(2)
        later = rref.rpc_async().add_later(3)
        assert not future.done()
        go.set()
        assert {future.wait(), later.wait()} in ({2, 5}, {5, 3})

    def test_an_error_of_the_method_is_that_of_the_future(self, workers):
        a, b = workers
        rref = a.remote(b, make_slowly)
        futures = [rref.rpc_async().fail(), rref.rpc_async().missing()]
        go.set()
        with pytest.raises(KeyError, match="as expected"):
            futures[0].wait()
        with pytest.raises(AttributeError, match="missing"):
            futures[1].wait()
        assert not any(keeps_variables(future.wait) for future in futures)

    def test_an_error_of_the_function_that_makes_the_value_is_one_of_each_method(self, workers):
        a, b = workers
        rref = a.remote(b, Counter().fail)
        with pytest.raises(KeyError, match="as expected"):
            rref.rpc_async().add(1).wait()
        with pytest.raises(KeyError, match="as expected"):
            rref.rpc_sync().add(1)

    def test_its_timeout_counts_for_the_type_too(self, workers):
        a, b = workers
        rref, other = a.remote(b, make_slowly), a.remote(b, make_slowly)
        with pytest.raises(CallTimeoutError):
            rref.rpc_sync(timeout=0.02).add(1)
        with pytest.raises(RuntimeError, match="RPC ran for more than set timeout"):
            other.rpc_async(timeout=0.02).add(1).wait()
        go.set()
        assert rref.rpc_sync().add(1) == 1


def test_its_timeout_counts_for_each_method(workers):
    a, b = workers
    rref = a.remote(b, Counter)
    assert rref.rpc_sync().add(1) == 1
    with pytest.raises(CallTimeoutError, match=r"timeout \(20 ms\)"):
        rref.rpc_sync(timeout=0.02).wait()
    with pytest.raises(RuntimeError, match=r"timeout \(30 ms\)"):
        rref.rpc_async(timeout=0.03).wait().wait()


def test_a_proxy_travels_with_its_rref_and_its_timeout():
    class Reference:
        def __reduce__(self):
            return str, ("the rref",)

    rref: Any = Reference()
    proxy = RRefProxy(rref, api.rpc_sync, 3.0)
    made = pickle.loads(pickle.dumps(proxy))
    assert (made.rref, made.rpc_api, made.rpc_timeout) == ("the rref", api.rpc_sync, 3.0)


def test_a_scripted_module_is_called_without_a_look_at_its_methods(workers):
    rref = RRef(torch.jit.script(torch.nn.ReLU()), torch.nn.Module)
    assert rref.rpc_sync().forward(torch.tensor([-1.0, 2.0])).tolist() == [0, 2]
