"""Outcomes: what their errors keep, how they are raised again, and how they complete a Future."""

import itertools
import logging
import threading
from typing import Any

import pytest
from conftest import keeps_variables, run_in_threads
from torch.futures import Future

from rayrpc._concurrency import outcome
from rayrpc._concurrency.outcome import (
    Error,
    Value,
    attempt,
    complete,
    fresh,
    text_of,
    without_frames,
)


class WithRequired(Exception):
    """Cannot be made from its ``args``."""

    def __init__(self, path, *, code):
        super().__init__(f"{path}: {code}")
        self.path, self.code = path, code


class NotMadeAgain(Exception):
    """Refuses to be made."""

    may_be_made = True

    def __new__(cls, *args):
        if not cls.may_be_made:
            raise RuntimeError("not again")
        return super().__new__(cls, *args)


class Slotted(Exception):
    __slots__ = ("code",)


class Stop(BaseException):
    """What no ``except Exception`` catches."""


class Unprintable(Exception):
    def __str__(self):
        raise Stop

    __repr__ = __str__


def raised(error):
    """Return an error with a traceback."""
    try:
        raise error
    except type(error) as exc:
        return exc


class TestFresh:
    @pytest.mark.parametrize(
        "error",
        [
            ValueError("x", 2),
            KeyError("x"),
            OSError(2, "no such file", "name"),
            UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"),
            StopIteration(5),
            SystemExit(3),
            KeyboardInterrupt(),
            WithRequired("file", code=7),
            NotMadeAgain("x"),
        ],
        ids=lambda error: type(error).__name__,
    )
    def test_a_copy_is_of_the_same_type_and_says_the_same(self, error):
        copy = fresh(raised(error))
        assert copy is not error and type(copy) is type(error)
        assert copy.args == error.args and str(copy) == str(error) and repr(copy) == repr(error)
        assert copy.__traceback__ is None

    def test_attributes_come_along(self):
        error: Any = WithRequired("file", code=7)
        error.__notes__ = ["seen on Tuesday"]
        copy = fresh(error)
        assert (copy.path, copy.code, copy.__notes__) == ("file", 7, ["seen on Tuesday"])
        assert fresh(OSError(2, "no such file", "name")).filename == "name"
        assert fresh(StopIteration(5)).value == 5

    @pytest.mark.parametrize("kind", [ValueError, NotMadeAgain])
    @pytest.mark.parametrize("suppressed", [False, True])
    def test_the_cause_comes_along(self, kind, suppressed):
        error, cause = kind("x"), KeyError("cause")
        error.__cause__, error.__suppress_context__ = cause, suppressed
        copy = fresh(error)
        assert copy.__cause__ is cause and copy.__suppress_context__ is suppressed

    def test_one_whose_class_cannot_be_copied_is_itself(self, monkeypatch):
        error = NotMadeAgain("x")
        monkeypatch.setattr(NotMadeAgain, "may_be_made", False)
        assert fresh(error) is error

    def test_a_class_with_slots_is_copied_with_its_text(self):
        assert str(fresh(Slotted("x"))) == "x"


class TestError:
    def test_each_unwrap_raises_a_copy_without_the_earlier_traceback(self):
        error = Error(ValueError("x"))
        lengths = []
        for _ in range(3):
            with pytest.raises(ValueError, match="x") as caught:
                error.unwrap()
            lengths.append(len(list(caught.traceback)))
        assert error.error.__traceback__ is None and len(set(lengths)) == 1

    def test_a_raised_error_keeps_no_variable_of_the_frames_that_it_passed(self):
        error = Error(ValueError("x"))
        assert not keeps_variables(error.unwrap)
        with pytest.raises(ValueError, match="x"):
            error.unwrap()

    def test_two_are_equal_whether_their_errors_are_known_or_not(self):
        error = ValueError("x")
        assert Error(error) == Error(error, call="f", is_known=True)
        value: Any = Value(error)
        assert Error(error) != Error(error, "pickled") and Error(error) != value

    def test_an_unwrapped_value_is_the_very_object(self):
        thing = [1]
        assert Value(thing).unwrap() is thing


class TestUnknown:
    @pytest.fixture(autouse=True)
    def none_so_far(self, monkeypatch, caplog):
        monkeypatch.setattr(outcome, "_unknown", itertools.count(1))
        caplog.set_level(logging.WARNING)

    def test_an_error_that_goes_unasked_is_a_warning_with_its_call(self, caplog):
        error = Error(ValueError("x"), call="The call of f")
        del error
        text = "The call of f failed, and the program has not asked for the error: x"
        assert [(each.levelname, each.getMessage()) for each in caplog.records] == [
            ("WARNING", text)
        ]

    def test_one_that_cannot_be_shown_is_still_a_warning(self, caplog):
        error = Error(Unprintable(), call="The call of f")
        del error
        (message,) = caplog.messages
        assert message.endswith("the error: <Unprintable that cannot be shown>")

    @pytest.mark.parametrize("ask", ["unwrap", "note", "no call"])
    def test_one_that_was_asked_for_is_none(self, caplog, ask):
        error = Error(ValueError("x"), call="" if ask == "no call" else "The call of f")
        if ask == "unwrap":
            with pytest.raises(ValueError, match="x"):
                error.unwrap()
        error.is_known = ask == "note" or error.is_known
        del error
        assert not caplog.messages

    def test_one_line_says_that_further_ones_are_not_logged(self, caplog, monkeypatch):
        monkeypatch.setattr(outcome, "MOST_LOGGED", 2)
        for number in range(5):
            Error(ValueError(number), call="A call")
        ends = [message.rpartition(": ")[2] for message in caplog.messages]
        assert ends == ["0", "1", "further errors that the program does not ask for are not logged"]


