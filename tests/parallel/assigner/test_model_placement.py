"""The optimization of placements."""

import torch

from rayrpc.parallel.assigner import ModelAssigner


def test_one_step_lowers_the_cost_of_a_bad_placement():
    placement = torch.tensor([[2.0, -2.0], [2.0, -2.0]], requires_grad=True)
    optimizer = torch.optim.SGD([placement], lr=1.0)
    ones = torch.ones(1, 2)
    before = placement.softmax(-1)[:, 0].sum().item()
    ModelAssigner.optimize_placement(
        optimizer,
        placement,
        ones,
        ones * 10,
        ones,
        ones,
        torch.zeros(2, 2),
        torch.zeros(2, 2),
        *(0.0, 0.0, 1.0, 0.0),
    )
    assert placement.softmax(-1)[:, 0].sum().item() < before
