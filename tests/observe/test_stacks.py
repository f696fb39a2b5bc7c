"""Where users' code is: in other threads, in faulthandler's dump, and as data."""

import faulthandler
import os
import sys
import sysconfig
import tempfile
import threading

import pytest

from rayrpc._concurrency.frames import frames_of_threads
from rayrpc._concurrency.threads import ThreadCache
from rayrpc._observe.stacks import dumped_stacks, place_of, python_stacks, set_waits, users_stack

WAIT_SECONDS = 60.0


@pytest.fixture
def waiting():
    """Run a function in a thread until it has begun; it ends with the test."""
    go, threads = threading.Event(), []

    def run(function, name=None):
        begun = threading.Event()

        def wait():
            begun.set()
            assert go.wait(WAIT_SECONDS)

        threads.append(threading.Thread(target=function, args=(wait,), name=name))
        threads[-1].start()
        assert begun.wait(WAIT_SECONDS)
        return threads[-1].ident

    yield run
    go.set()
    for thread in threads:
        thread.join(WAIT_SECONDS)


def of_user(wait):
    wait()


def sorts_by(wait):
    sorted([1], key=lambda _: wait())


def runs_another(wait):
    exec("def inner(wait):\n    wait()\ninner(wait)", {"wait": wait})


def stack_of(ident):
    return users_stack(frames_of_threads()[ident])


class TestUsersStack:
    def test_it_begins_at_the_first_function_of_a_user(self, waiting):
        stack = stack_of(waiting(of_user))
        assert [each["function"] for each in stack[:2]] == ["of_user", "wait"]
        assert stack[0]["file"] == __file__ and stack[0]["text"] == "wait()"
        assert stack[0]["line"] == of_user.__code__.co_firstlineno + 1

    def test_the_standard_library_below_a_user_is_kept_and_is_no_users(self, waiting):
        stack = stack_of(waiting(of_user))
        innermost = stack[-1]
        assert innermost["file"].startswith(sysconfig.get_path("stdlib")) and not innermost["users"]
        assert place_of(stack).endswith(", in wait")  # the innermost of the user's own

    def test_rayrpcs_own_frames_are_left_out(self):
        cache = ThreadCache("stacks-test")
        go, begun, idents = threading.Event(), threading.Event(), []

        def task():
            idents.append(threading.get_ident())
            begun.set()
            assert go.wait(WAIT_SECONDS)

        try:
            cache.submit(task)
            assert begun.wait(WAIT_SECONDS)
            stack = stack_of(idents[0])
            assert stack[0]["function"] == "task"
            assert not any(
                "threads.py" in each["file"] and "rayrpc" in each["file"] for each in stack
            )
        finally:
            go.set()
            cache.close()

    def test_a_thread_that_runs_nothing_of_a_user_has_none(self):
        lock = threading.Lock()
        lock.acquire()
        thread = threading.Thread(target=lock.acquire, args=(True, WAIT_SECONDS))
        thread.start()
        try:
            assert stack_of(thread.ident) == [] and place_of([]) == ""
        finally:
            lock.release()
            thread.join(WAIT_SECONDS)

    def test_code_without_a_file_is_a_users(self, waiting):
        stack = stack_of(waiting(runs_another))
        assert ("<string>", "inner") in [(each["file"], each["function"]) for each in stack]


class TestPythonStacks:
    @pytest.fixture(autouse=True)
    def no_waits(self):
        yield
        set_waits(None)

    def test_the_main_and_the_threads_with_users_functions_are_in_it(self, waiting):
        waiting(of_user)
        ident = waiting(sorts_by)
        text = python_stacks("alice", ident)
        assert text.startswith(f"\n-- Worker alice (pid {os.getpid()}) was at:\n")
        assert "in of_user" in text and "in sorts_by" in text
        assert text.count("and in another thread at:\n") >= 1

    def test_the_main_is_in_it_even_where_it_runs_nothing_of_a_user(self, monkeypatch):
        lock = threading.Lock()
        lock.acquire()
        thread = threading.Thread(target=lock.acquire, args=(True, WAIT_SECONDS))
        thread.start()
        try:
            with_main = python_stacks("alice", thread.ident or 0)
            without = python_stacks("alice", -1)
            assert with_main.count("\n  File ") > without.count("\n  File ")
            assert "threading.py" in with_main
        finally:
            lock.release()
            thread.join(WAIT_SECONDS)

    def test_what_a_thread_waits_for_is_below_it(self, waiting):
        ident = waiting(of_user)
        set_waits(lambda: {ident: ["f of bob", "g of carol"]})
        text = python_stacks("alice", -1)
        assert "  waits for f of bob\n  waits for g of carol\n" in text
        set_waits(None)
        assert "waits for" not in python_stacks("alice", -1)

    def test_an_error_of_what_tells_the_waits_loses_no_stack(self, waiting):
        waiting(of_user)

        def fail():
            raise RuntimeError("the worker is just shut down")

        set_waits(fail)
        assert "in of_user" in python_stacks("alice", -1)


def dump_of_threads():
    """Return what faulthandler writes."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()


class TestDumpedStacks:
    def test_of_a_dump_the_threads_with_users_functions_are_shown(self, waiting):
        waiting(of_user)
        text = dumped_stacks("alice", 7, dump_of_threads())
        assert text.startswith("\n-- Worker alice (pid 7) was at:\n  (most recent call first)\n")
        assert "in of_user" in text and text.endswith("\n")
        assert "Thread 0x" not in text  # how faulthandler begins each

    def test_threads_of_the_library_are_left_out_unless_there_are_no_others(self):
        library = f'  File "{sysconfig.get_path("stdlib")}/threading.py", line 1 in wait\n'
        users = '  File "/home/me/train.py", line 3 in step\n'
        header = "Thread 0x1 (most recent call first):\n"
        both = dumped_stacks("a", 1, f"{header}{library}\n{header}{users}{library}")
        assert both.count("step") == 1 and both.count("threading.py") == 1
        alone = dumped_stacks("a", 1, f"{header}{library}\n")
        assert "threading.py" in alone

    @pytest.mark.parametrize(
        "path",
        [
            "{package}/api.py",
            "{stdlib}/site-packages/ray/worker.py",
            "{stdlib}/queue.py",
            "<frozen importlib._bootstrap>",
        ],
    )
    def test_neither_rayrpc_nor_ray_nor_python_is_a_users(self, path):
        file = path.format(
            package=os.path.dirname(sys.modules["rayrpc"].__file__ or ""),
            stdlib=sysconfig.get_path("stdlib"),
        )
        users = '  File "{stdlib}/site-packages/numpy/linalg.py", line 9 in solve\n'.format(
            stdlib=sysconfig.get_path("stdlib")
        )
        header = "Thread 0x1 (most recent call first):\n"
        text = dumped_stacks("a", 1, f'{header}  File "{file}", line 1 in f\n\n{header}{users}')
        assert file not in text and "solve" in text

    @pytest.mark.parametrize("dump", ["", "\n\n", "Thread 0x1 (most recent call first):\n"])
    def test_an_empty_dump_says_that_there_was_nothing(self, dump):
        assert dumped_stacks("a", 1, dump).endswith("was at:\n  no function of a user\n")
