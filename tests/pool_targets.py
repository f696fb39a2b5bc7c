"""Functions that tests of pools run in workers."""

import os
import threading
import time


def double(x):
    return 2 * x


def add(x, y=0, z=0):
    return x + y + z


def fail(x):
    raise KeyError(x)


def where(_):
    return os.getpid(), threading.get_ident()


def wait_for(path):
    end = time.monotonic() + 60
    while not os.path.exists(path):
        assert time.monotonic() < end, "the file was not made"
        time.sleep(0.005)


def make_file(path):
    with open(path, "w"):
        pass
