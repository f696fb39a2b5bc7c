"""A process that captures its output, and the collector that reads it."""

import os
import socket
import threading

import pytest
from conftest import eventually

from rayrpc.launch.collector import Collector
from rayrpc.launch.display import BEGIN, END, STACKS_SHOWN

CAPTURES = """
import ctypes, os, subprocess, sys, threading, time
from rayrpc.launch.capture import Capture

capture = Capture(sys.argv[1], "w")
{code}
"""


class Delivered:
    """What a collector delivers; it blocks while ``gate`` is not set."""

    def __init__(self):
        self.texts = []
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, batch):
        assert self.gate.wait(60)
        self.texts += batch

    def text(self, fd=1):
        return b"".join(t.data or b"" for t in self.texts if t.fd == fd)

    def notes(self):
        return [t.data for t in self.texts if t.fd == 0]


@pytest.fixture
def delivered():
    return Delivered()


@pytest.fixture
def collector(delivered):
    made = Collector(delivered, by_line=True, count=1)
    yield made
    made.close(10)


@pytest.fixture
def run(start, script, collector):
    return lambda code: start(script(CAPTURES.format(code=code)), collector.address)


@pytest.mark.parametrize(
    ("code", "fd", "text"),
    [
        ("print('printed')", 1, b"printed\n"),
        ("print('error', file=sys.stderr)", 2, b"error\n"),
        ("print('no end', end='')", 1, b"no end"),
        ("sys.stdout.buffer.write(b'bytes')", 1, b"bytes"),
        ("os.write(1, b'by os.write')", 1, b"by os.write"),
        ("subprocess.run(['echo', 'by a child'])", 1, b"by a child\n"),
        ("subprocess.Popen('sleep 0.2; echo late', shell=True)", 1, b"late\n"),
        ("ctypes.CDLL(None).printf(b'by C\\n')", 1, b"by C\n"),
        ("print('\\u00fc\\ud800')", 1, b"\xc3\xbc\\ud800\n"),
        ("for number in range(500): os.write(1, b'x')", 1, b"x" * 500),
        ("for number in range(50000): print(number)", 1, b"49998\n49999\n"),
    ],
)
def test_all_that_a_process_writes_is_delivered_before_close_returns(
    run, delivered, code, fd, text
):
    one = run(code + "\ncapture.close()\nprint('not captured', flush=True)\ninput()")
    assert eventually(lambda: "not captured" in one.output, 60), one.output
    assert delivered.text(fd).endswith(text)
    if "50000" in code:
        assert delivered.text() == b"".join(b"%d\n" % n for n in range(50000))


@pytest.mark.parametrize("death", ["os._exit(3)", "os.kill(os.getpid(), 9)", "ctypes.string_at(0)"])
def test_what_was_written_outlives_its_process(run, delivered, death):
    run(f"sys.stderr.write('error\\n'); os.write(1, b'x' * 50000); {death}").end(120)
    assert eventually(lambda: END in delivered.notes())
    assert delivered.text() == b"x" * 50000
    assert delivered.text(2).startswith(b"error\n")


def test_the_end_is_noted_when_the_children_have_ended_too(run, delivered):
    one = run("subprocess.Popen('sleep 0.3; echo late', shell=True); os._exit(0)")
    assert one.end(120) == 0
    assert eventually(lambda: END in delivered.notes())
    assert delivered.notes() == [BEGIN, END] and delivered.text() == b"late\n"


def test_a_child_that_keeps_the_output_open_does_not_keep_close_waiting(run, delivered):
    one = run("child = subprocess.Popen(['sleep', '60']); capture.close(); child.kill()")
    assert one.end(120) == 0, one.output


def test_sync_waits_until_all_is_shown(run, delivered, tmp_path):
    one = run(
        "terminal = capture._saved[1]\n"
        "print('first', flush=True)\n"
        "capture.sync()\n"
        "os.write(terminal, b'first\\n')\n"
        "while not os.path.exists('gate'): time.sleep(0.01)\n"
        "print('second', end='')\n"
        "capture.sync()\n"
        "os.write(terminal, b'second\\n')\n"
        "capture.close()"
    )
    one.wait_for("first")
    assert delivered.text() == b"first\n"
    delivered.gate.clear()
    (tmp_path / "gate").touch()
    assert not eventually(lambda: "second" in one.output, 1)  # nothing was shown yet
    delivered.gate.set()
    one.wait_for("second")
    assert delivered.text() == b"first\nsecond"
    assert one.end(120) == 0


