"""Clusters that require a token, and clusters that require none."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, python_path

TOKEN = "a token that is long enough to be one"
CLUSTER = """
import sys
from nodes import wait_for_nodes
from ray.cluster_utils import Cluster

wait_for_nodes()
cluster = Cluster(True, head_node_args={"num_cpus": 2, "include_dashboard": False})
print("ADDRESS", cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""
PROGRAM = """
import rayrpc as rpc
from rayrpc.errors import ClusterError

try:
    rpc.init_rpc("me")
except ClusterError as exc:
    print(exc)
else:
    print(rpc.rpc_sync("me", max, args=(1, 2)))
    rpc.shutdown()
"""


@pytest.fixture(scope="module")
def token_cluster():
    """The address of a cluster that requires a token."""
    folder = Path(os.environ["RAY_TMPDIR"]) / "t"  # another one's `ray.init()` does not find it
    folder.mkdir()
    environ = {
        **os.environ,
        "HOME": str(folder),
        "RAY_TMPDIR": str(folder),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": TOKEN,
        "PYTHONPATH": python_path(ROOT, ROOT / "tests"),
    }
    with subprocess.Popen(
        [sys.executable, "-c", CLUSTER],
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin and process.stdout
        try:
            yield next(line for line in process.stdout if line.startswith("ADDRESS ")).split()[1]
        finally:
            process.stdin.close()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


@pytest.mark.process
@pytest.mark.parametrize(
    ("token", "mode", "expected"),
    [
        (TOKEN, None, "2"),
        pytest.param(TOKEN, "token", "2", marks=pytest.mark.slow),
        (TOKEN, "disabled", "requires a token, and RAY_AUTH_MODE is 'disabled'. Unset it."),
        ("another token", None, "and refuses that in {path}. Set RAY_AUTH_TOKEN to"),
        pytest.param(
            "another token",
            "token",
            "and refuses that in {path}. Set RAY_AUTH_TOKEN to",
            marks=pytest.mark.slow,
        ),
        (None, None, "and this user has none. Set RAY_AUTH_TOKEN to the cluster's token"),
        (None, "token", "RAY_AUTH_MODE is 'token', and this user has no token. Set"),
    ],
)
def test_a_cluster_is_joined_with_the_users_token(
    token_cluster, start, script, tmp_path, token, mode, expected
):
    one = _run(start, script, tmp_path, token, RAY_ADDRESS=token_cluster, RAY_AUTH_MODE=mode)
    path = tmp_path / ".ray" / "auth_token"
    assert expected.format(path=path) in one.output
    assert one.output.count("\n") == 1


@pytest.mark.slow
def test_a_cluster_without_tokens_is_joined_by_a_user_who_has_one(
    ray_cluster, start, script, tmp_path
):
    one = _run(start, script, tmp_path, TOKEN, RAY_ADDRESS=ray_cluster, RAY_AUTH_MODE=None)
    assert one.output == "2\n"


@pytest.mark.process
@pytest.mark.parametrize("stderr", ["open", "closed"])
def test_rays_warning_alone_is_left_out_of_stderr(stderr):
    code = (
        "import os, sys\n"
        "from rayrpc._transports.ray.auth_token import _without_warning\n"
        "if sys.argv[1] == 'closed': os.close(2)\n"
        "with _without_warning():\n"
        "    for text in (b'before', b'gcs_client.cc:210: refused', b'after'):\n"
        "        if sys.argv[1] == 'open': os.write(2, text + b'\\n')\n"
        "print('done')\n"
    )
    command = [sys.executable, "-c", code, stderr]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == "done\n"
    assert done.stderr == ("before\nafter\n" if stderr == "open" else "")


def _run(start, script, home, token, **environ):
    if token is not None:
        (home / ".ray").mkdir()
        (home / ".ray" / "auth_token").write_text(token)
    environ |= {"HOME": str(home), "RAYRPC_GROUP": "token", "PYTHONPATH": python_path(ROOT)}
    one = start(script(PROGRAM), **environ)
    assert one.end() == 0, one.output
    return one
