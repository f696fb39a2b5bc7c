"""Let every Python process of the tests write the stacks of its threads when SIGUSR2 asks for them.

Python imports this at its start where the folder is on PYTHONPATH; ``conftest.py`` sees to that for
the processes that tests start, Ray's workers among them. ``gating/post_mortem.py`` sends the signal
and reads what they wrote. Where coverage is measured, its own start-up code runs next.
"""

import contextlib
import faulthandler
import fcntl
import os
import runpy
import signal
import sys

# Far from the numbers that a program under test expects to be given.
LOWEST_DESCRIPTOR = 200
_kept: list[int] = []  # of this process, or of that which it was forked from


def _register() -> None:
    folder = os.environ.get("TESTS_FOLDER")
    if not folder:
        return
    with contextlib.suppress(OSError):  # the tests have ended, and their folder with them
        path = os.path.join(folder, "stacks", str(os.getpid()))
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)
        kept = fcntl.fcntl(opened, fcntl.F_DUPFD_CLOEXEC, LOWEST_DESCRIPTOR)
        os.close(opened)
        faulthandler.register(signal.SIGUSR2, file=kept, all_threads=True)
        for each in _kept:
            os.close(each)
        _kept[:] = [kept]


_register()
os.register_at_fork(after_in_child=_register)
if "COVERAGE_PROCESS_CONFIG" in os.environ:
    _tests = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    sys.path.append(os.path.join(_tests, "coverage_of_actors"))
    runpy.run_path(os.path.join(_tests, "coverage_of_actors", "sitecustomize.py"))
