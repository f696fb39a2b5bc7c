"""Ctrl-C at any line of the RRef protocol: what was interrupted is done once more, and nothing is
lost, whatever part of it was done before."""

from __future__ import annotations

import itertools
import sys

from rayrpc._protocol import rref_link, rref_table
from rayrpc._protocol.ids import IdSource
from rayrpc._protocol.rref_entries import UserState
from rayrpc._protocol.rref_table import RRefTable

OWNER, A, C = 0, 1, 2
FILES = {rref_link.__file__, rref_table.__file__}
MOST_LINES = 5000


class Interrupts:
    """Raise KeyboardInterrupt once, at a line of the protocol's code.

    Args:
        line (int): the how-manieth that runs.
    """

    def __init__(self, line):
        self.left = line

    def strike(self, call):
        """Return the result of ``call``, which may be interrupted."""
        outer = sys.gettrace()
        sys.settrace(self._trace)
        try:
            return call()
        finally:
            sys.settrace(outer)

    def _trace(self, frame, event, _):
        if frame.f_code.co_filename not in FILES:
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self._trace


class Group:
    """Three workers, whose messages are delivered under interrupts."""

    def __init__(self, interrupts):
        self.strike = interrupts.strike
        self.owner, self.a, self.c = (
            RRefTable(me, IdSource(me).new, object) for me in (OWNER, A, C)
        )
        self.tables = (self.owner, self.a, self.c)

    def take(self, sender, receiver):
        try:
            return self.strike(lambda: sender.take_pending(receiver.me))
        except KeyboardInterrupt:  # no frame is sent
            sender.retransmit(receiver.me)
            return sender.take_pending(receiver.me)

    def settle(self):
        for turn in range(12):
            for table in self.tables if turn % 4 == 3 else ():
                table.retransmit()  # as a timer does
            for sender, receiver in itertools.permutations(self.tables, 2):
                message = sender.me, *self.take(sender, receiver)
                try:
                    self.strike(lambda to=receiver, args=message: to.on_messages(*args))
                except KeyboardInterrupt:
                    receiver.on_messages(*message)

    def share(self, fork_id):
        """Send a fork from ``a`` to ``c``; return it, or None if it was not sent."""
        forks = []
        try:
            return self.strike(lambda: self.a.share(fork_id, C, forks))
        except KeyboardInterrupt:
            for fork in forks:
                self.a.unshare(fork)
            return None


def run(interrupts):
    """Make an RRef of ``a`` at the owner, send it to ``c``, and drop both."""
    group = Group(interrupts)
    owner, a, c = group.tables
    rref_id, fork_id = a._new_id(), a._new_id()
    a.use(rref_id, fork_id, OWNER)
    fork = group.share(fork_id)
    if fork is not None:
        c.receive(fork)
    group.settle()
    owner.own(rref_id, fork_id, A)
    a.created(fork_id)
    group.settle()
    if fork is not None:
        assert c.used[fork.fork_id].state is UserState.CONFIRMED
        c.drop(fork.fork_id)
    assert rref_id in owner.owned, "it was deleted while a holds it"
    a.drop(fork_id)
    group.settle()
    for table in group.tables:
        left = table.owned, table.used, table._children
        assert not any(left) and table.is_settled(), left


def test_nothing_is_lost_whatever_line_is_interrupted():
    for line in range(1, MOST_LINES):
        interrupts = Interrupts(line)
        try:
            run(interrupts)
        except AssertionError as exc:
            raise AssertionError(f"with an interrupt at line {line}") from exc
        if interrupts.left > 0:
            assert line > 200, "the protocol was not interrupted"
            return
    raise AssertionError("the program does not end")
