"""The content of globals: equal ones have equal digests, and it tells what functions use."""

import ctypes
import math
import pickle
import sys
import threading
import types
from typing import Any

import numpy as np
import pytest
import torch
from conftest import run_in_threads

from rayrpc._runtime.serialization.contents import (
    Content,
    Found,
    Received,
    class_id,
    content_of,
)
from rayrpc._runtime.serialization.sessions import session

KEY = ("process", "program")

SOURCE = """
rate = 2
table = []

def plain(x):
    return x + 1

def scale(x):
    return x * rate

def with_default(x=rate):
    return x

def nested():
    return lambda x: scale(x) + len(table)

def missing():
    return not_there

def closed(factor):
    def inner(x):
        return x * factor * rate
    return inner

class Agent:
    def act(self):
        return scale(1)
"""


class Globals:
    """The set of globals of the program, a ``Home``."""

    key = KEY

    def __init__(self, values, versions=()):
        self.values, self.versions = values, dict(versions)

    def find(self, names):
        found = {name: self.values[name] for name in names if name in self.values}
        versions = {name: self.versions[name] for name in found if name in self.versions}
        return Found(found, versions, [])


def nowhere(func):
    """Find no globals of any function."""
    return None


@pytest.fixture
def program():
    """The globals of a program, which no other process can import."""
    values = {"__name__": "a_program_of_nobody"}
    exec(SOURCE, values)
    return values


@pytest.fixture
def home_of(program):
    home = Globals(program)
    return lambda func: home if func.__globals__ is program else None


def digest(value, home_of=nowhere):
    return content_of(value, home_of).digest


def again(program, name, old="", new=""):
    """Return a global as another run of the program has it, in which a text is another one."""
    values = {"__name__": program["__name__"]}
    exec(SOURCE.replace(old, new) if old else SOURCE, values)
    return values[name]


class TestPlain:
    @pytest.mark.parametrize("value", [None, True, 3, 2.5, "text", b"bytes", 1 << 200, "x" * 999])
    def test_equal_values_have_equal_digests_and_no_parts(self, value):
        content = content_of(value, nowhere)
        assert content == content_of(pickle.loads(pickle.dumps(value)), nowhere)
        assert content.uses == content.objects == {} and len(content.digest) <= 64

    def test_values_of_other_types_are_other_ones(self):
        values = [0, False, 0.0, -0.0, "0", b"0", None, "x" * 999, "x" * 998, b"x" * 999]
        assert len({digest(value) for value in values}) == len(values)

    def test_a_subclass_of_a_plain_type_is_no_plain_value(self):
        class Number(int):
            pass

        assert digest(Number(3)) != digest(3)

    def test_a_module_is_its_name(self):
        assert digest(sys) == digest(sys) != digest(threading)
        assert digest(types.ModuleType("sys")) == digest(sys)

    def test_a_received_global_is_its_version(self):
        assert digest(Received(3)) == digest(Received(3)) != digest(Received(4))


class TestObjects:
    def test_what_can_be_changed_through_another_global_is_listed(self):
        inner = {"weights": torch.ones(2), "log": [1], "fixed": (1, "text")}
        objects = content_of([inner], nowhere).objects
        found = {type(each) for each in objects.values()}
        assert found == {list, dict, torch.Tensor}
        assert any(each is inner for each in objects.values())
        assert any(each is inner["log"] for each in objects.values())

    @pytest.mark.parametrize(
        "value", [(1, 2), frozenset({1}), range(3), slice(1), 3j, int, len, math.sqrt, torch.add]
    )
    def test_what_cannot_be_is_not(self, value):
        assert content_of(value, nowhere).objects == {}

    def test_instances_of_the_programs_classes_are_and_of_others_are_not(self, program):
        agent = program["Agent"]()
        assert agent in content_of(agent, nowhere).objects.values()
        lock_free = types.SimpleNamespace(number=1)
        found = content_of(lock_free, nowhere).objects.values()
        assert not any(each is lock_free for each in found)

    def test_views_of_one_storage_are_one_object(self):
        storage = torch.arange(4.0)
        first, second = (content_of(storage[n : n + 2], nowhere).objects for n in (0, 2))
        assert first.keys() == second.keys()
        assert first.keys() != content_of(storage.clone(), nowhere).objects.keys()

    def test_tensors_without_memory_are_objects_of_their_own(self):
        first, second = torch.ones(0), torch.ones(0)
        assert (
            content_of(first, nowhere).objects.keys() != content_of(second, nowhere).objects.keys()
        )

    def test_a_model_and_the_optimizer_of_its_parameters_share_some(self):
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1)
        of_model = content_of(model, nowhere).objects
        assert of_model.keys() & content_of(optimizer, nowhere).objects.keys()


