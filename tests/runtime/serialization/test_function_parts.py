"""The parts of a function that goes by value: names, closures, and modules that it needs."""

import concurrent.futures
import importlib.util
import sys
import types
from typing import Any

import pytest

from rayrpc._runtime.serialization.function_parts import (
    cells_of,
    make_function,
    names_of,
    parts_of,
    set_parts,
)


def as_function(func: Any) -> types.FunctionType:
    assert type(func) is types.FunctionType
    return func


def define(source, **values):
    """Return the last function that a source defines."""
    exec(source, values)
    return [each for each in values.values() if isinstance(each, types.FunctionType)][-1]


class TestNames:
    def names(self, source):
        return names_of(define(source).__code__)

    def test_they_are_those_that_it_loads_and_binds_in_order(self):
        names = self.names("def f():\n    global b, c\n    b = a\n    del c\n    return len(d)")
        assert names.used == ("a", "b", "c", "len", "d")
        assert names.stored == ("b", "c") and names.builtin == ("len",)
        assert not names.is_dynamic

    def test_functions_inside_of_it_count_however_deep(self):
        names = self.names(
            "def f():\n    def g():\n        global y\n        y = [x for _ in z]\n"
            "        return lambda: w\n    return g"
        )
        assert set(names.used) == {"x", "y", "z", "w"} and names.stored == ("y",)

    def test_what_is_local_does_not(self):
        assert self.names("def f(a):\n    b = a.c\n    import os\n    return b, os").used == ()

    @pytest.mark.parametrize(
        ("call", "is_dynamic"),
        [
            ("eval('x')", True),
            ("exec('x = 1')", True),
            ("globals()", True),
            ("(lambda: globals())()", True),
            ("locals()", False),
            ("evaluate('x')", False),
        ],
    )
    def test_code_may_use_any_by_some_functions(self, call, is_dynamic):
        assert self.names(f"def f():\n    return {call}").is_dynamic is is_dynamic

    def test_equal_questions_have_one_answer(self):
        code = define("def f():\n    return x").__code__
        assert names_of(code) is names_of(code)


class TestClosures:
    def test_cells_are_in_the_order_of_the_code_and_may_be_empty(self):
        def outer():
            first = 1

            def inner():
                return first, later

            yield inner
            later = 2
            yield inner

        made = outer()
        assert cells_of(next(made)) == [(1,), ()]
        assert cells_of(next(made)) == [(1,), (2,)]
        assert cells_of(as_function(outer)) == []


def remade(func, values=None):
    """Return a function that is made of the parts of another one."""
    made = make_function(func.__code__, func.__globals__ if values is None else values)
    set_parts(made, parts_of(func, ()))
    return made


class TestMaking:
    def test_all_parts_arrive(self):
        def func(a, b=2, *, c: int = 3) -> str:
            """Say it."""
            return f"{a} {b} {c}"

        as_function(func).__dict__["calls"] = 7
        made: Any = remade(func)
        assert made is not func and made("x") == "x 2 3"
        for part in ("__name__", "__qualname__", "__module__", "__doc__", "__annotations__"):
            assert getattr(made, part) == getattr(func, part)
        assert made.calls == 7 and made.__kwdefaults__ == {"c": 3}

    def test_one_that_refers_to_itself_can_be_made_first(self):
        def count(n):
            return 0 if n == 0 else 1 + count(n - 1)

        made = make_function(count.__code__, {})
        parts = parts_of(as_function(count), ())
        assert parts[2] == [(count,)]
        set_parts(made, (*parts[:2], [(made,)], parts[3]))
        assert made(5) == 5 and cells_of(made) == [(made,)]

    def test_an_empty_cell_stays_empty(self):
        def outer():
            def inner():
                return later

            yield inner
            later = 1
            yield inner

        made = remade(next(outer()))
        assert cells_of(made) == [()]
        with pytest.raises(NameError):
            made()

    def test_it_uses_the_globals_that_it_is_given(self):
        func = define("def f():\n    return x", x=1)
        assert remade(func, {"x": 5})() == 5 and func() == 1

    def test_a_cell_too_few_is_an_error(self):
        x = 1
        func = as_function(lambda: x)
        parts = parts_of(func, ())
        with pytest.raises(ValueError, match="argument"):
            set_parts(make_function(func.__code__, {}), (*parts[:2], [], parts[3]))


class TestModules:
    def modules(self, source, **values):
        func = define(source, **values)
        return parts_of(func, values.values())[3]

    def test_a_submodule_that_the_code_names_goes_along(self):
        code = "def f():\n    return concurrent.futures.Future()"
        found = self.modules(code, concurrent=concurrent)
        assert concurrent.futures in found and sys.modules["concurrent"] not in found

    def test_one_that_it_does_not_name_does_not(self):
        assert self.modules("def f():\n    return concurrent.other", concurrent=concurrent) == ()

    def test_plain_modules_and_values_have_none(self):
        assert self.modules("def f():\n    return sys.futures", sys=sys) == ()
        assert self.modules("def f():\n    return number.futures", number=1) == ()

    def test_a_package_in_a_closure_counts(self):
        package = concurrent

        def func():
            return package.futures

        assert concurrent.futures in parts_of(as_function(func), ())[3]

    def test_one_that_is_imported_later_is_found_then(self, monkeypatch):
        func = define("def f():\n    return pack.later", pack=(pack := package("pack")))
        monkeypatch.setitem(sys.modules, "pack", pack)
        assert parts_of(func, [pack])[3] == ()
        later = package("pack.later")
        monkeypatch.setitem(sys.modules, "pack.later", later)
        assert parts_of(func, [pack])[3] == (later,)


def package(name):
    spec: Any = importlib.util.spec_from_loader(name, None, is_package=True)
    return importlib.util.module_from_spec(spec)
