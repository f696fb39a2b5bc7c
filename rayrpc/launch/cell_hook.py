"""The hook by which calls carry the cell of a notebook that made them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from rayrpc._runtime.agent import Agent
from rayrpc._runtime.hooks import Hook, IncomingCall, OutgoingCall
from rayrpc.launch.cell_marks import calling_cell, within_cell
from rayrpc.launch.notebook import cell_here, shown_in

__all__ = ["CellHook", "follow_cells_here", "follow_cells_of_calls"]


class CellHook(Hook):
    """Send the cell with each call; have a call that brings one run for it.

    Args:
        modes (frozenset[str]): of the calls that bring it.
        cell_here (Callable): returns the cell for which this thread runs; empty: there is none.
        within (Callable): returns the context of a function that runs for a cell.
    """

    name = "cell"

    def __init__(
        self,
        modes: frozenset[str],
        cell_here: Callable[[], str],
        within: Callable[[str], AbstractContextManager[Any]],
    ) -> None:
        self.modes = modes
        self._cell_here = cell_here
        self._within = within

    def wants(self) -> bool:
        return bool(self._cell_here())

    def after_encode(self, call: OutgoingCall) -> None:
        call.meta[self.name] = self._cell_here()

    def before_run(self, call: IncomingCall) -> AbstractContextManager[Any]:
        return self._within(call.meta[self.name])

    before_resume = before_run


def follow_cells_here(agent: Agent) -> None:
    """Have the calls that this notebook makes carry their cells; idempotent.

    A call that blocks its cell needs none: what has none is for the cell that runs.
    """
    if not any(isinstance(hook, CellHook) for hook in agent.hooks):
        agent.hooks.append(CellHook(frozenset({"async", "remote"}), cell_here, shown_in))
        agent.callee.replies.prints_errors = False


def follow_cells_of_calls(agent: Agent) -> None:
    """Have the calls that a worker serves run for their cells, which show their errors, too."""
    modes = frozenset({"sync", "async", "remote"})
    agent.hooks.append(CellHook(modes, calling_cell.get, within_cell))
    agent.callee.replies.prints_errors = False
