"""What a call runs: a function with its arguments, its marks, and its name for messages."""

import functools
from typing import Any

import pytest
import torch

from rayrpc._runtime import invocation, quiescence
from rayrpc._runtime.invocation import (
    NOTHING,
    Invocation,
    asked_ahead,
    forwards,
    is_asked_ahead,
    is_prompt,
    prompt,
    user_function,
)
from rayrpc._runtime.rrefs.proxy import RRefProxy


def join(*args, **kwargs):
    return args, kwargs


def double(argument):
    return argument * 2


class TestRunning:
    def test_it_runs_with_its_arguments(self):
        assert Invocation(join, (1, 2), {"x": 3})() == ((1, 2), {"x": 3})
        assert Invocation(join, [1])() == ((1,), {})

    def test_without_arguments_it_has_none(self):
        assert Invocation(join)() == ((), {}) and NOTHING() is None

    def test_it_travels_as_a_tuple(self):
        made = Invocation(join, (1,), {"x": 2})
        assert tuple(made) == (join, (1,), {"x": 2}) and Invocation(*made) == made


class TestMap:
    def test_all_arguments_are_changed_in_a_copy(self):
        args, kwargs = [1, 2], {"x": 3}
        changed = Invocation(join, args, kwargs).map(double)
        assert changed() == ((2, 4), {"x": 6})
        assert args == [1, 2] and kwargs == {"x": 3}

    def test_a_function_that_forwards_keeps_its_own_arguments(self):
        @forwards
        def call_method(name, flag, args, kwargs):
            return name, flag, args, kwargs

        sent = Invocation(call_method, ("name", 1, (1, 2), {"x": 3}))
        assert sent.map(double)() == ("name", 1, (2, 4), {"x": 6})

    def test_only_the_arguments_themselves_are_changed_and_not_what_is_in_them(self):
        assert Invocation(join, ((1,),)).map(lambda each: each)() == (((1,),), {})
        assert Invocation(join, ((1,),)).map(double)() == (((1, 1),), {})


class TestMarks:
    def test_a_marked_function_is_itself_and_has_the_one_mark(self):
        def first():
            """Is prompt."""

        def second():
            """Is asked ahead."""

        assert prompt(first) is first and asked_ahead(second) is second
        assert (is_prompt(first), is_asked_ahead(first)) == (True, False)
        assert (is_prompt(second), is_asked_ahead(second)) == (False, True)

    @pytest.mark.parametrize("func", [join, torch.add, None, "method", functools.partial(join)])
    def test_others_have_none(self, func):
        assert not is_prompt(func) and not is_asked_ahead(func)

    def test_an_object_that_has_every_attribute_has_none(self):
        class Proxy:
            def __getattr__(self, name):
                return name

        assert not is_prompt(Proxy()) and not is_asked_ahead(Proxy())


class Callable:
    def __call__(self):
        """Do nothing."""

    def method(self):
        """Do nothing."""


class TestNames:
    @pytest.mark.parametrize(
        ("func", "name"),
        [
            (join, "join"),
            (Callable, "Callable"),
            (Callable.method, "Callable.method"),
            (Callable().method, "Callable.method"),
            (Callable(), "Callable"),
            (functools.partial(join, 1), "partial"),
            (len, "len"),
            (torch.add, "add"),
            ("method", "method"),
            (RRefProxy, "a method of an RRef's value"),
            (invocation.prompt, ""),
            (quiescence.Quiescence, ""),
            (quiescence.Quiescence.join, ""),
        ],
    )
    def test_messages_name_what_the_user_wrote(self, func, name):
        assert user_function(func) == name

    def test_a_function_inside_another_is_named_with_it(self):
        def inner():
            """Do nothing."""

        assert user_function(inner).endswith("inside_another_is_named_with_it.<locals>.inner")

    def test_one_without_a_module_is_the_users(self):
        func: Any = functools.partial(join)
        func.__module__ = None
        assert user_function(func) == "partial"
