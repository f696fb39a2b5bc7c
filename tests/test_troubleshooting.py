"""docs/troubleshooting.md has every message of rayrpc's errors, and none that the code lacks."""

import ast
import functools
import itertools
import re
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from rayrpc import errors

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "troubleshooting.md"
MODULES = sorted((ROOT / "rayrpc").rglob("*.py"))

HOLE = "…"  # what a message has in the place of a value
MIN_LENGTH = 10  # of the words by which a message is found

# Calls whose argument is the text of an error: the errors', and of what keeps it for one.
RAISED_BY = {*errors.__all__, "NoRRefs"}
# Modules whose functions return why a join is refused, as a text that others raise.
REFUSALS = [ROOT / "rayrpc" / "_protocol" / name for name in ("group.py", "membership.py")]
# Modules whose errors are torch's own types, as in torch.
AS_IN_TORCH = [
    ROOT / "rayrpc" / name
    for name in ("_protocol/rendezvous.py", "options.py", "_autograd/functions.py")
]
TORCHS = {"RuntimeError", "ValueError", "_error"}

# An entry of the page: an item of a list that is nothing but code.
ENTRY = re.compile(r"^- `([^`]+)`$", re.MULTILINE)

# Messages that are not on the page, as no user sees them, and why.
EXCUSED = {
    "its result has ObjectRefs, which only Ray can send": "of a server without Ray, in tests",
    "has not been opened": "of streams; only the worker that has opened one asks for its values",
    "this RPC agent was made without distributed autograd": "of agents that tests make",
    "this worker is in no Ray cluster, and has no object store": "of workers in tests",
    "for workers that did not come:": "of the directory in memory, in tests",
}


class Message(NamedTuple):
    """A text of the code, with ``HOLE`` for each value, and where it is."""

    where: str
    text: str


@functools.lru_cache(None)
def tree_of(module: Path) -> ast.Module:
    return ast.parse(module.read_text())


def plain(text: str) -> str:
    """Return a text as it is compared: without markup, each space one blank."""
    return " ".join(re.sub(r"[`*]", "", text).split())


def words_of(text: str) -> str:
    """Return the longest part of a message that is the same for all values."""
    return max((plain(part) for part in text.split(HOLE)), key=len)


def texts_of(node: ast.expr, known: Mapping[str, ast.expr]) -> list[str]:
    """Return what an expression may be, with ``HOLE`` for each value; none if it is no text."""
    match node:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.JoinedStr(values=parts):
            return joined(parts, known)
        case ast.FormattedValue(value=ast.Name() | ast.Attribute()):
            return texts_of(node.value, known)
        case ast.BinOp(op=ast.Add()):
            return joined([node.left, node.right], known)
        case ast.IfExp():
            return [text for branch in (node.body, node.orelse) for text in joined([branch], known)]
        case ast.Name(id=name) if name in known:
            return texts_of(known[name], {})
        case ast.Attribute(attr=name) if name.isupper() and name in known:
            return texts_of(known[name], {})
    return []


def joined(parts: Iterable[ast.expr], known: Mapping[str, ast.expr]) -> list[str]:
    """Return what expressions may be one after the other, ``HOLE`` for those that are no text."""
    choices = [texts_of(part, known) or [HOLE] for part in parts]
    return ["".join(choice) for choice in itertools.product(*choices)]


def assigned_by(nodes: Iterable[ast.AST]) -> dict[str, ast.expr]:
    """Return the names that are assigned once, and to what."""
    found: dict[str, list[ast.expr]] = {}
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found.setdefault(node.targets[0].id, []).append(node.value)
    return {name: values[0] for name, values in found.items() if len(values) == 1}


@functools.lru_cache(None)
def constants() -> dict[str, ast.expr]:
    """Return the constants of all modules."""
    found = [assigned_by(tree_of(module).body).items() for module in MODULES]
    return {name: value for items in found for name, value in items if name.isupper()}


def functions_of(module: ast.Module) -> Iterator[ast.AST]:
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def name_of(function: ast.expr) -> str:
    """Return the name of what is called; of ``a.b`` it is ``b``."""
    return function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")


