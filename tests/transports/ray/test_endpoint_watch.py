"""The watch of members' endpoints, with endpoints that are no actors."""

import asyncio
from types import SimpleNamespace
from typing import Any

from ray.exceptions import ActorUnavailableError

from rayrpc._protocol.membership import Member
from rayrpc._transports.ray import endpoint_watch
from rayrpc._transports.ray.endpoint_watch import EndpointWatch


class Endpoint:
    """An endpoint whose calls of ``watch`` end as ``ends`` says, one after the other."""

    def __init__(self, *ends):
        self._ends = list(ends)
        self.watch: Any = SimpleNamespace(options=lambda name: SimpleNamespace(remote=self._watch))

    async def _watch(self, token):
        end = self._ends.pop(0)
        if end is not None:
            raise end


def watched(find):
    """Watch a member until it is removed; return who was removed, why, and who waits."""
    removed = []

    async def remove(*args):
        removed.append(args)

    async def run():
        watch = EndpointWatch(remove)
        member = Member("token", "alice", 0, address=SimpleNamespace(find=find))
        waiter = asyncio.ensure_future(watch.wait("token"))
        await asyncio.wait_for(watch.watch(member), 60)
        await watch.watch(member)  # it is watched: once is enough
        watch.forget("token")
        await asyncio.wait_for(waiter, 60)
        assert watch.tokens == set()

    asyncio.run(run())
    return removed


def test_a_member_whose_endpoint_answers_has_left():
    assert watched(lambda: Endpoint(None)) == [("token", "left", "")]


def test_a_broken_connection_is_no_death(monkeypatch):
    monkeypatch.setattr(endpoint_watch, "WATCH_RETRY_SECONDS", 0.0)
    broken = ActorUnavailableError("the connection is broken", None)
    endpoint = Endpoint(broken, broken, None)
    assert watched(lambda: endpoint) == [("token", "left", "")]


def test_a_member_whose_endpoint_has_ended_has_died():
    def find():
        raise ValueError("there is no such actor")

    assert watched(find) == [("token", "died", "it has ended")]
