"""Two workers, started by hand in two terminals, that call each other by name.

Shows the smallest complete program: join a group (``init_rpc``), call a function on another
worker and wait (``rpc_sync``), call it without waiting and chain work onto the result
(``rpc_async`` and ``then``), make an object on the other worker and use it from this one
(``remote`` and its ``RRef``), leave the group (``shutdown``).

Terminal 1::

    rayrpc run examples/hello.py --rank 0 --world-size 2

Terminal 2::

    rayrpc run examples/hello.py --rank 1 --world-size 2

The program is plain ``torch.distributed.rpc``: ``python examples/hello.py ...`` runs it on
stock torch. ``MASTER_ADDR`` and ``MASTER_PORT``, the same in both terminals, name the group.
"""

from __future__ import annotations

import argparse
import os
import socket

import torch
import torch.distributed.rpc as rpc


def greet(guest: str) -> str:
    """Runs on the worker that is called, so it reports that worker's name and process."""
    me = rpc.get_worker_info().name
    return f"hello {guest}, this is {me} (process {os.getpid()} on {socket.gethostname()})"


class Counter:
    """Lives on one worker; the others hold references to it."""

    def __init__(self, start: int) -> None:
        self.value = start

    def add(self, amount: int) -> int:
        self.value += amount
        return self.value


def say_hello(me: str, peer: str) -> None:
    print("rpc_sync: ", rpc.rpc_sync(peer, greet, args=(me,)))

    # The call is on its way while this process goes on; then() runs when its result is here.
    total = rpc.rpc_async(peer, torch.add, args=(torch.ones(3), 1))
    scaled = total.then(lambda done: done.wait() * 10)
    print("rpc_async:", scaled.wait().tolist())

    # remote() makes the counter on the peer and returns a reference to it at once.
    counter = rpc.remote(peer, Counter, args=(40,))
    counter.rpc_sync().add(1)
    print("remote:   ", f"counter on {counter.owner_name()} is", counter.rpc_sync().add(1))
    # to_here() brings a copy of the value over: adding to it leaves the peer's counter alone.
    copy = counter.to_here()
    copy.add(1000)
    print("to_here:  ", f"copy is {copy.value}, original is", counter.rpc_sync().add(0))


def main() -> None:
    parser = argparse.ArgumentParser(description="Two workers that call each other by name.")
    parser.add_argument("--rank", type=int, required=True, help="0 calls, 1 answers")
    parser.add_argument("--world-size", type=int, default=2)
    args = parser.parse_args()
    if args.world_size < 2 or not 0 <= args.rank < args.world_size:
        parser.error("--world-size must be at least 2 and --rank below it")
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29510")

    me = f"worker{args.rank}"
    print(f"{me}: waiting for all {args.world_size} workers", flush=True)
    rpc.init_rpc(me, rank=args.rank, world_size=args.world_size)
    if args.rank == 0:
        say_hello(me, peer="worker1")
    # Graceful: waits until every worker is done, and serves the others' calls until then.
    rpc.shutdown()
    print(f"{me}: done")


if __name__ == "__main__":
    main()
