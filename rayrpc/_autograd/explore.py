"""Exploration: which tensors of messages the roots of a backward pass depend on."""

from __future__ import annotations

from rayrpc._autograd.context import DistAutogradContext
from rayrpc._autograd.context_messages import TensorKey
from rayrpc._autograd.current_context import call_without_context
from rayrpc._autograd.graph import Entry
from rayrpc._autograd.hook import serving_contexts
from rayrpc._concurrency.reader import release_reader

__all__ = ["explore"]


def explore(context: DistAutogradContext, root: Entry) -> dict[int, dict[int, set[int]]]:
    """Return the sent tensors that an entry depends on, directly or indirectly.

    A reply carries the dependencies of its tensors; the rest are requested from the senders.

    Args:
        context: the context of the pass.
        root: the entry of the pass's roots.

    Returns:
        The tensors' numbers in their message, by the sender's id, and then by the message's id.
    """
    agent = context.home.agent
    found: dict[int, dict[int, set[int]]] = {}
    messages = context.messages
    todo = messages.dependencies_of(root)
    while todo:
        replies = []
        new: dict[int, list[tuple[int, int]]] = {}
        for worker, message_id, slot in todo:
            slots = found.setdefault(worker, {}).setdefault(message_id, set())
            if slot not in slots:
                slots.add(slot)
                new.setdefault(worker, []).append((message_id, slot))
        here = new.pop(agent.info.id, [])
        todo = []
        for worker, sent in new.items():
            unknown = []
            for each in sent:
                if (direct := messages.known_dependencies((worker, *each))) is None:
                    unknown.append(each)
                else:
                    todo += direct
            if unknown:
                args = (context.id, unknown)
                timeout = agent.default_timeout
                replies.append(call_without_context(agent, worker, _dependencies, args, timeout))
        if here:
            todo += _dependencies_in(context, here)
        release_reader()
        for reply in replies:
            todo += reply.wait()
    return found


def _dependencies(context_id: int, tensors: list[tuple[int, int]]) -> list[TensorKey]:
    """Return the direct dependencies of tensors that this worker sent."""
    return _dependencies_in(serving_contexts().find_context(context_id), tensors)


def _dependencies_in(
    context: DistAutogradContext, tensors: list[tuple[int, int]]
) -> list[TensorKey]:
    messages = context.messages
    return [
        key
        for message_id, slot in tensors
        for key in messages.dependencies_of(messages.entry(message_id, [slot]))
    ]
