"""Errors on their way back."""

import copy
import linecache
import pickle
from typing import Any

import pytest
import targets

from rayrpc import config
from rayrpc._concurrency.outcome import fresh
from rayrpc._protocol.ids import WorkerInfo
from rayrpc._runtime.invocation import Invocation
from rayrpc._runtime.serialization.remote_errors import RemoteException, describe, rebuild
from rayrpc.errors import CallTimeoutError, WorkerDiedError

HERE = WorkerInfo("alice", 1)


def through(raise_it):
    try:
        raise_it()
    except BaseException as exc:
        return rebuild(describe(exc, HERE, pickle.dumps), keeps_type=True)


def test_the_type_stays_and_the_text_has_worker_error_and_traceback(capsys):
    error = through(targets.fail)
    assert type(error) is ValueError
    for part in ("On WorkerInfo(id=1, name=alice)", "as expected", "in fail"):
        assert part in str(error)
    assert "as expected" in capsys.readouterr().err


def raise_within_rayrpc():
    Invocation(raise_from_a_cause)()


def raise_from_a_cause():
    try:
        Invocation(targets.fail, ("the cause",))()
    except ValueError as exc:
        raise KeyError("the effect") from exc


@pytest.mark.parametrize("full", [False, True])
def test_a_traceback_shows_rayrpcs_frames_only_if_that_is_set(full):
    before = config.settings()
    config.use(before.replace(full_traceback=full))
    try:
        text = str(through(raise_within_rayrpc))
    finally:
        config.use(before)
    for part in ("in raise_within_rayrpc", "in raise_from_a_cause", "in fail", "direct cause"):
        assert part in text
    assert text.count("invocation.py") == (2 if full else 0)


def test_a_traceback_of_rayrpcs_frames_alone_shows_them():
    text = str(through(Invocation(dict, (1,))))
    assert "TypeError" in text and "Traceback" in text
    error = CallTimeoutError("late")
    error.__traceback__ = None
    assert "late" in describe(error, HERE, pickle.dumps).msg
    try:
        Invocation(1)()  # type: ignore[arg-type]
    except TypeError as exc:
        trace: Any = exc.__traceback__
        exc.__traceback__ = trace.tb_next  # without this function's
        assert "invocation.py" in describe(exc, HERE, pickle.dumps).msg


def test_lines_of_a_cell_that_the_caller_has_alone_are_shown(monkeypatch):
    code = "def outer(f):\n    f()\n\ndef inner():\n    raise KeyError('why')\n"
    path = "/tmp/ipykernel_1/42.py"
    cell: dict[str, Any] = {}
    exec(compile(code, path, "exec"), cell)
    try:
        cell["outer"](cell["inner"])
    except KeyError as exc:
        remote = describe(exc, HERE, pickle.dumps)
    assert "f()" not in remote.msg and "raise KeyError" not in remote.msg
    monkeypatch.setitem(linecache.cache, path, (len(code), None, code.splitlines(True), path))
    text = str(rebuild(remote, True).args[0])
    shown = [line for line in text.splitlines() if path in line or "42" in line or "    " in line]
    place = f'  File "{path}", line'
    assert shown[-4:] == [
        f"{place} 2, in outer",
        "    f()",
        f"{place} 5, in inner",
        "    raise KeyError('why')",
    ]
    lines_of_this_file = text.count('cell["outer"](cell["inner"])')
    assert lines_of_this_file == 1  # the callee had it


def test_no_file_is_read_for_them(tmp_path):
    path = tmp_path / "other.py"
    path.write_text("another program\n")
    text = f'Traceback (most recent call last):\n  File "{path}", line 1, in f\nKeyError: 1'
    remote = RemoteException(text, pickle.dumps(KeyError), "KeyError", {})
    assert rebuild(remote, True).args == (text,)


def test_line_breaks_and_foreign_letters_survive():
    text = str(through(lambda: targets.fail("one\ntwo é 中")))
    assert "one\ntwo é 中" in text


