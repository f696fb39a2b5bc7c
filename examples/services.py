"""Values and services by name: a caller does not need to know which process has them.

"shop" pairs its stock as a value and registers a service that sells; "bank" registers one that
takes payments, and is called by the shop. Two customers buy by the services' names alone, at the
same time, until nothing is left. Then the shop closes, and the bank answers in its place: a call by
name is the same, whoever has the service.

Run::

    rayrpc run examples/services.py

The program has the API of ``machin.parallel``. The exit status is 1 if the accounts do not add up.
"""

from __future__ import annotations

import argparse
import threading

import torch.multiprocessing as mp

from rayrpc.parallel.distributed import RpcGroup, World

NAMES = ["bank", "customer0", "customer1", "shop"]
PRICES = {"apple": 2, "melon": 7}


class Shop:
    def __init__(self, group: RpcGroup, stock: dict[str, int]) -> None:
        self.group = group
        self.stock = stock
        self.lock = threading.Lock()

    def sell(self, buyer: str, item: str) -> int:
        """Return the price paid, 0 if nothing is left."""
        with self.lock:
            if not self.stock[item]:
                return 0
            self.stock[item] -= 1
        self.group.registered_sync("pay", args=(buyer, PRICES[item]))
        return PRICES[item]

    def left(self) -> dict[str, int]:
        return self.stock


class Bank:
    def __init__(self) -> None:
        self.spent: dict[str, int] = {}
        self.lock = threading.Lock()

    def pay(self, buyer: str, amount: int) -> None:
        with self.lock:
            self.spent[buyer] = self.spent.get(buyer, 0) + amount


def closed(buyer: str, item: str) -> int:
    return 0


def buy(group: RpcGroup, name: str, item: str) -> int:
    """Buy until nothing is left; return what was spent."""
    spent = 0
    while True:
        orders = [group.registered_async("sell", args=(name, item)) for _ in range(4)]
        paid: int = sum(order.wait() for order in orders)
        spent += paid
        if paid < 4 * PRICES[item]:
            return spent


def run(rank: int, args: argparse.Namespace) -> None:
    name = NAMES[rank]
    world = World(
        name, rank, len(NAMES), init_dist=False, rpc_init_method=f"tcp://localhost:{args.port}"
    )
    group = world.create_rpc_group("market", NAMES)
    bank, shop = Bank(), Shop(group, {"apple": args.stock, "melon": args.stock})
    if name == "bank":
        group.register("pay", bank.pay)
    elif name == "shop":
        group.register("sell", shop.sell)
        group.pair("shop", shop)
    group.barrier()  # all is there

    if name.startswith("customer"):
        spent = buy(group, name, list(PRICES)[rank - 1])
        print(f"{name} spent {spent}")
        group.pair(f"spent by {name}", spent)
    group.barrier()  # all is sold
    if name == "shop":
        group.deregister("sell")
    group.barrier()
    if name == "bank":
        group.register("sell", closed)
    group.barrier()

    if name.startswith("customer"):
        assert group.registered_sync("sell", args=(name, "apple")) == 0
    if name == "bank":
        paid = {each: group.get_paired(f"spent by {each}").to_here() for each in NAMES[1:3]}
        left = group.get_paired("shop").rpc_sync().left()
        print(f"left in the shop: {left}; booked: {dict(sorted(bank.spent.items()))}")
        if paid != bank.spent or any(left.values()):
            raise RuntimeError(f"customers paid {paid}, but {bank.spent} was booked")
    group.barrier()
    world.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description="Values and services by name.")
    parser.add_argument("--stock", type=int, default=40, help="of each item")
    parser.add_argument("--port", type=int, default=9101)
    args = parser.parse_args()
    mp.spawn(run, args=(args,), nprocs=len(NAMES))


if __name__ == "__main__":
    main()
