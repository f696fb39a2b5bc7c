"""Every name of the founding documents, with the arguments and defaults that they give it.

``seed_names.txt`` lists them: names under ``rayrpc``, and indented, those under the one before.
"""

import ast
import importlib
import inspect
import re

import pytest
from conftest import ROOT
from torch.distributed import ReduceOp

VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def entries():
    """Yield each name, its arguments as written, and its value as written."""
    owner = ""
    for line in (ROOT / "tests" / "seed_names.txt").read_text().splitlines():
        found = re.fullmatch(r"( *)([\w.]+)(\(.*\))?(?: = (.*))?", line)
        assert found, line
        indent, name, arguments, value = found.groups()
        owner = owner if indent else name
        yield f"{owner}.{name}" if indent else name, arguments, value


def find(name):
    found = importlib.import_module("rayrpc")
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            found = importlib.import_module(f"{found.__name__}.{part}")
    return found


def written(arguments):
    """Return the parameters of ``(a, b=1, *c)`` as a signature has them."""
    scope = {"ReduceOp": ReduceOp}
    exec(f"def documented{arguments}: pass", scope)
    return inspect.signature(scope["documented"]).parameters.values()


@pytest.mark.parametrize(("name", "arguments", "value"), list(entries()))
def test_the_name_is_there_as_documented(name, arguments, value):
    found = find(name)
    if value is not None:
        assert getattr(found, "value", found) == ast.literal_eval(value)
    if arguments is None:
        return
    documented = {each.name: each for each in written(arguments) if each.kind not in VARIADIC}
    everything = dict(inspect.signature(found).parameters)
    everything.pop("self", None)
    ours = {key: each for key, each in everything.items() if each.kind not in VARIADIC}
    assert list(ours)[: len(documented)] == list(documented)
    for key, each in documented.items():
        assert ours[key].kind == each.kind
        if each.default is not each.empty:
            assert ours[key].default == each.default, each
    if len(documented) == len(list(written(arguments))):  # else more may be passed than is named
        more = list(ours.values())[len(documented) :]
        assert all(each.default is not each.empty for each in more)


def test_bases_are_those_of_the_document():
    def pool(name):
        return find(f"parallel.pool.{name}")

    for name, base in {
        "Pool": "BasePool",
        "CtxPool": "Pool",
        "P2PPool": "Pool",
        "ThreadPool": "Pool",
        "CtxThreadPool": "ThreadPool",
        "MapResult": "AsyncResult",
        "IMapUnorderedIterator": "IMapIterator",
    }.items():
        assert issubclass(pool(name), pool(base))
