"""Workers that outlive their program: start_workers(detached=True), connect, rayrpc stop."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import ray
from conftest import ROOT, eventually, python_path

import rayrpc as rpc
from rayrpc import cli, errors
from rayrpc._protocol.rendezvous import owned_key
from rayrpc._transports import has_workers
from rayrpc._transports.process_origin import this_origin

WAIT = 60.0
PROGRAM = """
import sys
import rayrpc as rpc

if __name__ == "__main__":
    names, group, strategy = sys.argv[1].split(","), sys.argv[2], sys.argv[3] or None
    rpc.configure(placement_strategy=strategy)
    started = rpc.start_workers(names, group=group, detached=True)
    samplers = rpc.get_group(group)
    samplers.rpc_sync(names[0], exec, args=("import targets; targets.shared['kept'] = 'state'",))
    samplers.shutdown()
"""


@pytest.fixture
def start(ray_cluster, tmp_path, request):
    """Runs a program that starts detached workers in a group, and ends; returns the group."""
    group = f"detached-{os.getpid()}-{request.node.name[-12:].strip('[]')}".replace(" ", "-")

    def start(names, strategy=""):
        script = tmp_path / "start.py"
        script.write_text(PROGRAM)
        subprocess.run(
            [sys.executable, str(script), ",".join(names), group, strategy],
            env={
                **os.environ,
                "RAYRPC_ADDRESS": ray_cluster,
                "PYTHONPATH": python_path(ROOT, ROOT / "tests"),
            },
            check=True,
            timeout=WAIT,
        )
        return group

    yield start
    cli.main(["stop", group])


def test_they_are_found_again_and_stopped(start, capsys):
    group = start(["sampler0", "sampler1"])
    samplers = rpc.connect(group)
    try:
        assert {info.name for info in samplers.workers()} == {"sampler0", "sampler1"}
        state = "__import__('targets').shared.get('kept')"
        kept = samplers.rpc_all("*", eval, args=(state,)).wait()
        assert kept == {"sampler0": "state", "sampler1": None}
        assert cli.main(["stop", group]) == 0
        text = capsys.readouterr().out
        assert f"group {group!r}: ended sampler0, sampler1; still in it: guest-" in text
        assert eventually(lambda: not samplers.workers(), WAIT)
        with pytest.raises(errors.WorkerDiedError, match="sampler0"):
            samplers.rpc_sync("sampler0", max, args=(1, 2))
        assert not has_workers(rpc.settings(), owned_key(group, this_origin()))  # but a guest
    finally:
        samplers.shutdown()
    with pytest.raises(errors.GroupError, match="no group"):
        rpc.connect(group)
    assert cli.main(["stop", group]) == 2
    assert "see `rayrpc status`" in capsys.readouterr().err


def test_what_is_reserved_for_them_is_released_with_them(start):
    def reserved():
        table = ray.util.placement_group_table().values()
        return [each["state"] for each in table if group in each["name"]]

    group = start(["packed0", "packed1"], "PACK")
    assert reserved() == ["CREATED"]
    assert cli.main(["stop", owned_key(group, this_origin())]) == 0  # as `rayrpc status` shows it
    assert eventually(lambda: reserved() in ([], ["REMOVED"]), WAIT)


def test_they_keep_a_local_cluster_until_they_are_stopped(tmp_path):
    environ = {name: text for name, text in os.environ.items() if not name.startswith("RAY")}
    environ |= {"PYTHONPATH": python_path(ROOT, ROOT / "tests")}
    with tempfile.TemporaryDirectory(prefix="rr-") as folder:
        environ["RAY_TMPDIR"] = folder

        def run(*words):
            return subprocess.run(
                [sys.executable, *words],
                env=environ,
                check=True,
                timeout=WAIT,
                capture_output=True,
                text=True,
            ).stdout

        script = tmp_path / "start.py"
        script.write_text(PROGRAM)
        run(str(script), "sampler", "kept", "")
        call = "rpc.connect('kept').rpc_sync('sampler', eval, args=('6 * 7',))"
        assert run("-c", f"import rayrpc as rpc; print({call})") == "42\n"
        assert run("-m", "rayrpc", "stop", "kept") == "group 'kept': ended sampler\n"
        assert eventually(lambda: not list(Path(folder).glob("rayrpc-*/*.sock")), WAIT)


def test_their_group_needs_a_name(ray_cluster):
    with pytest.raises(errors.ConfigError, match="group=NAME"):
        rpc.start_workers(["a"], detached=True)
