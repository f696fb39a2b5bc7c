"""Exploration: which messages the roots of a backward pass depend on."""

from __future__ import annotations

from rayrpc._autograd.context import DistAutogradContext, MessageKey
from rayrpc._autograd.graph import Entry
from rayrpc._autograd.hook import call_without_context, find_context
from rayrpc._concurrency.reader import release_reader
from rayrpc._runtime import current

__all__ = ["explore"]


def explore(context: DistAutogradContext, root: Entry) -> dict[int, set[int]]:
    """Return the messages that an entry depends on, directly or not.

    A message's dependencies are known from the reply that carried them; else its sender is asked.

    Args:
        context: of the pass.
        root: the entry of the pass's roots.

    Returns:
        ids of messages, by the worker that sent them.
    """
    agent = current.get_agent()
    found: dict[int, set[int]] = {}
    todo = context.dependencies_of(root)
    while todo:
        replies = []
        new: dict[int, list[int]] = {}
        for worker, message_id in todo:
            message_ids = found.setdefault(worker, set())
            if message_id not in message_ids:
                message_ids.add(message_id)
                new.setdefault(worker, []).append(message_id)
        here = new.pop(agent.info.id, [])
        todo = []
        for worker, sent in new.items():
            unknown = []
            for message_id in sent:
                if (direct := context.dependencies.get((worker, message_id))) is None:
                    unknown.append(message_id)
                else:
                    todo += direct
            if unknown:
                args = (context.id, unknown)
                timeout = agent.default_timeout
                replies.append(call_without_context(worker, _dependencies, args, timeout))
        if here:
            todo += _dependencies(context.id, here)
        release_reader()
        for reply in replies:
            todo += reply.wait()
    return found


def _dependencies(context_id: int, message_ids: list[int]) -> list[MessageKey]:
    """Return what messages that this worker sent depend on directly."""
    context = find_context(context_id)
    return [key for number in message_ids for key in context.dependencies_of(context.entry(number))]