class TestAttempt:
    def test_a_value_and_an_error_are_outcomes(self):
        assert attempt(lambda: 3) == Value(3)
        error = attempt(lambda: 1 / 0)
        assert isinstance(error, Error) and isinstance(error.error, ZeroDivisionError)

    @pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
    def test_so_is_what_is_no_exception(self, kind):
        def compute():
            raise kind

        found = attempt(compute)
        assert isinstance(found, Error) and type(found.error) is kind


class TestWithoutFrames:
    def test_neither_an_error_nor_a_cause_has_a_traceback_or_a_context(self):
        def fail():
            try:
                try:
                    raise KeyError("beside")
                except KeyError:
                    raise IndexError("the cause")  # noqa: B904
            except IndexError as exc:
                raise ValueError("x") from exc

        found = attempt(fail)
        assert isinstance(found, Error) and without_frames(found.error) is found.error
        cause = found.error.__cause__
        assert isinstance(cause, IndexError) and found.error.__suppress_context__
        for each in (found.error, cause):
            assert each.__traceback__ is None and each.__context__ is None

    def test_causes_may_be_a_circle(self):
        first, second = ValueError(1), ValueError(2)
        first.__cause__, second.__cause__ = second, first
        assert without_frames(first) is first


class TestText:
    def test_it_is_that_of_str_or_repr(self):
        assert text_of(ValueError("x")) == "x" and text_of(ValueError("x"), repr) == (
            "ValueError('x')"
        )

    @pytest.mark.parametrize("show", [str, repr])
    def test_whatever_an_error_raises_while_it_is_shown_it_has_a_text(self, show):
        assert text_of(Unprintable(), show) == "<Unprintable that cannot be shown>"


class TestComplete:
    def test_a_value_is_the_futures(self):
        future = Future()
        complete(future, Value(3))
        assert future.wait() == future.value() == 3

    def test_each_wait_for_an_error_raises_a_copy(self):
        future, error = Future(), Error(raised(ValueError("x")), call="The call of f")
        complete(future, error)
        assert not error.is_known
        found = []
        for wait in (future.wait, future.value, future.wait):
            with pytest.raises(ValueError, match="x") as caught:
                wait()
            found.append(caught.value)
        assert error.is_known and error.error.__traceback__ is None
        assert len({*map(id, found), id(error.error)}) == 4

    @pytest.mark.parametrize("wait", [Future.wait, Future.value])
    def test_no_error_keeps_variables_of_a_frame_that_has_the_future(self, wait):
        def fail():
            future: Future = Future()
            complete(future, attempt(fail_with_cause))
            wait(future)

        def fail_with_cause():
            try:
                raise KeyError("the cause")
            except KeyError as exc:
                raise ValueError("x") from exc

        assert not keeps_variables(fail)

    def test_a_callback_of_the_future_gets_the_error(self):
        future: Future = Future()
        after = future.then(lambda done: done.value())
        complete(future, Error(ValueError("x")))
        with pytest.raises(RuntimeError, match="ValueError: x"):
            after.wait()

    @pytest.mark.parametrize(
        ("error", "text"),
        [
            (KeyboardInterrupt("stop"), "KeyboardInterrupt: stop"),
            (SystemExit(3), "SystemExit: 3"),
        ],
    )
    def test_what_is_no_exception_becomes_a_runtime_error_with_its_name(self, error, text):
        future = Future()
        complete(future, Error(error))
        with pytest.raises(RuntimeError, match=f"^{text}$"):
            future.wait()

    @pytest.mark.parametrize("made", [Value(2), Error(ValueError("late"), call="f")])
    def test_a_future_that_the_program_has_completed_keeps_its_value(self, made):
        future = Future()
        future.set_result(1)
        complete(future, made)
        assert future.wait() == future.value() == 1
        assert isinstance(made, Value) or made.is_known

    @pytest.mark.parametrize("made", [Value(2), Error(ValueError("late"), call="f")])
    def test_so_does_one_that_the_program_completes_just_now(self, made):
        class Racing(Future):
            def done(self):  # the program completes it right after it was looked at
                before = super().done()
                if not before:
                    self.set_result(1)
                return before

        future = Racing()
        complete(future, made)
        assert isinstance(made, Value) or made.is_known
        assert future.wait() == 1

    def test_an_error_of_the_future_itself_is_raised(self):
        class Broken(Future):
            def done(self):
                return False

            def set_result(self, value):
                raise RuntimeError("broken")

        with pytest.raises(RuntimeError, match="broken"):
            complete(Broken(), Value(1))

    def test_a_program_and_a_reply_that_race_leave_one_of_their_values(self, quick_switches):
        for number in range(100):
            future, late = Future(), Error(ValueError("late"))
            start = threading.Barrier(2)

            def by_program(future=future, start=start):
                start.wait(60)
                if not future.done():
                    try:
                        future.set_result("mine")
                    except RuntimeError:
                        assert future.done()

            def by_reply(future=future, start=start, late=late, number=number):
                start.wait(60)
                complete(future, Value("theirs") if number % 2 else late)

            run_in_threads(lambda run: run(), [(by_program,), (by_reply,)], 60)
            try:
                assert future.wait() in ("mine", "theirs")
            except ValueError:
                assert number % 2 == 0
