"""When the package for TorchScript code is loaded, and that torch is restored."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from conftest import ROOT
from torch.jit import _builtins, _recursive, _script

from rayrpc import compat
from rayrpc._runtime.serialization.reducers import REDUCERS

BEGIN = """
import io, sys
import rayrpc
rayrpc.install()
import torch
import torch.distributed.rpc as rpc
assert rpc.is_available() and torch.distributed.is_available()
assert not [name for name in sys.modules if name.startswith("rayrpc._torchscript")]
"""

PROGRAMS = {
    "annotated": "@torch.jit.script\ndef f(x: int) -> int:\n    return x\n",
    "rpc": "def g():\n    return 1\n@torch.jit.script\ndef f():\n    rpc.rpc_async('a', g)\n",
    "module": "torch.jit.script(torch.nn.Linear(1, 1))\n",
    "method": (
        "class M(torch.jit.ScriptModule):\n"
        "    @torch.jit.script_method\n"
        "    def forward(self, x: int) -> int:\n"
        "        return x\n"
        "M()\n"
    ),
    "interface": "@torch.jit.interface\nclass I:\n    def f(self, x: int) -> int:\n        pass\n",
    "load": "torch.jit.load(sys.argv[1])\n",
}


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    path = tmp_path_factory.mktemp("archive") / "module.pt"
    torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), path)
    return path


@pytest.mark.process
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_that_compiles_or_loads_has_it(program, archive, tmp_path):
    end = "assert 'rayrpc._torchscript.patches' in sys.modules\nprint('loaded')\n"
    path = tmp_path / "program.py"
    path.write_text(BEGIN + PROGRAMS[program] + end)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", path, archive],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
    )
    assert done.stdout == "loaded\n", done.stderr


def state():
    classes: dict[Any, Any] = {
        (kind, name): value
        for kind in (torch._C.ScriptModule, torch.jit.RecursiveScriptModule)
        for name, value in vars(kind).items()
    }
    names: dict[Any, Any] = {
        (module, name): value
        for module in (torch._C, _recursive, _script)
        for name, value in vars(module).items()
    }
    return {**classes, **names}, dict(REDUCERS), dict(_builtins._get_builtin_table())


def test_uninstall_restores_torch():
    compat.install()
    torch.jit.script(torch.nn.Linear(1, 1))
    compat.uninstall()
    before = state()
    compat.install()
    torch.jit.script(torch.nn.ReLU())
    assert state() != before
    compat.uninstall()
    after = state()
    for then, now in zip(before, after, strict=True):
        assert {key: value for key, value in now.items() if then.get(key) is not value} == {}
        assert then.keys() == now.keys()


def test_what_was_compiled_before_calls_rpc_too(request):
    @torch.jit.script
    def one() -> torch.Tensor:
        return torch.ones(1)

    @torch.jit.script
    def call(to: str) -> torch.Tensor:
        return torch.distributed.rpc.rpc_sync(to, one)

    request.getfixturevalue("worker_b")
    assert call("b").item() == 1
