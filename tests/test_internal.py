"""The pickler of calls, which a program may replace, and torch's names around it."""

import pickle
from typing import Any

import pytest
import torch
from torch.autograd.profiler_legacy import profile

import rayrpc as rpc
from rayrpc import api, functions, internal
from rayrpc._runtime.serialization.reducers import REDUCERS
from rayrpc.internal import PythonUDF, RemoteException, RPCExecMode


class Meters:
    """Is sent in centimeters."""

    def __init__(self, number: float) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        raise TypeError("only the pickler of the program sends meters")


def meters(centimeters):
    return Meters(centimeters / 100)


class UsersPickler(internal._InternalRPCPickler):
    """Counts what it pickles."""

    count = 0

    def serialize(self, obj):
        self.count += 1
        return super().serialize(obj)


@pytest.fixture
def pickler(worker_b):
    users = UsersPickler()
    with api._use_rpc_pickler(users):
        yield users
    assert api._default_pickler is internal._internal_rpc_pickler


def add(x, y=1):
    return x + y


def number_of(value):
    return value.number


@functions.async_execution
def add_later(to, x):
    return rpc.rpc_async(to, add, (x,))


class TestUsersPickler:
    def test_it_pickles_calls_of_all_kinds(self, pickler):
        x = torch.ones(2)
        assert rpc.rpc_sync("b", add, (x,), {"y": 2}).tolist() == [3, 3]
        assert rpc.rpc_async("b", add, (x,)).wait().tolist() == [2, 2]
        rref = rpc.remote("b", add, (x,))
        assert rref.to_here().tolist() == [2, 2]
        assert pickler.count == 3

    def test_functions_without_arguments_run(self, pickler):
        assert rpc.rpc_sync("b", dict) == {}

    def test_it_sends_rrefs(self, pickler):
        rref: Any = rpc.RRef(torch.ones(2))
        assert rpc.rpc_sync("b", rpc.RRef.owner_name, (rref,)) == "a"

    def test_async_execution_is_kept(self, pickler):
        assert rpc.rpc_sync("b", add_later, ("a", 1)) == 2

    def test_errors_of_the_function_keep_their_type(self, pickler):
        with pytest.raises(ZeroDivisionError):
            rpc.rpc_sync("b", divmod, (1, 0))

    def test_its_reducers_are_used(self, pickler):
        with pytest.raises(TypeError, match="only the pickler of the program"):
            rpc.rpc_sync("b", number_of, (Meters(2.5),))
        pickler._register_reducer(Meters, lambda value: (meters, (value.number * 100,)))
        try:
            assert rpc.rpc_sync("b", number_of, (Meters(2.5),)) == 2.5
        finally:
            del REDUCERS[Meters]  # they are those of all picklers


def test_tensors_are_in_a_table_beside_the_bytes():
    x, y = torch.ones(1000), torch.zeros(1)
    data, tensors = internal.serialize({"x": x, "all": [y, x]})
    assert tensors == [x, y] and len(data) < 1000
    found = internal.deserialize(data, tensors)
    assert found["x"] is x and found["all"] == [y, x]


class TestFunctionsOfLibraries:
    def test_an_error_becomes_a_value_and_an_error_again(self, worker_a, capsys):
        result = internal._run_function(PythonUDF(divmod, (1, 0), {}))
        assert isinstance(result, RemoteException)
        assert result.exception_type is ZeroDivisionError
        assert pickle.loads(pickle.dumps(result)) == result
        with pytest.raises(ZeroDivisionError, match=r"On WorkerInfo.*name=a"):
            internal._handle_exception(result)
        assert "ZeroDivisionError" in capsys.readouterr().err

    def test_another_value_is_not_touched(self, worker_a):
        result = internal._run_function(PythonUDF(add, (1,), {"y": 2}))
        assert result == 3
        internal._handle_exception(result)

    def test_the_range_of_a_call_has_torchs_name(self):
        with profile() as recorded:
            record = internal._start_record_function(RPCExecMode.REMOTE, "add", "a", "b")
            record.__exit__(None, None, None)
        assert [event.name for event in recorded.function_events] == ["rpc_remote#add(a -> b)"]

    def test_the_agent_is_that_of_this_process(self, worker_a):
        assert internal._get_current_rpc_agent() is worker_a.agent
