"""Which programs may take a process that has loaded torch."""

import os

import pytest

from rayrpc.launch import preloading
from rayrpc.launch.preloading import Loaded

ENVIRON = {"PATH": "/bin", "OMP_NUM_THREADS": "2", "RANK": "0", "PYTHONPATH": "/a"}


@pytest.fixture
def package(tmp_path, monkeypatch):
    (tmp_path / "launch").mkdir()
    for name in ("__init__.py", "launch/preloading.py"):
        (tmp_path / name).write_text("")
    monkeypatch.setattr(preloading, "__file__", str(tmp_path / "launch" / "preloading.py"))
    return tmp_path


def test_variables_that_torch_reads_when_it_is_loaded_count(package):
    loaded = Loaded.now(ENVIRON)
    assert loaded.environ == {"OMP_NUM_THREADS": "2"}
    assert Loaded.now({**ENVIRON, "RANK": "1", "PYTHONPATH": "/b"}) == loaded
    for other in ({"OMP_NUM_THREADS": "1"}, {"MKL_NUM_THREADS": "2"}, {"TORCH_LOGS": "all"}):
        assert Loaded.now({**ENVIRON, **other}) != loaded


def test_the_code_of_rayrpc_counts(package, monkeypatch):
    loaded = Loaded.now(ENVIRON)
    assert Loaded.now(ENVIRON) == loaded
    os.utime(package / "__init__.py", (1e9, loaded.changed + 1))
    assert Loaded.now(ENVIRON) != loaded
    os.utime(package / "__init__.py", (1e9, loaded.changed))
    assert Loaded.now(ENVIRON) == loaded
    monkeypatch.undo()
    assert Loaded.now(ENVIRON).package != loaded.package