@pytest.mark.parametrize("sent", [0, 1])
def test_an_interrupt_of_sync_stalls_no_later_one(run, sent):
    one = run(
        "class Interrupted:\n"
        "    def __init__(self, real): self.real = real\n"
        "    def __getattr__(self, name): return getattr(self.real, name)\n"
        "    def sendall(self, data):\n"
        "        capture._socket = self.real\n"
        f"        self.real.sendall(data * {sent})\n"
        "        raise KeyboardInterrupt\n"
        "for _ in range(3):\n"
        "    capture._socket = Interrupted(capture._socket)\n"
        "    try: capture._wait_until_shown()\n"
        "    except KeyboardInterrupt: pass\n"
        "begin = time.monotonic()\n"
        "capture._wait_until_shown()\n"
        "assert time.monotonic() - begin < 9 and not capture._stalled\n"
        "capture.close()"
    )
    assert one.end(120) == 0, one.output


def test_a_full_pipe_makes_the_writer_wait(run, delivered, tmp_path):
    one = run(
        "terminal = capture._saved[1]\n"
        "while not os.path.exists('gate'): time.sleep(0.01)\n"
        "for number in range(64):\n"
        "    os.write(1, b'x' * 65536)\n"
        "    os.write(terminal, b'%d\\n' % number)\n"
        "capture.close()"
    )
    assert eventually(lambda: BEGIN in delivered.notes(), 60), one.output
    delivered.gate.clear()
    (tmp_path / "gate").touch()
    one.wait_for("0\n")
    written = len(one.output.splitlines())
    assert not eventually(lambda: one.process.poll() is not None, 1) and written < 8
    delivered.gate.set()
    assert one.end(120) == 0, one.output
    assert delivered.text() == b"x" * 65536 * 64


def test_a_forked_child_does_not_speak_for_its_parent(run, delivered):
    one = run(
        "if os.fork() == 0:\n    print('child', flush=True); os._exit(0)\n"
        "os.wait(); capture.close()"
    )
    assert one.end(120) == 0, one.output
    assert delivered.text() == b"child\n"


def test_an_unfinished_line_is_asked_for(run, delivered):
    one = run("os.write(1, b'\\r 10%'); time.sleep(60)")
    assert eventually(lambda: any(t.fd == 1 and t.data is None for t in delivered.texts)), (
        one.output
    )


@pytest.mark.parametrize(
    ("hang", "frame"),
    [
        ("def hangs(): threading.Event().wait()", "in hangs"),
        ("def hangs(): import re; re.match('(a+)+$', 'a' * 60 + 'b')", "in hangs"),
    ],
    ids=["python", "holds the GIL"],
)
def test_a_process_writes_where_it_is(run, delivered, collector, hang, frame):
    run(f"{hang}\nprint('hangs', flush=True)\nhangs()")
    assert eventually(lambda: b"hangs\n" in delivered.text(), 60)
    collector.ask_stacks()
    assert eventually(lambda: STACKS_SHOWN in delivered.notes())
    text = delivered.text(2).decode()
    assert "-- Worker w (pid " in text and frame in text and "capture.py" not in text


def test_the_last_worker_that_is_expected_ends_the_accepting(run, collector):
    assert os.path.exists(collector.address)
    one = run("os.write(capture._saved[1], b'begun\\n'); capture.close()")
    one.wait_for("begun")
    assert eventually(lambda: not os.path.exists(os.path.dirname(collector.address)))
    assert one.end(120) == 0


def test_what_is_no_hello_is_refused(collector, delivered, run):
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(collector.address)
        stranger.send(b"no json")
        stranger.settimeout(20)
        assert stranger.recv(1) == b""
    one = run("print('served'); capture.close()")
    assert one.end(120) == 0, one.output
    assert delivered.text() == b"served\n"
