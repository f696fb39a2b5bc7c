"""What takes part in a backward pass: the messages that lead to its roots."""

from __future__ import annotations

from rayrpc._autograd.context import DistAutogradContext, Sent
from rayrpc._autograd.graph import Entry
from rayrpc._autograd.hook import call_outside, find_context
from rayrpc._concurrency.reader import release_reader
from rayrpc._runtime import current

__all__ = ["explore_all"]


def explore_all(context: DistAutogradContext, root: Entry) -> dict[int, set[int]]:
    """Return the messages that take part in a pass, by the worker that sent them."""
    agent = current.get_agent()
    parts: dict[int, set[int]] = {}
    found = context.leads_of(root)
    while found:
        asked = []
        new: dict[int, list[int]] = {}
        for worker, message_id in found:
            known = parts.setdefault(worker, set())
            if message_id not in known:
                known.add(message_id)
                new.setdefault(worker, []).append(message_id)
        here = new.pop(agent.info.id, [])
        told: list[Sent] = []
        for worker, message_ids in new.items():
            unknown = []
            for message_id in message_ids:
                if (leads := context.leads.get((worker, message_id))) is None:
                    unknown.append(message_id)
                else:
                    told += leads
            if unknown:
                args = (context.id, unknown)
                asked.append(call_outside(worker, _explore, args, agent.default_timeout))
        found = told + (_explore(context.id, here) if here else [])
        release_reader()
        for answer in asked:
            found += answer.wait()
    return parts


def _explore(context_id: int, message_ids: list[int]) -> list[tuple[int, int]]:
    """Return the messages, with who sent them, that messages of this worker's depend on."""
    context = find_context(context_id)
    return [each for number in message_ids for each in context.leads_of(context.entry(number))]
