"""Edited modules reach the workers: ``reload``, ``%autoreload``, ``register_pickle_by_value``."""

import importlib
import math
import sys
from typing import Any, cast

import cloudpickle
import pytest
from conftest import eventually

import rayrpc as rpc
from rayrpc import errors
from rayrpc._runtime import current

FIRST = "def value():\n    return 1\n"
EDITED = "def value():\n    return helper()\n\ndef helper():\n    return 22\n"
FAILS = "def value():\n    raise ValueError('this line is new')\n"


def _targets() -> Any:
    """Return functions that go by value: workers cannot import this module."""
    import sys

    def find_modules_in(folder):
        sys.path.insert(0, folder)

    def forget(folder, name):
        sys.path.remove(folder)
        sys.modules.pop(name, None)

    def has_imported(name):
        return name in sys.modules

    return find_modules_in, forget, has_imported


find_modules_in, forget, has_imported = _targets()


@pytest.fixture
def edited(workers, tmp_path, request):
    """A module that alice finds in the same file, and bob in a copy of his own."""
    name = f"edited_{abs(hash(request.node.nodeid))}"
    copy = tmp_path / "copy"
    copy.mkdir()
    folders = {"driver": tmp_path, "alice": tmp_path, "bob": copy}
    for folder in folders.values():
        (folder / f"{name}.py").write_text(FIRST)
    for worker, folder in folders.items():
        rpc.rpc_sync(worker, find_modules_in, args=(str(folder),))
    yield importlib.import_module(name)
    for worker, folder in folders.items():
        rpc.rpc_sync(worker, forget, args=(str(folder), name))


def edit(module, text):
    with open(module.__file__, "w") as file:
        file.write(text)


class TestReload:
    def test_loads_a_module_again_on_all_workers(self, edited):
        assert [rpc.rpc_sync(name, edited.value) for name in ("alice", "bob")] == [1, 1]
        edit(edited, EDITED)
        assert edited.value() == 1
        rpc.reload(edited)
        assert edited.value() == 22
        assert [rpc.rpc_sync(name, edited.value) for name in ("alice", "bob")] == [22, 22]

    def test_a_worker_without_the_module_imports_it_when_it_needs_it(self, edited):
        edit(edited, EDITED)
        rpc.reload(edited)
        assert not rpc.rpc_sync("alice", has_imported, args=(edited.__name__,))
        assert rpc.rpc_sync("bob", has_imported, args=(edited.__name__,))  # his file is old
        assert [rpc.rpc_sync(name, edited.value) for name in ("alice", "bob")] == [22, 22]

    def test_tracebacks_show_its_new_lines(self, edited):
        rpc.rpc_sync("alice", edited.value)
        edit(edited, FAILS)
        rpc.reload(edited)
        with pytest.raises(ValueError, match=r"raise ValueError\('this line is new'\)"):
            rpc.rpc_sync("alice", edited.value)

    def test_what_cannot_be_loaded_here_is_not_sent(self, edited):
        rpc.rpc_sync("alice", edited.value)
        edit(edited, "def value(:\n")
        with pytest.raises(SyntaxError):
            rpc.reload(edited)
        assert rpc.rpc_sync("alice", edited.value) == 1

    def test_an_error_of_a_worker_is_raised_after_all_have_tried(self, edited):
        for name in ("alice", "bob"):
            rpc.rpc_sync(name, edited.value)
        text = "import sys\nif 'conftest' not in sys.modules:\n    1 / 0\n" + EDITED
        edit(edited, text.replace("1 / 0", "sys.modules['has_tried'] = sys; 1 / 0"))
        with pytest.raises(ZeroDivisionError, match="On WorkerInfo"):
            rpc.reload(edited)
        for name in ("alice", "bob"):
            assert rpc.rpc_sync(name, has_imported, args=("has_tried",))

    @pytest.mark.parametrize("module", [math, sys.modules["__main__"]])
    def test_some_modules_cannot_be(self, workers, module):
        with pytest.raises(errors.ConfigError, match="cannot be loaded again"):
            rpc.reload(module)
        with pytest.raises(TypeError, match="reload takes modules, got 3"):
            rpc.reload(cast(Any, 3))

    def test_it_needs_a_group(self, workers, monkeypatch):
        monkeypatch.setattr(current, "_agent", None)
        with pytest.raises(RuntimeError, match="RPC has not been initialized"):
            rpc.reload(math)


def test_modules_that_are_registered_go_by_value(workers, tmp_path, monkeypatch):
    """Workers need no file, and get what was loaded here last."""
    (tmp_path / "registered.py").write_text(FIRST)
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("registered")
    cloudpickle.register_pickle_by_value(module)
    try:
        assert rpc.rpc_sync("alice", module.value) == 1
        edit(module, EDITED)
        importlib.reload(module)
        assert rpc.rpc_sync("alice", module.value) == 22
        assert not rpc.rpc_sync("alice", has_imported, args=("registered",))
    finally:
        cloudpickle.unregister_pickle_by_value(module)
        del sys.modules["registered"]


NOTEBOOK = """
import os, pathlib, sys
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance()
path = pathlib.Path(os.getcwd(), "steps.py")

def cell(text):
    result = shell.run_cell(text)
    result.raise_error()
    return result.result

def edit(text):
    before = path.stat().st_mtime if path.exists() else 0
    path.write_text(text)
    os.utime(path, (before + 5, before + 5))

edit("def step():\\n    return 1\\n")
cell("import sys; import rayrpc as rpc")
cell("rpc.start_workers(['w'])")
cell(f"add_path = lambda: sys.path.insert(0, {str(path.parent)!r})")
cell("add_path(); rpc.rpc_sync('w', add_path)")
cell("%load_ext autoreload")
cell("%autoreload 2")
cell("import steps")
print("first", cell("rpc.rpc_sync('w', steps.step)"))
edit("def step():\\n    return 2 + 20\\n")
print("second", cell("rpc.rpc_sync('w', steps.step)"))
edit("def step(:\\n")
print("broken", cell("rpc.rpc_sync('w', steps.step)"))
edit("def step():\\n    return 3 + 300\\n")
print("third", cell("rpc.rpc_sync('w', steps.step)"), cell("steps.step()"))
cell("rpc.shutdown()")
print("still", edit("def step():\\n    return 4 + 4000\\n"), cell("steps.step()"), flush=True)
"""


def test_autoreload_reaches_the_workers(start, script, ray_cluster):
    pytest.importorskip("IPython")
    one = start(script(NOTEBOOK))
    assert one.end(100) == 0, one.output
    assert eventually(lambda: "still" in one.output), one.output
    for line in ("first 1", "second 22", "broken 22", "third 303 303", "still None 4004"):
        assert line in one.output, one.output
