"""Models to the devices of this process."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from rayrpc.parallel.assigner.devices import MB, GPUtil, available_memory
from rayrpc.parallel.assigner.placement import PlacementProblem, Weights, optimize_placement

__all__ = ["ModelAssigner", "ModelSizeEstimator"]

logger = logging.getLogger(__name__)


class ModelSizeEstimator:
    """Estimate the memory of a model.

    Args:
        model (nn.Module): its parameters and buffers are counted.
        size_multiplier (float): the estimate is so many times their size, to leave room for
            inputs and gradients.

    Source: ``machin.parallel.assigner.ModelSizeEstimator``.
    """

    def __init__(self, model: nn.Module, size_multiplier: float = 2) -> None:
        self.model = model
        self.size_multiplier = size_multiplier

    def get_parameter_sizes(self) -> float:
        """Return the size of all parameters.

        Returns:
            float: in MB.

        Source: ``machin.parallel.assigner.ModelSizeEstimator.get_parameter_sizes``.
        """
        return sum(each.numel() * each.element_size() for each in self.model.parameters()) / MB

    def get_buffer_sizes(self) -> float:
        """Return the size of all buffers.

        Returns:
            float: in MB.

        Source: ``machin.parallel.assigner.ModelSizeEstimator.get_buffer_sizes``.
        """
        return sum(each.numel() * each.element_size() for each in self.model.buffers()) / MB

    def estimate_size(self) -> float:
        """Return the size of parameters and buffers, times ``size_multiplier``.

        Returns:
            float: in MB.

        Source: ``machin.parallel.assigner.ModelSizeEstimator.estimate_size``.
        """
        return (self.get_parameter_sizes() + self.get_buffer_sizes()) * self.size_multiplier


class ModelAssigner:
    """Assign models to the devices of this process.

    The cost of a placement has four parts, each with a weight: data sent between models on
    devices that are far apart; memory beyond what devices have; computation in other proportions
    than devices have power; and the uncertainty of the probabilities.

    Args:
        models (list[nn.Module]): to assign.
        model_connection (dict[tuple[int, int], float]): by pairs of indices of models, amount of
            data sent from one to the other; positive.
        devices (list[torch.device | str], optional): to choose from; ones that do not exist are
            left out, with a warning.  Default: all GPUs.  If none is left: the CPU.
        model_size_multiplier (float): see ``ModelSizeEstimator``.
        max_mem_ratio (float): share of a device's free memory that may be used, from 0 to 1.
        cpu_weight (float): power of the CPU; that of an idle GPU is 1.
        connection_weight (float): of data sent between devices.
        size_match_weight (float): of memory beyond what devices have.
        complexity_match_weight (float): of computation in other proportions than power.
        entropy_weight (float): of uncertainty.
        iterations (int): steps of the optimizer.
        update_rate (float): its learning rate.
        gpu_gpu_distance (float): between two GPUs; positive.
        cpu_gpu_distance (float): between a GPU and the CPU; positive.
        move_models (bool): move the models to their devices.

    Raises:
        RuntimeError: the models need more memory than the devices have.

    Source: ``machin.parallel.assigner.ModelAssigner``.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        model_connection: Mapping[tuple[int, int], float],
        devices: Sequence[torch.device | str] | None = None,
        model_size_multiplier: float = 2,
        max_mem_ratio: float = 0.5,
        cpu_weight: float = 0,
        connection_weight: float = 2,
        size_match_weight: float = 1e-2,
        complexity_match_weight: float = 1,
        entropy_weight: float = 1,
        iterations: int = 500,
        update_rate: float = 0.01,
        gpu_gpu_distance: float = 1,
        cpu_gpu_distance: float = 10,
        move_models: bool = True,
    ) -> None:
        places = _existing(devices)
        memory, power = _capacities(places, max_mem_ratio, cpu_weight)
        problem = PlacementProblem(
            [ModelSizeEstimator(m, model_size_multiplier).estimate_size() for m in models],
            model_connection,
            [str(place) for place in places],
            memory,
            power,
            [[_distance(a, b, gpu_gpu_distance, cpu_gpu_distance) for a in places] for b in places],
        )
        weights = Weights(
            connection_weight, size_match_weight, complexity_match_weight, entropy_weight
        )
        self._assignment = [places[i] for i in problem.solve(weights, iterations, update_rate)]
        if move_models:
            for model, place in zip(models, self._assignment, strict=True):
                model.to(place)

    @property
    def assignment(self) -> list[torch.device]:
        """The device of each model, in the order of the models.

        Source: ``machin.parallel.assigner.ModelAssigner.assignment``.
        """
        return self._assignment

    optimize_placement = staticmethod(optimize_placement)


def _existing(devices: Sequence[torch.device | str] | None) -> list[torch.device]:
    gpus = [torch.device("cuda", number) for number in GPUtil.getAvailable(order="load")]
    if devices is None:
        return gpus or [torch.device("cpu")]
    found = []
    for device in map(torch.device, devices):
        if device.type == "cuda" and device not in gpus:
            logger.warning("device %s does not exist; no model is assigned to it", device)
        else:
            found.append(device)
    return found or [torch.device("cpu")]


def _capacities(
    devices: list[torch.device], max_mem_ratio: float, cpu_weight: float
) -> tuple[list[float], list[float]]:
    """Return the memory in MB that each device may give, and its power."""
    gpus = GPUtil.getGPUs()
    memory, power = [], []
    for device in devices:
        if device.type == "cpu":
            memory.append(available_memory() * max_mem_ratio)
            power.append(cpu_weight)
        else:
            gpu = gpus[device.index]
            memory.append(gpu.memoryFree * max_mem_ratio)
            power.append(1 - gpu.load)
    return memory, power


def _distance(one: torch.device, other: torch.device, gpu_gpu: float, cpu_gpu: float) -> float:
    if one == other:
        return 0.0
    return gpu_gpu if one.type == other.type else cpu_gpu
