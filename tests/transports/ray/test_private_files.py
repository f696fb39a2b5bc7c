"""The files of local clusters are their user's alone, whatever the umask."""

import os
import stat
import threading
from pathlib import Path

import pytest

from rayrpc._transports.ray import auth_token, local_lease
from rayrpc.config import Settings
from rayrpc.errors import ClusterError


@pytest.fixture
def umask():
    """Set the umask."""
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home and a temporary folder without anything of Ray's."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "tmp"))
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def rights(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("mask", [0, 0o022, 0o277])
def test_the_folder_of_local_clusters_is_the_users_alone(home, umask, mask):
    (home / "tmp").mkdir()
    umask(mask)
    folder = local_lease.own_folder()
    assert rights(folder) == 0o700 and folder.parent == home / "tmp"
    folder.chmod(0o777)
    assert rights(local_lease.own_folder()) == 0o700


def test_a_link_in_the_place_of_the_folder_is_refused(home):
    (home / "tmp").mkdir()
    (home / "tmp" / f"rayrpc-{os.getuid()}").symlink_to(home)
    before = rights(home)
    with pytest.raises(ClusterError, match="set RAY_TMPDIR to a folder of your own"):
        local_lease.own_folder()
    assert rights(home) == before


def test_a_path_that_is_too_long_for_sockets_is_refused_before_ray_starts(home, monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", str(home / ("x" * local_lease.MAX_FOLDER_LENGTH)))
    with pytest.raises(ClusterError, match="set RAY_TMPDIR to a folder with a shorter path"):
        local_lease.join_local(Settings(address="local"), starts=True)
    assert not list(local_lease.own_folder().iterdir())


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_refused(home):
    folder = local_lease.own_folder()
    os.chown(folder, 12345, -1)
    with pytest.raises(ClusterError, match="is no folder of user"):
        local_lease.own_folder()


@pytest.mark.parametrize("mask", [0, 0o022])
def test_the_token_is_readable_by_the_user_alone(home, umask, mask):
    umask(mask)
    auth_token.make_private()
    token = home / ".ray" / "auth_token"
    text = token.read_text()
    assert rights(token) == 0o600 and rights(token.parent) == 0o700 and len(text) == 64
    token.chmod(0o644)  # as Ray makes it
    auth_token.make_private()
    assert rights(token) == 0o600 and token.read_text() == text
    assert [path.name for path in token.parent.iterdir()] == ["auth_token"]


def test_a_token_that_is_named_is_used(home, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(home / "mine"))
    auth_token.make_private()
    assert rights(home / "mine") == 0o600
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(home / "other"))
    auth_token.make_private()
    assert not (home / "other").exists() and not (home / ".ray").exists()


def test_processes_that_make_the_token_at_once_agree_on_it(home):
    path, texts = home / "auth_token", []

    def make():
        auth_token._make_token(path)
        texts.append(path.read_text())

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(texts) == 8 and len(set(texts)) == 1 and len(texts[0]) == 64


def test_without_a_place_for_the_token_the_error_says_what_to_set(home, monkeypatch):
    (home / "file").write_text("")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(home / "file" / "token"))
    with pytest.raises(ClusterError, match="Set RAY_AUTH_TOKEN to a text"):
        auth_token.make_private()


OPEN = """
import os
os.umask(0)
import rayrpc as rpc
rpc.init_rpc("me")
assert rpc.rpc_sync("me", max, args=(1, 2)) == 2
rpc.shutdown()
"""


def test_nothing_of_a_local_cluster_is_outside_of_its_users_folder(start, script, tmp_path):
    # the paths of Ray's sockets must be short
    folder = Path(os.environ["RAY_TMPDIR"]) / "p"
    folder.mkdir(mode=0o755)
    environ = {
        "RAYRPC_GROUP": "private",
        "RAY_TMPDIR": str(folder),
    }
    one = start(script(OPEN), RAY_ADDRESS="", **environ)  # empty: as if it was not set
    assert one.end() == 0, one.output
    (own,) = folder.iterdir()
    assert own.name == f"rayrpc-{os.getuid()}" and rights(own) == 0o700
    assert any(path.name.startswith("session_") for path in (own / "ray").iterdir())
