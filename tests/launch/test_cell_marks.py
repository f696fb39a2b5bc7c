"""Marks of cells in what a worker prints."""

import os
import threading

import pytest
from conftest import TIMEOUT, run_in_threads

from rayrpc.launch.cell_marks import CellWriter, Splitter, calling_cell, within_cell
from rayrpc.launch.display import END, HOLD_OFF, Text


@pytest.fixture
def written():
    """Return a ``CellWriter``, and what was written with it."""
    read_end, write_end = os.pipe()
    writer = CellWriter(write_end)
    yield writer, lambda: os.read(read_end, 1 << 16)
    writer.close()
    os.close(read_end)
    os.close(write_end)


def split(*datas, splitter=None):
    """Return, by cell, the bytes of one worker's texts."""
    splitter = splitter or Splitter()
    parts = [part for data in datas for part in splitter.split([Text("w", 1, data)])]
    return [(cell, text.data) for cell, text in parts]


def joined(parts):
    """Join the texts of a cell that follow one another."""
    result = []
    for cell, data in parts:
        if data is not None and result and result[-1][0] == cell:
            result[-1][1] += data
        elif data is not None:
            result.append([cell, data])
    return result


def test_text_for_no_cell_is_written_as_it_is(written):
    writer, read = written
    print("plain", file=writer)
    assert read() == b"plain\n"


def test_text_for_a_cell_is_split_from_the_rest(written):
    writer, read = written
    with within_cell("k.1"):
        print("one", 1, file=writer)
        with within_cell("k.2"):
            print("two", file=writer)
        assert writer.write("three") == 5
    print("none", file=writer)
    assert calling_cell.get() == ""
    expected = [["k.1", b"one 1\n"], ["k.2", b"two\n"], ["k.1", b"three"], ["", b"none\n"]]
    assert joined(split(read())) == expected


def test_an_unfinished_line_is_shown_before_a_text_for_another_cell(written):
    writer, read = written
    for cell in ("k.1", "k.1", "k.2"):
        with within_cell(cell):
            print("x", end="", file=writer)
    writer.flush()
    assert split(read()) == [
        ("", HOLD_OFF),
        ("k.1", b"x"),
        ("k.1", b"x"),
        ("k.1", HOLD_OFF),
        ("k.2", b"x"),
    ]


def test_a_mark_may_come_in_two_parts(written):
    writer, read = written
    print("\x1b[1mbold\x1b[0m", file=writer)
    with within_cell("k.1"):
        print("\x1b[1mone\x1b[0m", file=writer)
    print("none\x1b]rayrpc", file=writer)
    data = read()
    whole = joined(split(data))
    assert [cell for cell, _ in whole] == ["", "k.1", ""]
    for at in range(len(data) + 1):
        assert joined(split(data[:at], data[at:])) == whole


def test_what_only_begins_as_a_mark_is_shown_in_the_end():
    splitter = Splitter()
    assert split(b"text\x1b]ray", splitter=splitter) == [("", b"text")]
    ended = splitter.split([Text("w", 0, END)])
    assert ended == [("", Text("w", 1, b"\x1b]ray")), ("", Text("w", 0, END))]


def test_what_is_too_long_for_a_mark_is_text():
    text = b"\x1b]rayrpc:" + 200 * b"x"
    assert split(text) == [("", text)]


def test_workers_and_descriptors_have_marks_of_their_own():
    splitter = Splitter()
    texts = [
        Text("a", 1, b"\x1b]rayrpc:k.1\x07one"),
        Text("a", 2, b"error"),
        Text("b", 1, b"other"),
        Text("a", 1, b"more"),
    ]
    cells = [(cell, text.data) for cell, text in splitter.split(texts) if text.data is not None]
    assert cells == [("k.1", b"one"), ("", b"error"), ("", b"other"), ("k.1", b"more")]


@pytest.mark.usefixtures("quick_switches")
def test_threads_that_print_at_once_print_for_their_own_cells(written):
    writer, read = written
    printed = bytearray()
    count = 300

    def collect():
        while not printed.endswith(b"last\n"):
            printed.extend(read())

    def say(name):
        for number in range(count):
            with within_cell(name):
                writer.write(f"{name} {number}\n")

    reader = threading.Thread(target=collect)
    reader.start()
    names = ["k.1", "k.2", "k.3", ""]
    run_in_threads(say, [(name,) for name in names], TIMEOUT)
    print("last", file=writer)
    reader.join(TIMEOUT)
    shown = dict.fromkeys(names, b"")
    for cell, data in split(bytes(printed)):
        shown[cell] += data or b""
    shown[""] = shown[""].removesuffix(b"last\n")
    for name in names:  # a stream of Python's may turn the order where threads write to it
        expected = [f"{name} {number}" for number in range(count)]
        assert sorted(shown[name].decode().splitlines()) == sorted(expected)