class TestTensors:
    @pytest.mark.parametrize(
        "tensor",
        [
            torch.arange(6.0).view(2, 3),
            torch.tensor(3),
            torch.ones(0, 2),
            torch.tensor([1 + 2j]),
            torch.tensor([True, False]),
            torch.ones(2, dtype=torch.bfloat16),
            torch.ones(2, requires_grad=True),
        ],
    )
    def test_the_content_is_the_values(self, tensor):
        copy = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        assert digest(copy) == digest(tensor)
        assert tensor.numel() == 0 or digest(~copy if copy.dtype is torch.bool else -copy) != (
            digest(tensor)
        )

    def test_type_shape_and_need_of_a_gradient_belong_to_it(self):
        base = torch.zeros(4)
        others = [base.view(2, 2), base.int(), base.clone().requires_grad_(), torch.zeros(5)]
        digests = {digest(tensor) for tensor in (base, *others)}
        assert len(digests) == 5

    def test_how_it_lies_in_memory_does_not(self):
        tensor = torch.arange(6.0).view(2, 3)
        assert digest(tensor.t().contiguous().t()) == digest(tensor)
        assert digest(tensor[:1, :1]) == digest(torch.zeros(1, 1))  # of one element, with a stride
        base = torch.tensor([1 + 2j, 3 + 4j])
        assert digest(base.conj()) == digest(base.conj().resolve_conj())
        negated = torch._neg_view(torch.tensor([2.0, 4.0]))
        assert negated.is_neg() and digest(negated) == digest(torch.tensor([-2.0, -4.0]))

    def test_other_layouts_have_contents_too(self):
        def make(number):
            return torch.eye(2).mul(number).to_sparse()

        assert digest(make(2)) == digest(make(2)) != digest(make(3))

    def test_a_change_in_place_is_another_content(self):
        weights, array = torch.zeros(3), np.zeros(3)
        before = digest(weights), digest(array)
        weights.add_(1)
        array += 1
        assert digest(weights) != before[0] and digest(array) != before[1]


class TestFunctions:
    def test_it_is_the_code_and_what_it_uses_is_beside_it(self, program, home_of):
        content = content_of(program["scale"], home_of)
        assert content.uses == {(*KEY, "rate"): 2} and content.objects == {}
        program["rate"] = 3
        assert content_of(program["scale"], home_of).digest == content.digest

    def test_one_that_is_defined_again_in_the_same_words_is_the_same(self, program, home_of):
        values = {"__name__": program["__name__"]}
        exec(SOURCE, values)
        home = Globals(values)
        assert digest(values["scale"], lambda func: home) == digest(program["scale"], home_of)
        changed = again(program, "scale", "x * rate", "x / rate")
        assert digest(changed, lambda func: home) != digest(program["scale"], home_of)

    def test_functions_inside_of_it_use_globals_too(self, program, home_of):
        uses = content_of(program["nested"], home_of).uses
        assert set(uses) == {(*KEY, "scale"), (*KEY, "table")}  # and no builtin
        node = (*KEY, "table")
        assert uses[node] is program["table"]

    def test_a_name_that_is_not_there_is_not_used(self, program, home_of):
        assert content_of(program["missing"], home_of).uses == {}

    def test_a_default_is_part_of_it(self, program, home_of):
        assert digest(program["with_default"], home_of) != digest(
            again(program, "with_default", "rate = 2", "rate = 5"), home_of
        )
        program["with_default"].__defaults__ = (7,)
        first = digest(program["with_default"], home_of)
        program["with_default"].__defaults__ = (8,)
        assert digest(program["with_default"], home_of) != first

    def test_so_are_its_closure_its_attributes_and_keyword_defaults(self, program, home_of):
        two, three = program["closed"](2), program["closed"](3)
        assert digest(two, home_of) != digest(three, home_of)
        assert content_of(two, home_of).uses == {(*KEY, "rate"): 2}
        before = digest(program["scale"], home_of)
        program["scale"].calls = 1
        with_attribute = content_of(program["scale"], home_of)
        assert with_attribute.digest != before and with_attribute.uses == {(*KEY, "rate"): 2}

    def test_an_empty_cell_is_no_error(self, home_of):
        def outer():
            def inner():
                return later

            yield inner
            later = 1
            yield inner

        made = outer()
        empty = digest(next(made), home_of)
        assert digest(next(made), home_of) != empty

    def test_what_a_received_function_uses_is_its_versions(self, program):
        home = Globals(program, {"rate": 8})
        content = content_of(program["scale"], lambda func: home)
        assert content.uses == {(*KEY, "rate"): Received(8)}

    def test_one_that_can_be_imported_is_its_name(self, home_of):
        content = content_of([digest], lambda func: Globals(func.__globals__))
        assert content.uses == {}
        assert content_of(torch.nn.functional.relu, lambda f: Globals(f.__globals__)).uses == {}

    def test_without_a_home_its_globals_are_part_of_it(self, program):
        before = digest([program["scale"]])
        assert digest([again(program, "scale")]) == before
        program["rate"] = 3
        assert digest([program["scale"]]) != before

    def test_functions_within_an_object_use_globals_too(self, program, home_of):
        uses = content_of({"steps": [program["scale"], program["nested"]]}, home_of).uses
        assert set(uses) == {(*KEY, name) for name in ("rate", "scale", "table")}


