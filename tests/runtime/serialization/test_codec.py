"""By reference, by value, and RRefs as forks."""

import functools
import sys
import threading
import types

import cloudpickle
import pytest
import targets
import torch

from rayrpc._protocol.ids import GloballyUniqueId
from rayrpc._protocol.messages import Fork, Frame, Kind, Payload
from rayrpc._runtime.invocation import Invocation
from rayrpc._runtime.serialization.codec import Codec
from rayrpc.errors import FunctionNotFoundError, SerializationError
from rayrpc.rref_proxy import RRef


class FakeSharer:
    """Note what the codec does with RRefs."""

    def __init__(self):
        self.log = []
        self.count = 0

    def share(self, rref, to, into):
        self.count += 1
        fork_id = GloballyUniqueId(0, self.count)
        self.log.append(("share", to))
        into.append(Fork(fork_id, fork_id, 0, 0))

    def lend(self, rref, to):
        return GloballyUniqueId(5, 6) if to == 9 else None

    def borrow(self, rref_id):
        return ("borrowed", rref_id)

    def unshare(self, fork):
        self.log.append("unshare")

    def release_later(self, fork):
        self.log.append("release later")

    def receive(self, fork):
        self.log.append("receive")
        return ("rref", fork.fork_id.local_id)

    def discard(self, fork):
        self.log.append("discard")


@pytest.fixture
def sharer():
    return FakeSharer()


@pytest.fixture
def codec(sharer):
    return Codec(sharer)


def through(codec, obj, shares_main=True):
    payload = codec.encode(obj, 1, shares_main)
    return codec.decode(payload.data, payload.buffers, payload.forks)


def make_rref():
    rref = RRef.__new__(RRef)
    rref._fork_id = None
    return rref


@pytest.mark.parametrize(
    "func", [targets.add, min, torch.add, torch.nn.functional.relu, targets.Adder.static]
)
def test_importable_functions_go_by_reference(codec, func):
    assert through(codec, func) is func
    assert len(codec.encode(func, 1, True).data) < 100  # a function by value takes hundreds


def test_bound_methods_and_partials_arrive(codec):
    assert through(codec, targets.Point(2).moved)(3).x == 5
    assert through(codec, functools.partial(targets.add, 1))(2) == 3


def test_lambdas_and_closures_go_by_value(codec):
    base = 5
    assert through(codec, lambda x: x + base)(1) == 6


