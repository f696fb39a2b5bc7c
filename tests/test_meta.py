"""Rules of the code base: import contracts, exports, sizes, signatures, side effects."""

import ast
import importlib
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TypeGuard

import pytest

ROOT = Path(__file__).resolve().parents[1]

MAY_NAME_TORCH_C = [
    *["_autograd.engine", "_observe.kineto", "_runtime.operators", "_torchscript", "compat"]
]
MAX_LINES = 400
SAME_SIGNATURE = ["get_worker_info", "init_rpc", "remote", "rpc_async", "rpc_sync", "shutdown"]


def _source_files() -> dict[str, Path]:
    """Map each module's name, without "rayrpc.", to its file."""
    files = {}
    for path in sorted((ROOT / "rayrpc").rglob("*.py")):
        parts = path.relative_to(ROOT / "rayrpc").with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


FILES = _source_files()
TREES = {name: ast.parse(path.read_text()) for name, path in FILES.items()}


def _is_under(name: str, ancestor: str) -> bool:
    return name == ancestor or name.startswith(ancestor + ".")


def _assert_none(found: Iterable[str]) -> None:
    lines = "\n".join(found)
    assert not lines, f"\n{lines}"


def _is_lock(context: ast.expr) -> bool:
    return re.search(r"(lock|changed|_forking)$", ast.unparse(context)) is not None


def _ends_in_a_call(value: ast.expr | None) -> bool:
    if isinstance(value, ast.IfExp):
        return _ends_in_a_call(value.body) or _ends_in_a_call(value.orelse)
    if isinstance(value, ast.BoolOp):
        return any(map(_ends_in_a_call, value.values))
    return isinstance(value, ast.Call)


def test_no_call_is_returned_under_a_lock():
    """Python 3.11 runs handlers of signals after it, where an exception releases no lock."""
    _assert_none(
        f"{name}, line {inner.lineno}: {ast.unparse(inner)}"
        for name, tree in TREES.items()
        for outer in ast.walk(tree)
        if isinstance(outer, ast.With) and any(_is_lock(item.context_expr) for item in outer.items)
        for inner in ast.walk(outer)
        if isinstance(inner, ast.Return) and _ends_in_a_call(inner.value)
    )


def test_complete_alone_gives_futures_their_errors():
    """Else they keep the variables of the frames that the errors passed: ``without_frames``."""
    _assert_none(
        f"{name}:{node.lineno}"
        for name, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr == "set_exception"
    )


def test_imports_keep_to_the_contracts():
    """The layers, no circles, and who may import Ray and torch: [tool.importlinter]."""
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr


def _names_torch_c(node: ast.AST) -> TypeGuard[ast.expr | ast.stmt]:
    if isinstance(node, ast.Attribute):
        return ast.unparse(node) == "torch._C"
    if isinstance(node, ast.ImportFrom):
        names = [f"{node.module}.{alias.name}" for alias in node.names]
        return any(_is_under(name, "torch._C") for name in names)
    if isinstance(node, ast.Import):
        return any(_is_under(alias.name, "torch._C") for alias in node.names)
    return False


def test_torch_c_is_named_only_where_it_has_to_be():
    _assert_none(
        f"{name}:{node.lineno}"
        for name, tree in TREES.items()
        if not any(_is_under(name, allowed) for allowed in MAY_NAME_TORCH_C)
        for node in ast.walk(tree)
        if _names_torch_c(node)
    )


def _has_all(name: str) -> bool:
    return any(
        isinstance(node, ast.Name) and node.id == "__all__" and isinstance(node.ctx, ast.Store)
        for node in ast.walk(TREES[name])
    )


@pytest.mark.parametrize("name", [n for n in FILES if _has_all(n)], ids=lambda n: n or "__init__")
def test_all_is_sorted_and_every_name_in_it_exists(name):
    module = importlib.import_module(f"rayrpc.{name}".rstrip("."))
    assert list(module.__all__) == sorted(set(module.__all__))
    _assert_none(n for n in module.__all__ if not hasattr(module, n))


