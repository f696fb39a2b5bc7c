"""What ranks print: captured there, written here."""

from types import SimpleNamespace

import pytest

from rayrpc.launch.output import follow

# -- capturing ------------------------------------------------------------------------------------

CAPTURES = """
import os, subprocess, sys
from rayrpc.launch.output import Capture

terminal = os.dup(1)
capture = Capture()
{code}
capture.close()
print("not captured", flush=True)
chunks = []
while (taken := capture.take()) is not None:
    chunks += taken
assert capture.take() is None
for fd in (1, 2):
    text = b"".join(chunk for number, chunk in chunks if number == fd)
    os.write(terminal, repr((fd, text)).encode() + b"\\n")
"""


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ("print('printed')", "(1, b'printed\\n')"),
        ("print('error', file=sys.stderr)", "(2, b'error\\n')"),
        ("print('no end', end='')", "(1, b'no end')"),
        ("os.write(1, b'by os.write')", "(1, b'by os.write')"),
        ("subprocess.run(['echo', 'by a child'])", "(1, b'by a child\\n')"),
        ("print('\\u00fc\\ud800')", "(1, b'\\xc3\\xbc\\\\ud800\\n')"),
        ("for number in range(500): os.write(1, b'x')", f"(1, b'{'x' * 500}')"),
    ],
)
def test_all_that_a_process_writes_is_captured(start, script, code, line):
    one = start(script(CAPTURES.format(code=code)))
    assert one.end() == 0, one.output
    assert line in one.output
    assert one.output.startswith("not captured\n")


def test_a_child_that_keeps_the_output_open_does_not_keep_close_waiting(start, script):
    code = "subprocess.Popen(['sleep', '60']); print('before'); capture.close(0.1)"
    one = start(script(CAPTURES.format(code=code).replace("\ncapture.close()", "")))
    assert one.end() == 0, one.output
    assert "(1, b'before\\n')" in one.output


# -- writing --------------------------------------------------------------------------------------


class Printer:
    """Stands for a rank's actor; its results are there at once.

    Args:
        takes: what its calls of ``read_output`` return; an exception is raised.
    """

    def __init__(self, *takes):
        left = iter(takes)
        self.read_output = SimpleNamespace(remote=lambda: next(left))


def get(result):
    if isinstance(result, Exception):
        raise result
    return result


def test_chunks_are_written_as_they_come(capsys):
    follow(Printer([(1, b"a"), (2, b"x\n")], [(1, b"b\nc")], None), get).join(60)
    assert capsys.readouterr() == ("ab\nc", "x\n")


def test_a_prefix_is_put_before_every_line(capsys):
    printed = [(1, b"one\ntw"), (2, b"error\n"), (1, b"o\n"), (1, b"\nend")]
    follow(Printer(printed, None), get, "(w) ").join(60)
    assert capsys.readouterr() == ("(w) one\n(w) two\n(w) \n(w) end\n", "(w) error\n")


def test_bytes_that_are_no_text_are_replaced(capsys):
    follow(Printer([(1, b"\xff\n")], None), get).join(60)
    assert capsys.readouterr().out == "\ufffd\n"


def test_the_death_of_a_rank_ends_its_output(capsys):
    thread = follow(Printer([(1, b"last")], RuntimeError("it died")), get, "(w) ")
    thread.join(60)
    assert not thread.is_alive()
    assert capsys.readouterr().out == "(w) last\n"
