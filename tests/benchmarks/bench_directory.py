"""Time the directory of a group with as many members as no machine here could run.

    python tests/benchmarks/bench_directory.py [--members 64 256 1000] [--quiet-seconds N]

The directory is the actor that programs have; this process calls it as each of the members would.
``cpu`` is the processor time of the directory's process.
"""

from __future__ import annotations

import argparse
import asyncio
import pickle
import time
import uuid
from typing import Any

import ray

from rayrpc._protocol.membership import Member
from rayrpc._protocol.origin import Origin
from rayrpc._transports.ray.directory import DirectoryActor
from rayrpc._transports.ray.directory_answers import SharedSnapshot

NAMESPACE = "bench-directory"
PEER_TIMEOUT = 10.0  # the default one


class Endpoints:
    """All members' endpoints: none of them ends."""

    async def watch(self, token: str) -> None:
        """Wait for the end of a membership."""
        await asyncio.Event().wait()


class Address:
    """The address of a member."""

    def find(self) -> Any:
        """Return its endpoint."""
        return ray.get_actor("endpoints", namespace=NAMESPACE)


class Directory:
    """A directory, and what it has cost.

    Args:
        members (int): so many join.
    """

    def __init__(self, members: int) -> None:
        actor: Any = ray.remote(DirectoryActor)
        key = uuid.uuid4().hex
        self.actor = actor.options(num_cpus=0, max_concurrency=100_000).remote(key, PEER_TIMEOUT)
        node = ray.get(self.actor.ready.remote())
        self.members = [
            Member(
                *(f"token-{rank}", f"worker-{rank}", rank, members, Address()),
                node=node,
                main="/home/someone/program/train.py 0123456789abcdef",
                origin=Origin(),
            )
            for rank in range(members)
        ]

    def cpu(self) -> float:
        """Return the processor time of its process so far, in seconds."""
        return float(ray.get(self.actor.__ray_call__.remote(lambda self: time.process_time())))

    async def measure(self, what: str, awaitable: Any) -> Any:
        """Await something; print how long it took."""
        cpu, begin = self.cpu(), time.perf_counter()
        result = await awaitable
        seconds = time.perf_counter() - begin
        print(f"  {what:22} {seconds:8.2f} s  {self.cpu() - cpu:8.2f} s cpu", flush=True)
        return result

    async def run(self, quiet_seconds: float) -> None:
        """Have all join, be quiet, lose one, meet at a barrier and leave."""
        actor, tokens = self.actor, [each.token for each in self.members]
        answers = await self.measure(
            "all join", asyncio.gather(*(actor.join.remote(each) for each in self.members))
        )
        first = answers[0]
        size = sum(len(pickle.dumps(each, protocol=5)) for each in answers[:1]) * len(answers)
        if isinstance(first, SharedSnapshot):
            found = ray.get(first.members)
            size += len(pickle.dumps(found, protocol=5))
            first = first.snapshot
        print(f"  {'answers to joins':22} {size / 1e6:8.1f} MB")
        versions = dict.fromkeys(tokens, first.version)
        count = 0

        async def follow(token: str) -> None:
            nonlocal count
            while True:
                changes = await actor.poll.remote(token, versions[token])
                count += 1
                if not isinstance(changes, list):
                    return
                if changes:
                    versions[token] = changes[-1].version

        followers = [asyncio.ensure_future(follow(token)) for token in tokens]
        await self.measure(f"{quiet_seconds:g} s of quiet", asyncio.sleep(quiet_seconds))
        print(f"  {'polls a second':22} {count / quiet_seconds:8.0f}")

        async def lose() -> None:
            await actor.expel.remote(tokens[-1], "it was killed")
            while any(versions[token] == first.version for token in tokens[:-1]):
                await asyncio.sleep(0.001)

        await self.measure("a death reaches all", lose())
        left = tokens[:-1]
        barrier = (actor.sync.remote("join-0-0", token, (1, 1)) for token in left)
        await self.measure("a barrier", asyncio.gather(*barrier))
        # without members, the directory would end
        leaves = (actor.leave.remote(token) for token in left[1:])
        await self.measure("all but one leave", asyncio.gather(*leaves))
        await asyncio.gather(*followers[1:])
        followers[0].cancel()


async def run_all(members: list[int], quiet_seconds: float) -> None:
    """Measure directories one after the other."""
    for count in members:
        directory = Directory(count)
        print(f"{count} members")
        await directory.run(quiet_seconds)
        ray.kill(directory.actor)


def main() -> None:
    """Read the options, and run."""
    parser = argparse.ArgumentParser(description="The cost of a directory, by its members.")
    parser.add_argument("--members", type=int, nargs="+", default=[64, 256, 1000])
    parser.add_argument("--quiet-seconds", type=float, default=10.0)
    options = parser.parse_args()
    ray.init(num_cpus=2, namespace=NAMESPACE, include_dashboard=False, log_to_driver=False)
    endpoints: Any = ray.remote(Endpoints)
    kept = endpoints.options(name="endpoints", num_cpus=0, max_concurrency=100_000).remote()
    try:
        asyncio.run(run_all(options.members, options.quiet_seconds))
    finally:
        del kept
        ray.shutdown()


if __name__ == "__main__":
    main()
