"""The program's folder: what is sent of it, and how it arrives."""

import os
import threading
import time

import pytest

from rayrpc.errors import ClusterError, ConfigError
from rayrpc.launch import folder
from rayrpc.launch.folder import is_within, moved, pack, unpack


@pytest.fixture
def program(tmp_path, monkeypatch):
    """A folder with a program; archives are unpacked into a folder of the test."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    root = tmp_path / "program"
    write(root / "main.py", "import parts.first")
    write(root / "parts/first.py", "x = 1")
    write(root / "data/numbers.txt", "1 2 3")
    monkeypatch.setattr(folder, "_in_use", [])
    yield root
    for descriptor in folder._in_use:
        os.close(descriptor)


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def names(archive):
    there = unpack(archive)
    found = [os.path.join(at, name) for at, _, files in os.walk(there) for name in files]
    return {os.path.relpath(each, there) for each in found}


def test_all_files_arrive_with_their_modes(program):
    script = program / "start.sh"
    write(script, "#!/bin/sh")
    script.chmod(0o755)
    archive = pack(str(program))
    assert names(archive) == {"main.py", "parts/first.py", "data/numbers.txt", "start.sh"}
    there = unpack(archive)
    with open(f"{there}/data/numbers.txt") as file:
        assert file.read() == "1 2 3"
    assert os.access(f"{there}/start.sh", os.X_OK) and not os.access(f"{there}/main.py", os.X_OK)


def test_the_same_content_is_unpacked_once(program):
    first = unpack(pack(str(program)))
    os.utime(program / "main.py", (1, 1))
    assert unpack(pack(str(program))) == first
    write(program / "main.py", "import parts.second")
    assert unpack(pack(str(program))) != first


def test_what_no_rank_needs_is_left_out(program):
    for name in (".git/config", "parts/__pycache__/first.pyc", ".venv/bin/python", "old.pyc"):
        write(program / name, "x")
    write(program / "environment/pyvenv.cfg", "home = /usr")
    write(program / "environment/lib/site.py", "x")
    write(program / "runs/1/model.pt", "x")
    write(program / "parts/notes.md", "x")
    archive = pack(str(program), ["runs", "parts/*.md"])
    assert names(archive) == {"main.py", "parts/first.py", "data/numbers.txt"}


def test_a_large_folder_is_refused_with_what_is_largest(program, monkeypatch):
    monkeypatch.setattr(folder, "MAX_BYTES", 3 << 20)
    write(program / "runs/model.pt", "x" * (4 << 20))
    with pytest.raises(ConfigError, match=r"runs \(4 MB\).*working_dir_excludes.*--working-dir"):
        pack(str(program))
    assert pack(str(program), ["runs"])


def test_a_folder_of_many_files_is_refused(program, monkeypatch):
    monkeypatch.setattr(folder, "MAX_FILES", 2)
    with pytest.raises(ConfigError, match="or 2 files"):
        pack(str(program))


def test_ranks_that_unpack_at_once_share_one_folder(program):
    archive = pack(str(program))
    found = []
    threads = [threading.Thread(target=lambda: found.append(unpack(archive))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 8 and len(set(found)) == 1
    assert len(os.listdir(os.path.dirname(found[0]))) == 1


@pytest.mark.parametrize("is_used", [False, True])
def test_folders_that_were_not_used_for_long_are_deleted(program, is_used):
    old = unpack(pack(str(program)))
    os.utime(old, (0, time.time() - 2 * folder.KEPT_SECONDS))
    if not is_used:
        os.close(folder._in_use.pop())  # as at the end of its process
    write(program / "main.py", "import parts.second")
    new = unpack(pack(str(program)))
    assert os.path.isdir(new) and os.path.exists(old) == is_used


def test_a_folder_of_another_user_is_refused(program, tmp_path):
    os.symlink("/", tmp_path / f"rayrpc-{os.getuid()}")
    with pytest.raises(ClusterError, match="is no folder of user"):
        unpack(pack(str(program)))


def test_paths_move_with_their_folder():
    assert moved("/a/b/c.py", "/a/b", "/new") == "/new/c.py"
    assert moved("/a/b", "/a/b", "/new") == "/new"
    assert moved("/a/bc/d.py", "/a/b", "/new") == "/a/bc/d.py"
    assert is_within("/a/b/c", "/a/b") and not is_within("/a", "/a/b")