# Earlier names of parts, and figures of speech, for which the table in ARCHITECTURE.md has words.
OLD_WORDS = "lane|door|keeper|crew|herald|gossip|news|heard"
IN_CODE = re.compile(rf"(?<![A-Za-z])(?<!in )(turn|{OLD_WORDS})s?(?![a-z])", re.I)
ELSEWHERE = re.compile(rf"(?<![A-Za-z])({OLD_WORDS})s?(?![a-z])", re.I)


@pytest.mark.parametrize("folder", ["rayrpc", "tests", "docs", "examples", "."])
def test_no_old_word_is_used(folder):
    top = ROOT / folder
    texts = [*top.glob("*.md")] if folder == "." else [*top.rglob("*.py"), *top.rglob("*.md")]
    words = IN_CODE if folder == "rayrpc" else ELSEWHERE
    assert texts
    _assert_none(
        f"{path.relative_to(ROOT)}, line {number}: {line.strip()}"
        for path in texts
        if path != Path(__file__)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if words.search(line)
    )


def test_no_module_is_too_long():
    lengths = {name: len(path.read_text().splitlines()) for name, path in FILES.items()}
    _assert_none(f"{name}: {n} lines" for name, n in lengths.items() if n > MAX_LINES)


def _python(code: str, *args: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *args], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_rayrpc_loads_neither_torch_nor_ray():
    code = "import sys, rayrpc; print(*({'torch', 'ray'} & set(sys.modules)))"
    assert _python(code).split() == []


def test_importing_the_modules_has_no_side_effect():
    code = """
import atexit, logging, os, pkgutil, signal, sys, threading
import ray, torch
import torch.distributed.optim, torch.distributed.nn  # they import more when they are first used
import rayrpc

calls = []
def record(module, name):
    original = getattr(module, name)
    def wrapper(*args, **kwargs):
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.startswith("rayrpc"):
            calls.append(f"{caller} calls {module.__name__}.{name}")
        return original(*args, **kwargs)
    setattr(module, name, wrapper)

for module, name in [(os, "register_at_fork"), (atexit, "register"), (signal, "signal")]:
    record(module, name)

def state():
    future = torch.futures.Future.__mro__[1]
    names = vars(torch.distributed.rpc)
    return {
        "await": hasattr(future, "__await__"),
        "environ": dict(os.environ),
        "handlers": list(logging.getLogger().handlers),
        "rpc": {name: id(value) for name, value in names.items()},
        "spawn": id(torch.multiprocessing.spawn),
        "threads": threading.active_count(),
    }

before = state()
for module in pkgutil.walk_packages(rayrpc.__path__, "rayrpc."):
    if module.name not in ("rayrpc.__main__",):
        __import__(module.name)
after = state()
print(*calls, *(key for key in before if before[key] != after[key]), sep=";")
"""
    assert _python(code).strip() == ""


def test_signatures_are_those_of_torch():
    # In a process of its own: here install() may have put ours in torch's place.
    code = """
import importlib, inspect, json, sys

def read(module):
    module = importlib.import_module(module)
    return {
        name: [
            [p.name, p.kind.name, "required" if p.default is p.empty else repr(p.default)]
            for p in inspect.signature(getattr(module, name)).parameters.values()
        ]
        for name in sys.argv[1:]
        if hasattr(module, name)
    }

print(json.dumps([read("torch.distributed.rpc"), read("rayrpc")]))
"""
    torchs, ours = json.loads(_python(code, *SAME_SIGNATURE).splitlines()[-1])
    if not torchs:
        pytest.skip("this torch was built without RPC")
    assert ours == torchs


def _make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][\w-]*):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE))


def _readme_make_lines() -> list[str]:
    blocks = re.findall(r"^```bash\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    return [line for block in blocks for line in block.splitlines() if line.startswith("make ")]


def test_the_readme_names_existing_make_targets():
    targets = _make_targets()
    for line in _readme_make_lines():
        words = shlex.split(line.split("&&")[0], comments=True)[1:]
        named = {word for word in words if "=" not in word and not word.startswith("-")}
        assert named, f"no target in {line!r}"
        assert named <= targets, line
