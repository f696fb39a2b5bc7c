"""A group of three processes, two workers and this one, in which tests make servers."""

from contextlib import contextmanager

import torch
from torch import nn

import rayrpc as rpc
from rayrpc.parallel.distributed import World, get_world, is_world_initialized

MEMBERS = ["alice", "bob", "driver"]
# The servers of this process, by the names that tests give them.
servers = {}


def everywhere(func, *args):
    """Call a function in all processes at the same time."""
    calls = [rpc.rpc_async(name, func, args=args, timeout=60) for name in MEMBERS]
    return [call.wait() for call in calls]


def world():
    found = get_world()
    assert found is not None
    return found


def here():
    """Return the group, in any of its processes."""
    return world().groups["servers"]


def _enter():
    if not is_world_initialized():
        World(rpc.get_worker_info().name, init_rpc=False, init_dist=False)
    world().create_rpc_group("servers", MEMBERS)


def _leave():
    for server in servers.values():
        getattr(server, "stop", lambda: None)()
    servers.clear()
    world().stop()


@contextmanager
def server_group():
    """Create the group in all processes; stop the servers in it at the end."""
    everywhere(_enter)
    yield here()
    for name in MEMBERS:
        rpc.rpc_sync(name, _leave)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(1, 1, bias=False)
        self.two = nn.Linear(1, 1, bias=False)
        with torch.no_grad():
            self.one.weight.fill_(1)
            self.two.weight.fill_(2)

    def forward(self, x):
        return self.two(self.one(x))

    def weights(self):
        return self.one.weight.item(), self.two.weight.item()
