"""What calls print is shown in the cell of a notebook that made them; in a real kernel."""

import json
import os
import subprocess
import sys

import pytest
from conftest import ROOT, python_path

pytest.importorskip("jupyter_client")
pytest.importorskip("ipykernel")

CELLS = {
    "start": """
import os, sys, time
import rayrpc as rpc
workers = rpc.start_workers(["a", "b"])

def count(name):
    for number in range(10):
        print(name, number)
        time.sleep(0.1)

def nested():
    print("outside")
    rpc.rpc_sync("b", print, args=("inside",))
    sys.stderr.write("an error\\n")

async def twice():
    import asyncio
    print("once")
    await asyncio.sleep(0.3)
    print("twice")

def values():
    for number in range(3):
        print("value", number)
        yield number

def bar():
    for number in range(3):
        sys.stderr.write(f"\\r{number} of 3")
        time.sleep(0.2)
    sys.stderr.write("\\n")

def fails(what):
    # explains nothing
    raise KeyError(what)
""",
    "async": "future = rpc.rpc_async('a', count, args=('first',))",
    "later": """
later = [rpc.rpc_async('a', nested), rpc.rpc_async('a', twice)]
kept = rpc.remote('b', nested)
time.sleep(0.2)
rpc.rpc_sync("a", print, args=("meanwhile",))
rpc.rpc_sync("a", os.system, args=("echo from a child",))
""",
    "wait": "future.wait(), [each.wait() for each in later], kept.to_here(); time.sleep(0.3)",
    "stream": "list(rpc.stream('a', values))",
    "bar": "rpc.rpc_sync('b', bar)",
    "sync error": "rpc.rpc_sync('a', fails, args=('at once',))",
    "async error": """
future = rpc.rpc_async('a', fails, args=('asked for',))
rref = rpc.remote('a', fails, args=('asked for',))
for wait in (future.wait, rref.to_here):
    try:
        wait()
    except KeyError:
        print("caught")
""",
    "no answer": """
del future, rref
future = rpc.rpc_async('a', fails, args=('not asked for',))
while not future.done():
    time.sleep(0.01)
del future
""",
    "end": "rpc.shutdown()",
}


@pytest.fixture(scope="module")
def shown(ray_cluster, tmp_path_factory):
    """Return, by cell, what is shown in it: pairs of a kind and a text."""
    folder = tmp_path_factory.mktemp("kernel")
    (folder / "cells.json").write_text(json.dumps(list(CELLS.values())))
    client = str(ROOT / "tests" / "kernel_client.py")
    ended = subprocess.run(
        [sys.executable, client, "cells.json", "outputs.json"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": python_path(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    outputs = json.loads((folder / "outputs.json").read_text())
    return dict(zip(CELLS, outputs, strict=True))


def lines(outputs, kind):
    return "".join(text for each, text in outputs if each == kind).splitlines()


def test_a_call_prints_into_the_cell_that_made_it_also_while_others_run(shown):
    assert lines(shown["async"], "stdout") == [f"(a) first {number}" for number in range(10)]
    assert shown["wait"] == []


def test_so_do_the_calls_that_it_makes_coroutines_and_calls_without_a_future(shown):
    printed = lines(shown["later"], "stdout")
    expected = ["(a) outside", "(b) outside", "(b) inside", "(b) inside", "(a) once", "(a) twice"]
    expected += ["(a) meanwhile", "(a) from a child"]
    assert sorted(printed) == sorted(expected)
    assert sorted(lines(shown["later"], "stderr")) == ["(a) an error", "(b) an error"]


def test_so_do_streams(shown):
    assert lines(shown["stream"], "stdout") == [f"(a) value {number}" for number in range(3)]


def test_a_progress_bar_moves(shown):
    texts = [text for kind, text in shown["bar"] if kind == "stderr"]
    assert "".join(texts).split("\r")[-3:] == ["(b) 0 of 3", "(b) 1 of 3", "(b) 2 of 3\n"], texts
    assert len(texts) > 1  # while it goes on


def test_an_error_is_shown_once_with_the_lines_of_its_cell(shown):
    ((kind, text),) = shown["sync error"]
    assert kind == "error"
    assert "    raise KeyError(what)\nKeyError: 'at once'" in text
    # IPython shows the last frame always
    assert text.count("/rayrpc/") == 1 and "skipping hidden" in text, text
    assert shown["async error"] == [["stdout", "caught\ncaught\n"]]


def test_an_error_that_nobody_asks_for_is_shown(shown):
    text = "".join(text for _, text in shown["no answer"])
    assert text.count("KeyError: 'not asked for'") == 1, text
    assert "The call of fails on RPC worker 'a' failed" in text
