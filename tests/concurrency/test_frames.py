"""Frames of running threads: read while they return, while garbage is collected."""

import subprocess
import sys
import threading

from collecting import PROGRAM

from rayrpc._concurrency.frames import frames_of_threads, local

# Threads whose functions return all the time, with another call at the same place of the stack.
WALK = """
from rayrpc._concurrency.frames import frames_of_threads, local

def descend(n):
    return descend(n - 1) if n else 0

def return_all_the_time():
    while True:
        descend(20)
        sorted([3, 1, 2], key=lambda each: descend(2))

start(return_all_the_time, return_all_the_time)
deadline = time.monotonic() + 60
for _ in range(WALKS):
    for frames in frames_of_threads().values():
        for frame, _ in frames:
            local(frame, "n")
    assert time.monotonic() < deadline
assert gc.get_threshold() == (3, 1, 100_000)
print("walked", flush=True)
os._exit(0)  # the threads never end
"""


def test_threads_that_return_are_walked_while_garbage_is_collected():
    code = PROGRAM + WALK.replace("WALKS", "2000")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, b"walked\n"), done.stderr.decode()[-2000:]


def test_a_thread_has_frames_with_lines_and_locals():
    entered, leave = threading.Event(), threading.Event()

    def outer(value):
        inner()

    def inner():
        entered.set()
        leave.wait(60)

    thread = threading.Thread(target=outer, args=("kept",))
    thread.start()
    ident = thread.ident
    assert ident is not None
    try:
        assert entered.wait(60)
        frames = frames_of_threads()
        assert frames[threading.get_ident()] == []
        found = {frame.f_code: (frame, line) for frame, line in frames[ident]}
        names = [frame.f_code.co_name for frame, _ in frames[ident]]
        assert names.index("inner") < names.index("outer")
        frame, line = found[outer.__code__]
        assert line == outer.__code__.co_firstlineno + 1
        assert local(frame, "value") == "kept"
        assert local(frame, "other") is None
    finally:
        leave.set()
        thread.join(60)