def test_backslashes_raise_no_warning():
    assert type(through(lambda: targets.fail(r"not \d"))) is ValueError


def test_a_type_with_another_constructor_becomes_a_runtime_error():
    error = through(targets.fail_picky)
    assert type(error) is RuntimeError
    assert "Original exception on remote side was" in str(error) and "Picky" in str(error)


def test_a_type_that_cannot_be_sent_becomes_a_runtime_error():
    error = rebuild(RemoteException("text", b"", "Secret", {}), keeps_type=True)
    assert type(error) is RuntimeError and "Secret" in str(error) and "text" in str(error)


def test_system_exit_does_not_end_the_caller():
    assert type(through(targets.leave_thread)) is RuntimeError


def test_rayrpcs_own_errors_keep_their_fields():
    def fail():
        raise WorkerDiedError("bob", "killed", "10.0.0.1")

    error = through(fail)
    assert isinstance(error, WorkerDiedError)
    assert (error.worker, error.cause, error.node) == ("bob", "killed", "10.0.0.1")
    assert "bob" in str(error)


@pytest.mark.parametrize(
    "error",
    [ValueError("a", 1), WorkerDiedError("bob", "x"), CallTimeoutError("t"), OSError(2, "no")],
)
def test_a_fresh_error_is_alike_and_has_no_trace(error):
    vars(error)["note"] = "kept"
    again: Any = fresh(error)
    assert type(again) is type(error) and again is not error
    assert (str(again), again.args, again.note) == (str(error), error.args, "kept")
    assert again.__traceback__ is None


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(2, "no such file", "name.txt"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad start"),
        SyntaxError("bad", ("f.py", 1, 1, "x", 1, 2)),
    ],
)
def test_a_fresh_error_of_python_says_the_same(error):
    assert str(fresh(error)) == str(error)


class Refuses(Exception):
    def __init_subclass__(cls):
        raise TypeError("final")


@pytest.mark.parametrize("kind", [KeyError, OSError, StopIteration, AssertionError, LookupError])
def test_errors_of_calls_are_runtime_errors_too(kind):
    remote = RemoteException("the text", pickle.dumps(kind), kind.__name__, {})
    error = rebuild(remote, keeps_type=False)
    assert isinstance(error, kind) and isinstance(error, RuntimeError)
    assert type(error).__name__ == kind.__name__ and "the text" in str(error)
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error), fresh(error)):
        assert type(again) is type(error) and again.args == error.args
    assert type(rebuild(remote, keeps_type=True)) is kind
    # passed on, it is described by its own type
    assert describe(error, HERE, pickle.dumps).type_data == pickle.dumps(kind)


def test_a_key_error_of_a_call_shows_its_lines_as_torchs_runtime_error_does():
    remote = RemoteException("On alice:\nthe text", pickle.dumps(KeyError), "KeyError", {})
    assert str(rebuild(remote, keeps_type=False)) == "On alice:\nthe text"


@pytest.mark.parametrize("is_printed", [True, False])
def test_an_error_is_printed_unless_its_caller_shows_it(capsys, is_printed):
    describe(ValueError("wrong"), HERE, pickle.dumps, is_printed)
    assert ("ValueError('wrong')" in capsys.readouterr().err) == is_printed


@pytest.mark.parametrize("kind", [ValueError, TypeError, UnicodeError, RuntimeError])
def test_value_errors_and_type_errors_of_calls_are_no_runtime_errors(kind):
    remote = RemoteException("the text", pickle.dumps(kind), kind.__name__, {})
    assert type(rebuild(remote, keeps_type=False)) is kind


def test_an_error_whose_class_cannot_be_inherited_from_is_a_runtime_error():
    remote = RemoteException("the text", pickle.dumps(Refuses), "Refuses", {})
    error = rebuild(remote, keeps_type=False)
    assert type(error) is RuntimeError and "the text" in str(error)
