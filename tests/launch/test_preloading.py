"""Which programs may take a process that has loaded torch."""

import os

import pytest

from rayrpc.launch import preloading
from rayrpc.launch.preloading import needed

ENVIRON = {"PATH": "/bin", "OMP_NUM_THREADS": "2", "RANK": "0", "PYTHONPATH": "/a"}


@pytest.fixture
def package(tmp_path, monkeypatch):
    (tmp_path / "launch").mkdir()
    for name in ("__init__.py", "launch/preloading.py"):
        (tmp_path / name).write_text("")
    monkeypatch.setattr(preloading, "__file__", str(tmp_path / "launch" / "preloading.py"))
    return tmp_path


def test_variables_that_torch_reads_when_it_is_loaded_count(package):
    loaded = needed(ENVIRON)
    assert loaded.environ == {"OMP_NUM_THREADS": "2"}
    assert needed({**ENVIRON, "RANK": "1", "PYTHONPATH": "/b"}) == loaded
    for other in ({"OMP_NUM_THREADS": "1"}, {"MKL_NUM_THREADS": "2"}, {"TORCH_LOGS": "all"}):
        assert needed({**ENVIRON, **other}) != loaded


def test_the_code_of_rayrpc_counts(package, monkeypatch):
    loaded = needed(ENVIRON)
    assert needed(ENVIRON) == loaded
    changed = max(path.stat().st_mtime for path in package.rglob("*.py"))
    os.utime(package / "__init__.py", (1e9, changed + 1))
    assert needed(ENVIRON) != loaded
    os.utime(package / "__init__.py", (1e9, changed))
    assert needed(ENVIRON) == loaded
    monkeypatch.undo()
    assert needed(ENVIRON).files["rayrpc"] != loaded.files["rayrpc"]
