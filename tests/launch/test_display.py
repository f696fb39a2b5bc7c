"""Texts of workers on this process's stdout and stderr."""

import sys

import pytest

from rayrpc.launch.display import BEGIN, END, Display, Text


@pytest.fixture
def shown():
    """A display of workers a and b with prefixes, and r without; returns what it writes."""
    written = {1: "", 2: ""}

    def write(fd, text):
        written[fd] += text

    display = Display({"a": "(a) ", "b": "(b) "}, write)

    def show(*texts):
        written.update({1: "", 2: ""})
        display.show([Text(*text) for text in texts])
        return written[1] + ("|" + written[2] if written[2] else "")

    return show


def test_text_without_a_prefix_is_shown_as_it_comes(shown):
    assert shown(("r", 1, b"x"), ("r", 2, b"e"), ("r", 1, b"y\nz")) == "xy\nz|e"


@pytest.mark.parametrize("worker", ["a", "r"])
def test_a_character_may_come_in_two_parts(shown, worker):
    text = "Ünï\n".encode()
    parts = [shown((worker, 1, text[i : i + 1])) for i in range(len(text))]
    assert "".join(parts) == ("(a) " if worker == "a" else "") + "Ünï\n"


def test_a_prefix_is_put_before_every_line(shown):
    texts = [("a", 1, b"one\ntw"), ("a", 2, b"error\n"), ("a", 1, b"o\n"), ("a", 1, b"\nend")]
    assert shown(*texts) == "(a) one\n(a) two\n(a) \n|(a) error\n"
    assert shown(("a", 0, END)) == "(a) end\n"


def test_an_unfinished_line_is_shown_when_asked_for_and_goes_on(shown):
    assert shown(("a", 1, b"half")) == ""
    assert shown(("a", 1, None)) == "(a) half"
    assert shown(("a", 1, b" and half\n"), ("a", 1, None)) == " and half\n"


def test_another_workers_line_does_not_go_on_from_an_unfinished_one(shown):
    assert shown(("a", 1, b"half"), ("a", 1, None), ("b", 1, b"whole\n")) == "(a) half\n(b) whole\n"
    assert shown(("a", 1, b"rest\n")) == "(a) rest\n"


def test_a_carriage_return_ends_a_line(shown):
    assert shown(("a", 1, b"\r 10%\r 20%")) == "(a)  10%\r"
    assert shown(("a", 1, None)) == "(a)  20%"
    assert shown(("a", 1, b"\r 30%\r")) == "\r(a)  30%\r"
    assert shown(("a", 1, b"\r 40%\n")) == "(a)  40%\n"


@pytest.mark.parametrize("parts", [[b"x\r\ny\n"], [b"x\r", b"\ny\n"]])
def test_cr_and_lf_end_one_line(shown, parts):
    assert shown(*[("a", 1, part) for part in parts]) == "(a) x\r\n(a) y\n"


def test_a_line_does_not_overwrite_anothers_progress(shown):
    assert shown(("a", 1, b" 10%\r"), ("b", 1, b"done\n")) == "(a)  10%\r\n(b) done\n"


def test_the_end_shows_the_rest(shown):
    assert shown(("a", 0, BEGIN), ("a", 2, b"last"), ("r", 1, b"\xc3")) == ""
    assert shown(("a", 0, END), ("r", 0, END)) == "\ufffd|(a) last\n"


def test_bytes_that_are_no_text_are_replaced(capsys):
    Display({}).show([Text("r", 1, b"\xff\n")])
    assert capsys.readouterr().out == "\ufffd\n"


class Ascii:
    encoding = "ascii"

    def __init__(self):
        self.text = ""

    def write(self, text):
        self.text += text.encode("ascii").decode()

    def flush(self):
        pass


def test_characters_that_the_terminal_lacks_are_escaped(monkeypatch):
    terminal = Ascii()
    monkeypatch.setattr(sys, "stdout", terminal)
    Display({}).show([Text("r", 1, "ü\n".encode())])
    assert terminal.text == "\\xfc\n"


def test_a_terminal_that_is_closed_stops_nobody(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    Display({}).show([Text("r", 1, b"x\n")])
