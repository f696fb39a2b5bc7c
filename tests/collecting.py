"""Where programs begin in which Python collects garbage, and other threads run, all the time."""

__all__ = ["PROGRAM"]

#: Finalizers let other threads run; ``start(*targets)`` starts functions that do, without an end.
PROGRAM = """
import gc, os, sys, threading, time

class Cycle:
    def __init__(self):
        self.me = self
    def __del__(self):
        time.sleep(0)

def leave_garbage():
    while True:
        Cycle()
        time.sleep(0)

def start(*targets):
    sys.setswitchinterval(1e-6)
    gc.set_threshold(3, 1, 100_000)
    for target in (*targets, leave_garbage):
        threading.Thread(target=target, daemon=True).start()
"""