def test_main_goes_by_reference_only_to_workers_that_share_it(codec, monkeypatch):
    main = types.ModuleType("__main__")
    exec("n = 1\ndef f():\n    return n", main.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert through(codec, main.f) is main.f
    copy = through(codec, main.f, shares_main=False)
    assert copy is not main.f and copy() == 1


def test_the_main_of_a_spawned_process_goes_by_value_too(codec, monkeypatch):
    main = types.ModuleType("__mp_main__")
    exec("n = 1\ndef f():\n    return n", main.__dict__)
    monkeypatch.setitem(sys.modules, "__mp_main__", main)
    payload = codec.encode(main.f, 1, False)
    monkeypatch.delitem(sys.modules, "__mp_main__")  # the receiver is no such process
    assert codec.decode(payload.data, payload.buffers, ())() == 1


def test_an_object_may_be_sent_while_another_is_being_pickled(codec, sharer):
    class Sender:
        def __reduce__(self):
            inner = codec.encode([make_rref()], 2, True)
            return codec.decode, (inner.data, (), inner.forks)

    payload = codec.encode([make_rref(), Sender(), make_rref()], 1, True)
    assert sharer.log == [("share", 1), ("share", 2), ("share", 1)]
    assert [fork.fork_id.local_id for fork in payload.forks] == [1, 3]
    assert codec.decode(payload.data, (), payload.forks) == [
        ("rref", 1),
        [("rref", 2)],
        ("rref", 3),
    ]


def test_a_class_of_main_goes_by_value_to_workers_that_do_not_share_it(codec, monkeypatch):
    main = types.ModuleType("__main__")
    exec("class C:\n    x = 1", main.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", main)
    payload = codec.encode(main.C(), 1, False)
    del main.C
    assert codec.decode(payload.data, (), ()).x == 1


class Number(int):
    """No plain type."""


class TestCalls:
    """Calls of Python functions with plain arguments, which have a pickle of their own."""

    def encode(self, codec, func, *args, shares_main=True, **kwargs):
        call = Invocation(func, args, kwargs)
        payload = codec.encode_call(call, 1, shares_main, None, lambda ref: None)
        assert payload[1:] == Payload(b"", [])[1:]
        return payload.data

    def through(self, codec, *call, **options):
        return Invocation(*codec.decode(self.encode(codec, *call, **options), (), ()))

    @pytest.mark.parametrize("args", [(), (1, "two", b"3", 4.0, None, True), (Number(5), [6])])
    @pytest.mark.parametrize("kwargs", [{}, {"x": 1, "y": None}, {"x": Number(7), "y": (8,)}])
    def test_arguments_arrive(self, codec, args, kwargs):
        call = self.through(codec, targets.add, *args, **kwargs)
        assert call == (targets.add, args, kwargs)
        arrived = [*call.args, *call.kwargs.values()]
        assert list(map(type, arrived)) == list(map(type, [*args, *kwargs.values()]))

    @pytest.mark.parametrize("args", [[1, 2], "", range(3)])
    def test_any_sequence_arrives_as_it_is(self, codec, args):
        payload = codec.encode_call(Invocation(targets.add, args), 1, True, None, lambda ref: None)
        assert codec.decode(payload.data, (), ()) == (targets.add, args, {})

    def test_functions_without_a_name_go_by_value(self, codec):
        base = 5
        assert self.through(codec, lambda x: x + base, 1)() == 6

    def test_functions_of_main_go_by_value_to_workers_with_another_one(self, codec, monkeypatch):
        main = types.ModuleType("__main__")
        exec("n = 1\ndef f(m):\n    return n + m", main.__dict__)
        monkeypatch.setitem(sys.modules, "__main__", main)
        assert self.through(codec, main.f, 2).func is main.f
        call = self.through(codec, main.f, 2, shares_main=False)
        assert call.func is not main.f and call() == 3

    def test_functions_of_registered_modules_go_by_value(self, codec, monkeypatch):
        module = types.ModuleType("registered_module")
        exec("def f(m):\n    return m + 1", module.__dict__)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        assert self.through(codec, module.f, 2).func is module.f
        cloudpickle.register_pickle_by_value(module)
        try:
            call = self.through(codec, module.f, 2)
        finally:
            cloudpickle.unregister_pickle_by_value(module)
        assert call.func is not module.f and call() == 3

    def test_one_that_is_too_large_is_an_error(self, codec, monkeypatch):
        monkeypatch.setattr("rayrpc._runtime.serialization.codec.MAX_PICKLE", 1000)
        assert len(self.encode(codec, targets.add, bytes(900))) <= 1000
        with pytest.raises(SerializationError, match="1000 are possible"):
            self.encode(codec, targets.add, bytes(1000))


def test_scripted_functions_and_modules_arrive(codec):
    assert through(codec, targets.scripted_add) is targets.scripted_add
    module = torch.jit.script(torch.nn.Linear(2, 2))
    x = torch.ones(1, 2)
    assert torch.equal(through(codec, module)(x), module(x))


def test_what_cannot_be_pickled_says_what_to_do(codec):
    with pytest.raises(SerializationError, match=r"cannot be sent.*share such objects"):
        codec.encode(threading.Lock(), 1, True)
    with pytest.raises(RuntimeError, match=r"Can not pickle torch\.futures\.Future"):
        codec.encode(torch.futures.Future(), 1, True)


def test_a_name_that_is_not_here_is_said_in_torchs_words(codec, monkeypatch):
    monkeypatch.setattr(targets, "gone", targets.pid, raising=False)
    data = codec.encode(targets.pid, 1, True).data.replace(b"\x03pid", b"\x03pix")
    with pytest.raises(FunctionNotFoundError, match="RPC pickler does not serialize"):
        codec.decode(data, [], ())


class TestRRefs:
    def test_they_travel_as_forks_in_the_header(self, codec, sharer):
        payload = codec.encode({"a": [make_rref(), make_rref()]}, 7, True)
        assert len(payload.forks) == 2 and sharer.log == [("share", 7)] * 2
        got = codec.decode(payload.data, [], payload.forks)
        assert got == {"a": [("rref", 1), ("rref", 2)]}

    def test_a_failed_encoding_takes_them_back(self, codec, sharer):
        with pytest.raises(SerializationError):
            codec.encode([make_rref(), threading.Lock()], 7, True)
        assert sharer.log.count("unshare") == sharer.log.count(("share", 7)) > 0

    def test_those_that_a_failed_decoding_left_are_released(self, codec, sharer):
        payload = codec.encode([targets.pid, make_rref()], 7, True)
        broken = payload.data.replace(b"\x03pid", b"\x03pix")
        with pytest.raises(FunctionNotFoundError):
            codec.decode(broken, [], payload.forks)
        assert sharer.log[-1] == "discard"

    def test_a_call_lends_its_receivers_own(self, codec, sharer):
        rref = make_rref()
        payload = codec.encode({"a": [rref]}, 9, True, lends=True)
        assert payload.lent == (rref,) and not payload.forks and not sharer.log
        got = codec.decode(payload.data, [], ())
        assert got == {"a": [("borrowed", GloballyUniqueId(5, 6))]}

    @pytest.mark.parametrize(("to", "lends"), [(9, False), (7, True)])
    def test_replies_and_rrefs_of_other_owners_are_not_lent(self, codec, sharer, to, lends):
        payload = codec.encode(make_rref(), to, True, lends=lends)
        assert len(payload.forks) == 1 and not payload.lent

    def test_those_of_a_request_that_is_not_sent_are_released(self, codec, sharer):
        payload = codec.encode([make_rref(), make_rref()], 7, True, lends=True)
        del payload
        assert sharer.log[2:] == ["release later"] * 2
        for lends in (True, False):
            sharer.log.clear()
            frame = Frame(Kind.CALL, 1, 2, forks=codec.encode(make_rref(), 7, True, lends=lends)[2])
            frame.begin_to_send()
            assert Frame.unpack(frame.pack()).forks == frame.forks
            del frame
            assert sharer.log == [("share", 7)]

    def test_those_whose_receiving_is_interrupted_are_released(self, codec, sharer):
        payload = codec.encode([make_rref(), make_rref()], 7, True)
        receive = sharer.receive

        def interrupted(fork):
            receive(fork)
            raise KeyboardInterrupt

        sharer.receive = interrupted
        sharer.log.clear()
        with pytest.raises(KeyboardInterrupt):
            codec.decode(payload.data, [], payload.forks)
        assert sharer.log == ["receive", "discard", "discard"]

    def test_outside_of_a_call_they_cannot_be_pickled(self):
        import pickle

        with pytest.raises(RuntimeError, match="Can not pickle rref in python pickler"):
            pickle.dumps(make_rref())
