"""The lines the code base holds itself to: layers, exports, sizes, signatures, README commands."""

import ast
import graphlib
import importlib
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Imports go down, or sideways without a cycle. A name covers itself and what is under it; the
# longest name wins, so "_runtime" is what no other line names. "" is rayrpc/__init__.py.
LAYERS = [
    ["", "__main__", "cli"],
    ["_jit", "autograd", "compat", "jit", "launch", "nn", "optim", "parallel"],
    ["api"],
    ["_runtime.all_gather", "startup"],
    ["backend_registry", "internal", "rref"],
    ["_runtime.agent", "_runtime.callee", "_runtime.caller"],
    ["_autograd", "_observe", "_runtime", "_transports", "futures"],
    ["_protocol"],
    ["_concurrency", "config", "errors", "functions", "options"],
]

# (module, what it imports, reason): an import, inside a function, that the rules would forbid.
LAZY: list[tuple[str, str, str]] = [
    ("_runtime.rrefs.handle", "_jit.awaitable", "lazy() makes one of its values"),
    ("_runtime.rrefs.handle", "api", "proxies make calls as their user would"),
    ("api", "autograd", "its counters are part of _get_debug_info"),
    ("launch.hosted", "launch.process", "a rank may spawn ranks, which are hosted too"),
]

MAY_IMPORT_RAY = ["_transports.ray.*", "launch", "launch.*", "parallel.queue"]
MAY_NAME_TORCH_C = ["compat"]

MAX_LINES = 450
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


class Import(NamedTuple):
    module: str  # relative to rayrpc
    target: str  # absolute: "rayrpc._runtime.serialization.codec", "ray.util"
    line: int
    lazy: bool  # inside a function

    def __str__(self) -> str:
        return f"{self.module or '__init__'}:{self.line} imports {self.target}"

    @property
    def inner(self) -> str | None:
        """The target relative to rayrpc, None where it is not ours."""
        if self.target.split(".")[0] != "rayrpc":
            return None
        return self.target.partition(".")[2]


def _is_type_checking(test: ast.expr) -> bool:
    return ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def _import_nodes(node: ast.AST, lazy: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    """Yield what imports at any depth, and whether it is in a function."""
    if isinstance(node, ast.If) and _is_type_checking(node.test):
        children: list[ast.AST] = list(node.orelse)
    else:
        children = list(ast.iter_child_nodes(node))
    lazy = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    for child in children:
        if isinstance(child, ast.Import | ast.ImportFrom | ast.Call):
            yield child, lazy
        yield from _import_nodes(child, lazy)


def _targets(module: str, node: ast.AST) -> Iterator[str]:
    """Yield the absolute names of the modules that an import, or import_module("..."), loads."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            package = f"rayrpc.{module}".rstrip(".").split(".")
            if FILES[module].name != "__init__.py":
                package = package[:-1]
            package = package[: len(package) - node.level + 1]
            base = ".".join([*package, *filter(None, [node.module])])
        # `from rayrpc import api` loads the module api; from a module, it is a name in it.
        for alias in node.names:
            full = f"{base}.{alias.name}"
            is_ours = full.startswith("rayrpc.") and full.removeprefix("rayrpc.") in FILES
            yield full if is_ours else base
    elif isinstance(node, ast.Call) and node.args:
        called = ast.unparse(node.func).rpartition(".")[2]
        first = node.args[0]
        if called in ("import_module", "__import__") and isinstance(first, ast.Constant):
            yield str(first.value)


IMPORTS = [
    Import(module, target, node.lineno, lazy)
    for module, tree in TREES.items()
    for node, lazy in _import_nodes(tree)
    for target in dict.fromkeys(_targets(module, node))
]


def _excused(imported: Import) -> bool:
    name = imported.target if imported.inner is None else imported.inner
    return imported.lazy and (imported.module, name) in {(m, i) for m, i, _ in LAZY}


def _is_under(name: str, ancestor: str) -> bool:
    return name == ancestor or (ancestor != "" and name.startswith(ancestor + "."))


def _layer(name: str) -> int | None:
    """Return the layer of a module, 0 being the top, or None where the table has no line for it."""
    found = [(len(a), row) for row, line in enumerate(LAYERS) for a in line if _is_under(name, a)]
    return max(found)[1] if found else None


def _is_any(name: str, patterns: list[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _breaks(imported: Import) -> str | None:
    """Say which rule an import breaks."""
    module, target = imported.module, imported.inner
    if target is None:
        if _is_under(imported.target, "ray") and not _is_any(module, MAY_IMPORT_RAY):
            return "only the Ray transport, launch, parallel.pool and metrics import ray"
        return None
    upper, lower = _layer(module), _layer(target)
    if upper is not None and lower is not None and lower < upper:
        return "imports go down only"
    if _is_under(module, "_runtime") and _is_under(target, "_transports"):
        return "_runtime knows no transport"
    return None


def _assert_none(found: Iterable[str]) -> None:
    lines = "\n".join(found)
    assert not lines, f"\n{lines}"


def test_every_module_has_a_layer():
    _assert_none(name for name in FILES if _layer(name) is None)


def test_imports_keep_to_the_layers():
    found = [(i, _breaks(i)) for i in IMPORTS if not _excused(i)]
    _assert_none(f"{i}: {rule}" for i, rule in found if rule)


def test_modules_do_not_import_one_another_in_a_circle():
    graph: dict[str, set[str]] = {name: set() for name in FILES}
    for i in IMPORTS:
        if i.inner is not None and not _excused(i):
            graph[i.module].add(i.inner)
    graphlib.TopologicalSorter(graph).prepare()


def test_every_lazy_exception_is_still_needed():
    used = {(i.module, i.target if i.inner is None else i.inner) for i in IMPORTS if i.lazy}
    _assert_none(f"{m} imports {i}" for m, i, _ in LAZY if (m, i) not in used)


def _names_torch_c(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        return ast.unparse(node) == "torch._C"
    if isinstance(node, ast.ImportFrom):
        names = [f"{node.module}.{alias.name}" for alias in node.names]
        return any(_is_under(name, "torch._C") for name in names)
    if isinstance(node, ast.Import):
        return any(_is_under(alias.name, "torch._C") for alias in node.names)
    return False


def test_torch_c_is_named_only_in_compat():
    _assert_none(
        f"{name}:{node.lineno}"
        for name, tree in TREES.items()
        if not _is_any(name, MAY_NAME_TORCH_C)
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