def aliases_in(module: ast.Module) -> set[str]:
    """Return what a module calls the errors."""
    imported = [node for node in ast.walk(module) if isinstance(node, ast.ImportFrom)]
    names = [alias for node in imported for alias in node.names]
    return RAISED_BY | {alias.asname for alias in names if alias.asname and alias.name in RAISED_BY}


def arguments_in(nodes: Iterable[ast.AST], makers: set[str], module: Path) -> Iterator[ast.expr]:
    """Yield the expressions that are messages of errors."""
    for node in nodes:
        if isinstance(node, ast.Call) and node.args and name_of(node.func) in makers:
            yield node.args[0]
        elif isinstance(node, ast.JoinedStr) and module in REFUSALS:
            yield node


def messages_of(module: Path) -> Iterator[Message]:
    """Yield the messages of the errors that a module makes."""
    tree = tree_of(module)
    makers = aliases_in(tree) | ({"__init__"} if module.name == "errors.py" else set())
    makers |= TORCHS if module in AS_IN_TORCH else set()
    if not any(arguments_in(ast.walk(tree), makers, module)):
        return
    for scope in (tree, *functions_of(tree)):
        nodes = list(ast.walk(scope))
        known = ChainMap({} if scope is tree else assigned_by(nodes), constants())
        for argument in arguments_in(nodes, makers, module):
            where = f"{module.relative_to(ROOT)}:{argument.lineno}"
            yield from (Message(where, text) for text in texts_of(argument, known))


@functools.lru_cache(None)
def messages() -> list[Message]:
    """Return the messages of all errors that have words of their own."""
    found = [each for module in MODULES for each in messages_of(module)]
    return [each for each in dict.fromkeys(found) if len(words_of(each.text)) >= MIN_LENGTH]


@functools.lru_cache(None)
def texts_of_the_code() -> str:
    """Return all texts in the code, with ``HOLE`` for the values of those that are logged."""
    nodes = [node for module in MODULES for node in ast.walk(tree_of(module))]
    texts = [node.value for node in nodes if isinstance(node, ast.Constant)]
    parts = [text for text in texts if isinstance(text, str)]
    parts += [part for message in messages() for part in message.text.split(HOLE)]
    return "\n".join(plain(re.sub(r"%[.\d]*[dfrs]", HOLE, part)) for part in parts)


def entries() -> list[str]:
    """Return the messages on the page."""
    return [plain(text) for text in ENTRY.findall(PAGE.read_text())]


def assert_none(found: Iterable[str]) -> None:
    lines = "\n".join(found)
    assert not lines, f"\n{lines}"


def test_the_messages_of_the_errors_are_found_in_the_code():
    found = {plain(each.text) for each in messages()}
    assert any(text.startswith("RPC is already initialized. Call") for text in found)
    assert "RPC has not been initialized. Call torch.distributed.rpc.init_rpc first." in found
    assert any("is gone:" in text for text in found)  # of a class that makes its own text
    assert any("requires a token, and this user has none" in text for text in found)  # of a local
    assert any("it has an RRef, which only calls can send" in text for text in found)
    assert any("is not unique. Workers" in text for text in found)


def test_every_message_of_an_error_is_on_the_page():
    page = "\n".join(entries())
    known = [page, *EXCUSED]
    assert_none(
        f"{each.where}: {plain(each.text)}"
        for each in messages()
        if not any(words_of(each.text) in text for text in known)
    )


def test_every_message_on_the_page_is_in_the_code():
    code = texts_of_the_code()
    assert_none(
        text for text in entries() if len(words_of(text)) < MIN_LENGTH or words_of(text) not in code
    )


def test_no_message_is_on_the_page_twice():
    found = entries()
    assert_none(text for text in dict.fromkeys(found) if found.count(text) > 1)


def test_every_excused_message_is_still_in_the_code():
    texts = [words_of(each.text) for each in messages()]
    assert_none(text for text in EXCUSED if text not in texts)