class TestClasses:
    def test_a_class_of_the_program_is_its_identity(self, program, home_of):
        agent = program["Agent"]
        before = digest([agent], home_of)
        agent.attribute = 1
        assert digest([agent], home_of) == before != digest([again(program, "Agent")], home_of)
        assert content_of([agent], home_of).uses == {}

    def test_an_instance_is_its_class_and_its_attributes(self, program, home_of):
        agent = program["Agent"]()
        before = digest(agent, home_of)
        agent.score = 1
        changed = digest(agent, home_of)
        agent.score = 2
        assert len({before, changed, digest(agent, home_of)}) == 3

    def test_identities_are_unique_and_stay(self, quick_switches):
        classes = [type(f"C{number}", (), {}) for number in range(20)]
        found: list[list[str]] = []
        run_in_threads(lambda: found.append([class_id(each) for each in classes]), [()] * 4, 60)
        assert all(ids == found[0] for ids in found) and len(set(found[0])) == 20


class TestReferences:
    """RRefs and references to objects are what they refer to, and are not shared for it."""

    class RRef:
        _home = types.SimpleNamespace(key="group")

        def __init__(self, text):
            self.text = text

        def __str__(self):
            return self.text

        def __reduce__(self):
            encoding: Any = session.encoding
            return encoding.share(self)

    class Ref:
        def __init__(self, text):
            self.text = text

        def __repr__(self):
            return self.text

        def __reduce__(self):
            encoding: Any = session.encoding
            return encoding.refer(self, is_argument=False)

    @pytest.mark.parametrize("kind", [RRef, Ref])
    def test_two_to_the_same_are_equal(self, kind):
        assert digest([kind("1")]) == digest([kind("1")]) != digest([kind("2")])

    def test_the_pickle_that_is_made_meanwhile_goes_on_as_before(self):
        outer: Any = object()
        session.encoding = outer
        try:
            content_of([self.RRef("1"), threading.Lock()], nowhere)
            assert session.encoding is outer
        finally:
            session.encoding = None


def test_what_cannot_be_pickled_is_another_content_each_time():
    lock = threading.Lock()
    first, second = content_of(lock, nowhere), content_of(lock, nowhere)
    assert first.digest != second.digest and first.uses == first.objects == {}
    assert content_of([ctypes.c_char_p(b"x")], nowhere).digest not in (first.digest, second.digest)


def test_an_object_that_refers_to_itself_has_a_content():
    def loop(number):
        made: list = [number]
        made.append(made)
        return made

    assert digest(loop(1)) == digest(loop(1)) != digest(loop(2))


def test_a_content_is_hashed_with_its_large_buffers():
    array = np.arange(100_000)
    content = content_of([array], nowhere)
    assert isinstance(content, Content) and len(content.digest) == 20
    array[-1] = 0
    assert digest([array]) != content.digest
