"""Who waits until members have applied a version, and for how long."""

import asyncio

from rayrpc._transports.ray.applied_versions import AppliedVersions


def run(check):
    asyncio.run(asyncio.wait_for(check(AppliedVersions()), 60))


def test_a_wait_ends_when_the_last_member_has_applied_the_version():
    async def check(applied):
        applied.note("a", 3)
        waiting = asyncio.ensure_future(applied.wait(["a", "b", "c"], 3, 60))
        await asyncio.sleep(0)
        applied.note("b", 2)
        applied.note("c", 4)
        await asyncio.sleep(0)
        assert not waiting.done()
        applied.note("b", 3)
        assert await waiting
        assert await applied.wait(["a", "b"], 3, 60)

    run(check)


def test_a_member_that_is_removed_holds_nobody_up():
    async def check(applied):
        first = asyncio.ensure_future(applied.wait(["a"], 1, 60))
        second = asyncio.ensure_future(applied.wait(["a", "b"], 1, 60))
        await asyncio.sleep(0)
        applied.forget("a")
        assert await first
        assert not second.done()
        applied.note("b", 1)
        assert await second
        assert not await applied.wait(["a"], 1, 0.01)  # it would have to apply it again

    run(check)


def test_a_wait_ends_in_time_and_leaves_nothing():
    async def check(applied):
        assert not await applied.wait(["a"], 1, 0.01)
        assert not applied._waits
        applied.note("a", 1)
        assert await applied.wait([], 5, 0.01)

    run(check)
