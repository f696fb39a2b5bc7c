"""Public functions say what they take, return and raise."""

import ast
import builtins
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest

# The modules whose ``__all__`` users import from; ``rayrpc`` itself has the names of the others.
MODULES = [
    *("rayrpc", "rayrpc.api", "rayrpc.autograd", "rayrpc.backend_registry", "rayrpc.compat"),
    *("rayrpc.config", "rayrpc.errors", "rayrpc.functions", "rayrpc.futures", "rayrpc.internal"),
    *("rayrpc.jit", "rayrpc.nn", "rayrpc.objects", "rayrpc.optim", "rayrpc.options"),
    "rayrpc.rref_proxy",
    *("rayrpc.parallel.assigner", "rayrpc.parallel.distributed", "rayrpc.parallel.pickle"),
    *("rayrpc.parallel.pool", "rayrpc.parallel.queue", "rayrpc.parallel.server"),
]

# Torch's modules whose functions they have; else it is torch.distributed.rpc.
TORCHS = {
    "rayrpc.api": "torch.distributed.rpc.api",
    "rayrpc.autograd": "torch.distributed.autograd",
    "rayrpc.backend_registry": "torch.distributed.rpc.backend_registry",
    "rayrpc.functions": "torch.distributed.rpc.functions",
    "rayrpc.futures": "torch.futures",
    "rayrpc.internal": "torch.distributed.rpc.internal",
    "rayrpc.jit": "torch.jit",
    "rayrpc.nn": "torch.distributed.nn",
    "rayrpc.optim": "torch.distributed.optim",
    "rayrpc.options": "torch.distributed.rpc.options",
}

SECTION = re.compile(r"^(Args|Returns|Yields|Raises|Source|Example):", re.MULTILINE)
NO_RESULT = ("None", "NoReturn")
# Classes of private modules that users have instances of; others there are no public face.
INSTANCES = ("Await", "LazyRemote", "PyRRef", "RRef", "WorkerInfo")
# A first line with one of these verbs says what is returned.
SAYS_RESULT = re.compile(r"^(Return|Tell whether|Yield|Mark|Iterate|Compile)\b")


def public_functions(module: str) -> Iterator[tuple[str, Any, str]]:
    """Yield the public functions of a module, and the methods of its public classes."""
    loaded = importlib.import_module(module)
    for name in loaded.__all__:
        found = getattr(loaded, name)
        if not str(getattr(found, "__module__", "")).startswith("rayrpc"):
            continue
        if inspect.isfunction(found):
            yield name, found, docs_of(found)
        elif inspect.isclass(found) and (name in INSTANCES or "._" not in found.__module__):
            yield from methods(name, found)


def docs_of(function: Any, cls: type | None = None) -> str:
    """Return a function's docstring; a method's with those of the methods that it overrides."""
    name = getattr(function, "__name__", "")
    defined = [vars(each).get(name) for each in cls.__mro__] if cls else [function]
    return "\n".join(inspect.getdoc(each) or "" for each in defined if each is not None)


def methods(name: str, cls: type) -> Iterator[tuple[str, Any, str]]:
    for attribute in dir(cls):
        method = inspect.getattr_static(cls, attribute)
        method = getattr(method, "__func__", method)
        ours = str(getattr(method, "__module__", "")).startswith("rayrpc")
        if not attribute.startswith("_") and inspect.isfunction(method) and ours:
            yield f"{name}.{attribute}", method, docs_of(method, cls)


def section(text: str, name: str) -> str:
    """Return a section of a docstring, empty if it has none."""
    begin = re.search(rf"^{name}:", text, re.MULTILINE)
    if begin is None:
        return ""
    following = SECTION.search(text, begin.end())
    return text[begin.start() : following.start() if following else len(text)]


def complaints(name: str, function: Any, text: str) -> Iterator[str]:
    if not text:
        yield f"{name}: has no docstring"
        return
    args = section(text, "Args") or text.splitlines()[0]
    signature = inspect.signature(function)
    for parameter in signature.parameters.values():
        if parameter.name in ("self", "cls") or parameter.name.startswith("_"):
            continue
        is_rest = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if not is_rest and not re.search(rf"\b{re.escape(parameter.name)}\b", args):
            yield f"{name}: says nothing of {parameter.name}"
    says_result = section(text, "Returns") or SAYS_RESULT.match(text)
    if signature.return_annotation not in (*NO_RESULT, None) and not says_result:
        yield f"{name}: does not say what it returns"


def raised_by(function: Any) -> Iterator[type]:
    """Yield the classes of the errors that a function raises itself."""
    function = inspect.unwrap(function)
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            name = ast.unparse(node.exc.func)
            cls = function.__globals__.get(name, getattr(builtins, name, None))
            if isinstance(cls, type):  # else a function that makes the error
                yield cls


@pytest.mark.parametrize("module", MODULES)
def test_public_functions_say_what_they_raise(module):
    found = [
        f"{name}: does not say that it raises {cls.__name__}"
        for name, function, text in public_functions(module)
        if not text.startswith("Refuse")
        for cls in raised_by(function)
        if not says(section(text, "Raises"), cls)
    ]
    assert not found, "\n" + "\n".join(dict.fromkeys(found))


def says(text: str, cls: type) -> bool:
    """Tell whether a text has the name of an error's class, or of a base of it."""
    names = [each.__name__ for each in cls.__mro__ if each not in (BaseException, object)]
    return re.search(rf"\b({'|'.join(names)})\b", text) is not None


@pytest.mark.parametrize("module", [each for each in MODULES if ".parallel" not in each])
def test_functions_name_their_source(module):
    """Those of torch name the original, and the others at the top level that they have none."""
    torchs = vars(pytest.importorskip(TORCHS.get(module, "torch.distributed.rpc")))
    found = [
        f"{name}: names no source"
        for name, _, text in public_functions(module)
        if (name in torchs or (module == "rayrpc" and "." not in name))
        and not section(text, "Source")
    ]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize("module", MODULES)
def test_public_functions_say_what_they_take_and_return(module):
    found = [each for named in public_functions(module) for each in complaints(*named)]
    assert not found, "\n" + "\n".join(dict.fromkeys(found))
