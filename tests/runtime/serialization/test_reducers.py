"""How instances of some classes are pickled in all calls, by reference and by value."""

import io
import pickle

import pytest
import targets
import torch
from decoding_peer import make_codec

from rayrpc._runtime.serialization.reducers import REDUCERS, add_object_type, add_reducer
from rayrpc._runtime.serialization.sessions import object_types, reduce_object
from rayrpc.errors import SerializationError


class Thing:
    def __init__(self, number=0):
        self.number = number


class Special(Thing):
    """A subclass, of which no reducer is told."""


@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor:
    return x + 1


class Holder:
    scripted = scripted


@pytest.fixture
def codec():
    return make_codec()


@pytest.fixture
def reducers(monkeypatch):
    """Drop at the end what a test adds."""
    for name, each in (("Thing", Thing), ("Special", Special)):
        assert each not in REDUCERS, name
    yield
    for each in (Thing, Special):
        REDUCERS.pop(each, None)
        object_types.discard(each)


def through(codec, obj, shares_main=True):
    payload = codec.encode(obj, 1, shares_main)
    return codec.decode(payload.data, payload.buffers, payload.forks)


class TestAdding:
    def test_a_reducer_counts_for_calls_by_reference_and_by_value(self, codec, reducers):
        add_reducer(Thing, lambda thing: (divmod, (thing.number, 3)))
        assert through(codec, [Thing(7)]) == [(2, 1)]
        thing, by_value = through(codec, [Thing(7), lambda: 5])  # a lambda has no name
        assert thing == (2, 1) and by_value() == 5

    def test_it_counts_for_exactly_its_class(self, codec, reducers):
        add_reducer(Thing, lambda thing: (divmod, (thing.number, 3)))
        (found,) = through(codec, [Special(7)])
        assert type(found) is Special and found.number == 7

    def test_a_later_one_replaces_it(self, codec, reducers):
        add_reducer(Thing, lambda thing: (int, ()))
        add_reducer(Thing, lambda thing: (str, ()))
        assert through(codec, [Thing()]) == [""]

    def test_other_picklers_do_not_know_it(self, reducers):
        add_reducer(Thing, lambda thing: (int, ()))
        assert type(pickle.loads(pickle.dumps(Thing(7)))) is Thing

    def test_a_type_of_references_leaves_the_pickle(self, codec, reducers):
        add_object_type(Thing)
        assert Thing in object_types and REDUCERS[Thing] is reduce_object
        thing = Thing(7)
        payload = codec.encode([1, thing], 1, True)
        assert payload.objects is not None and payload.objects.refs == (thing,)
        assert codec.decode(payload.data, (), (), objects=["there"]) == [1, "there"]


class TestScripted:
    def test_a_function_that_can_be_named_is_itself(self, codec):
        assert through(codec, scripted) is scripted
        assert through(codec, Holder.scripted) is scripted

    def test_one_beneath_a_wrapper_is_found(self, codec):
        func = targets.scripted_add
        assert through(codec, [func])[0] is func

    def test_one_that_was_made_in_a_function_goes_by_value(self, codec):
        factor = 3

        def times(x: torch.Tensor) -> torch.Tensor:
            return x * 2

        made = through(codec, torch.jit.script(times))
        assert made(torch.ones(1)).item() == 2 and factor == 3

    def test_one_that_was_traced_arrives_as_its_code(self, codec):
        traced = torch.jit.trace(lambda x: x * 4, torch.ones(1))
        assert through(codec, traced)(torch.ones(1)).item() == 4

    def test_so_does_one_that_was_never_python(self, codec):
        unit = torch.jit.CompilationUnit("def double(x: Tensor):\n    return x * 2\n")
        assert through(codec, unit.double)(torch.ones(1)).item() == 2

    @pytest.mark.parametrize("module", [torch.nn.Linear(2, 2), torch.nn.ReLU()])
    def test_a_module_is_a_copy_of_its_own(self, codec, module):
        module = torch.jit.script(module)
        made = through(codec, module)
        x = torch.ones(1, 2)
        assert made is not module and torch.equal(made(x), module(x))
        for parameter in made.parameters():
            with torch.no_grad():
                parameter.zero_()
        assert not module.state_dict() or not torch.equal(made(x), module(x))


class TestBuiltins:
    @pytest.mark.parametrize("func", [torch.add, torch.ones, len, io.open])
    def test_a_function_in_c_is_found_by_its_name(self, codec, func):
        assert through(codec, [func])[0] is func

    def test_a_method_in_c_goes_with_its_object(self, codec):
        assert through(codec, [[1, 2].count])[0](2) == 1

    def test_one_without_a_place_cannot_be_sent(self, codec):
        with pytest.raises(SerializationError, match="cannot be sent to another worker"):
            through(codec, [object().__dir__, (n for n in ())])
