"""What ranks and workers print, on a cluster."""

import sys

import pytest
from conftest import ROOT, python_path
from launching import runner


@pytest.fixture
def run(start, script):
    return runner(start, script)


PRINTS = """
import sys
import rayrpc as rpc

def say(count):
    for number in range(count):
        print("line", number)

if __name__ == "__main__":
    rpc.start_workers(["w"])
    for number in range(50):
        rpc.rpc_sync("w", say, args=(1000,))
    {end}
"""


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("end", ["rpc.shutdown()", "pass"])
def test_a_program_ends_when_all_that_its_workers_printed_is_shown(run, end):
    one = run(PRINTS.format(end=end))
    assert one.end() == 0, one.output[-2000:]
    lines = [line for line in one.output.splitlines() if line.startswith("(w) line")]
    assert lines == [f"(w) line {number}" for _ in range(50) for number in range(1000)]


DIES = """
import ctypes, os, sys
import torch.multiprocessing as mp

def main(rank, how):
    for number in range(2000):
        print("line", number, flush=True)
    if how == "exit":
        os._exit(3)
    ctypes.string_at(0)

if __name__ == "__main__":
    mp.spawn(main, args=(sys.argv[1],), nprocs=1)
"""


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(("how", "text"), [("exit", "line 1999"), ("fault", "in main")])
def test_a_rank_that_dies_has_said_all_that_it_printed(run, how, text):
    one = run(DIES, how)
    assert one.end() == 1
    assert one.output.count("line ") >= 2000 and text in one.output
    assert one.output.index("line 1999") < one.output.index("ProcessExitedException")


# -- calls ----------------------------------------------------------------------------------------


def say(text):
    print(text, end="")


def write(text):
    import os

    os.write(2, text.encode())


def fail(text):
    print(text)
    raise ValueError(text)


async def say_later(text):
    print(text)


def pass_on(to, text):
    import rayrpc as rpc

    rpc.rpc_sync(to, say, args=(text,))


@pytest.fixture(scope="module")
def workers(ray_cluster):
    import rayrpc as rpc

    rpc.start_workers(["ann", "ben"], me="me")
    yield rpc
    rpc.shutdown()


@pytest.mark.parametrize(
    "call",
    [
        lambda rpc, text: rpc.rpc_sync("ann", say, args=(text,)),
        lambda rpc, text: rpc.rpc_sync("ann", write, args=(text,)),
        lambda rpc, text: rpc.rpc_async("ann", say, args=(text,)).wait(),
        lambda rpc, text: rpc.remote("ann", say, args=(text,)).to_here(),
        lambda rpc, text: rpc.rpc_sync("ann", say_later, args=(text,)),
        lambda rpc, text: rpc.rpc_sync("ann", pass_on, args=("ben", text)),
    ],
    ids=["sync", "os.write", "async", "remote", "coroutine", "nested"],
)
def test_what_was_printed_before_a_reply_is_shown_when_the_call_returns(workers, capsys, call):
    for number in range(20):
        call(workers, f"<{number}>")
        assert f"<{number}>" in "".join(capsys.readouterr())


def test_what_was_printed_before_an_error_is_shown_when_it_is_raised(workers, capsys):
    with pytest.raises(ValueError, match="bad weather"):
        workers.rpc_sync("ann", fail, args=("bad weather",))
    assert "(ann) bad weather\n" in capsys.readouterr().out


NOTEBOOK = """
import rayrpc as rpc
rpc.start_workers(["w"])
def say(number):
    print("line", number)
---
rpc.rpc_sync("w", say, args=(1,))
---
rpc.rpc_sync("w", say, args=(2,))
---
rpc.shutdown()
"""


@pytest.mark.filterwarnings("default")  # the kernel's and the client's own
@pytest.mark.process
def test_a_notebook_shows_what_a_call_printed_in_its_cell(ray_cluster, monkeypatch, tmp_path):
    import asyncio

    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    monkeypatch.setenv("PYTHONPATH", python_path(ROOT))
    cells = [nbformat.v4.new_code_cell(text.strip()) for text in NOTEBOOK.split("---")]
    notebook = nbformat.v4.new_notebook(cells=cells)
    client = nbclient.NotebookClient(
        notebook, timeout=60, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    )
    asyncio.run(client.async_execute())
    texts = ["".join(o.get("text", "") for o in cell.outputs) for cell in notebook.cells]
    assert texts[1:3] == ["(w) line 1\n", "(w) line 2\n"]


SAYS = """
import sys
import torch.multiprocessing as mp

def main(rank, text):
    print(text, rank, flush=True)
    sys.stderr.write(f"error {rank}")

if __name__ == "__main__":
    mp.spawn(main, args=("out",), nprocs=2)
    mp.spawn(main, args=("again",), nprocs=1)
"""


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("shows", [True, False])
def test_a_file_a_rank_keeps_what_it_prints(run, tmp_path, shows):
    logs = tmp_path / "logs"
    one = run(SAYS, options=("--log-dir", str(logs), "--set", f"log_to_terminal={shows}"))
    assert one.end() == 0, one.output[-2000:]
    texts = {path.name: path.read_text() for path in logs.iterdir()}
    assert sorted(texts) == ["rank0.log", "rank1.log"]
    for text in ("out 0\n", "error 0", "again 0\n"):
        assert text in texts["rank0.log"]
    assert "out 1\n" in texts["rank1.log"] and "error 1" in texts["rank1.log"]
    assert ("out 1" in one.output) == shows and "(rank" not in one.output


ON_A_TERMINAL = "import pty, os, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"


@pytest.mark.usefixtures("ray_cluster")
def test_on_a_terminal_each_line_names_its_rank(start, script):
    command = sys.executable, "-m", "rayrpc", "run", script(SAYS)
    one = start("-c", ON_A_TERMINAL, *command, NO_COLOR=None)
    assert one.end() == 0, one.output[-2000:]
    for number, colour in ((0, 36), (1, 33)):
        name = f"\x1b[{colour}m(rank{number})\x1b[0m "
        assert f"{name}out {number}" in one.output and f"{name}error {number}" in one.output
