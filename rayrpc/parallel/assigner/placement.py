"""Where to place models: numbers in, the index of each model's place out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["PlacementProblem", "Weights", "optimize_placement"]


class Weights(NamedTuple):
    """Weights of the parts of the cost; see ``ModelAssigner``."""

    connection: float
    size_match: float
    complexity_match: float
    entropy: float


class PlacementProblem(NamedTuple):
    """``n`` models to place on ``m`` places.

    Args:
        sizes (list[float]): of the models, in MB.
        connections (dict[tuple[int, int], float]): data sent between pairs of models.
        places (list[str]): names of the places.
        memory (list[float]): of each place, in MB.
        power (list[float]): of each place, relative to one another.
        distances (list[list[float]]): between places, ``m`` by ``m``.
    """

    sizes: list[float]
    connections: Mapping[tuple[int, int], float]
    places: list[str]
    memory: list[float]
    power: list[float]
    distances: list[list[float]]

    def solve(self, weights: Weights, iterations: int, update_rate: float) -> list[int]:
        """Return the index of each model's place.

        Args:
            weights (Weights): of the cost.
            iterations (int): steps of the optimizer.
            update_rate (float): its learning rate.

        Raises:
            RuntimeError: the models need more memory than the places have together.
        """
        needed, available = sum(self.sizes), sum(self.memory)
        if needed > available:
            raise RuntimeError(
                f"Estimated model will use {needed:.2f} MB, but only have {available:.2f} MB "
                f"allowed memory in total on {self.places}."
            )
        models = len(self.sizes)
        connections = torch.zeros(models, models)
        for pair, weight in self.connections.items():
            connections[pair] = weight
        distances = torch.tensor(self.distances, dtype=torch.float)
        placement = torch.randn(models, len(self.places), requires_grad=True)
        optimizer = torch.optim.Adam([placement], lr=update_rate)
        sizes = torch.tensor([self.sizes], dtype=torch.float)
        memory = torch.tensor([self.memory], dtype=torch.float)
        power = torch.tensor([self.power], dtype=torch.float)
        for _ in range(iterations):
            optimize_placement(
                optimizer,
                placement,
                sizes,
                memory,
                sizes,  # a model takes as much computation as it has parameters
                power,
                connections,
                distances,
                *weights,
            )
        found: list[int] = placement.argmax(1).tolist()
        return found


def optimize_placement(
    optimizer: Optimizer,
    placement: Tensor,
    model_size: Tensor,
    size_capacity: Tensor,
    model_complexity: Tensor,
    complexity_capacity: Tensor,
    model_connection: Tensor,
    device_distance: Tensor,
    connection_weight: float,
    size_match_weight: float,
    complexity_match_weight: float,
    entropy_weight: float,
) -> None:
    """Take one step of the optimization, for n models and m devices.

    Args:
        optimizer (Optimizer): of ``placement``.
        placement (Tensor): ``[n, m]``, logarithms of probabilities up to a constant of each model;
            changed in place.
        model_size (Tensor): ``[1, n]``, in MB.
        size_capacity (Tensor): ``[1, m]``, in MB.
        model_complexity (Tensor): ``[1, n]``, computation relative to one another.
        complexity_capacity (Tensor): ``[1, m]``, power relative to one another.
        model_connection (Tensor): ``[n, n]``, data relative to one another.
        device_distance (Tensor): ``[m, m]``, relative to one another.
        connection_weight (float): of data sent over distances.
        size_match_weight (float): of memory beyond the capacity.
        complexity_match_weight (float): of computation in other proportions than power.
        entropy_weight (float): of the uncertainty of ``placement``.

    Source: ``machin.parallel.assigner.ModelAssigner.optimize_placement``.
    """
    place = placement.softmax(-1)
    apart = place @ _normalize(device_distance) @ place.T
    apart = apart * (1 - torch.eye(len(place)))
    connection = (_normalize(model_connection) * apart).mean()
    overflow = (model_size @ place - size_capacity).relu().mean()
    load = _normalize(model_complexity) @ place
    imbalance = (load - _normalize(complexity_capacity)).square().mean()
    entropy = -torch.special.xlogy(place, place).sum(-1).mean()
    cost = (
        connection * connection_weight
        + overflow * size_match_weight
        + imbalance * complexity_match_weight
        + entropy * entropy_weight
    )
    optimizer.zero_grad()
    cost.backward()
    optimizer.step()


def _normalize(values: Tensor) -> Tensor:
    """Scale values to a sum of 1; leave them if it is 0."""
    total = values.sum()
    return values / total if total else values
