"""The copies of modules on workers: when a module is sent, what changes it; no worker."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from rayrpc._jit import module_copies
from rayrpc._jit.module_copies import ModuleCopies
from rayrpc._runtime import current

CHANGES = [
    lambda m: m[0].weight.data.add_(1),
    lambda m: m[0].weight.requires_grad_(False),
    lambda m: m[1].running_mean.add_(1),
    lambda m: m.eval(),
    lambda m: setattr(m[0], "scale", 2.0),
    lambda m: m.append(nn.ReLU()),
]


@pytest.fixture
def sent_to(monkeypatch):
    """Return the workers that modules were sent to."""
    sent = []

    def remote(member, invocation, timeout):
        sent.append(member.token)
        return SimpleNamespace(local_value=invocation)

    agent = SimpleNamespace(
        lookup=lambda name: SimpleNamespace(token=name),
        caller=SimpleNamespace(remote=remote),
        default_timeout=None,
    )
    monkeypatch.setattr(current, "get_agent", lambda: agent)
    return sent


def test_a_module_is_sent_to_each_worker_once(sent_to):
    copies, module = ModuleCopies(), nn.Linear(3, 2)
    rrefs = [copies.at(name, module) for name in ("fork-0", "fork-1") * 2]
    assert rrefs[:2] == rrefs[2:] and rrefs[0] is not rrefs[1]
    assert rrefs[0].local_value() is module
    assert sent_to == ["fork-0", "fork-1"]


def test_a_changed_module_is_sent_again(sent_to):
    copies, module = ModuleCopies(), nn.Linear(3, 2)
    first = copies.at("fork-0", module)
    module.weight.data.mul_(2)
    assert copies.at("fork-0", module) is not first


@pytest.mark.parametrize("change", CHANGES)
def test_a_fingerprint_shows_every_change(change):
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    before = module_copies._fingerprint(module)
    assert module_copies._fingerprint(module) == before
    change(module)
    assert module_copies._fingerprint(module) != before


@pytest.mark.parametrize(
    "tensor",
    [torch.rand(3, 2), torch.rand(5).half(), torch.empty(0), torch.rand(4, 2).t()],
    ids=["floats", "halves", "empty", "strided"],
)
def test_a_checksum_is_that_of_the_same_bytes(tensor):
    assert module_copies._checksum(tensor) == module_copies._checksum(tensor)
