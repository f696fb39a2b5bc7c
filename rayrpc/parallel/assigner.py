"""Which model goes to which device of a process: ``machin.parallel.assigner``."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import psutil
import torch
from torch import Tensor, nn

__all__ = ["ModelAssigner", "ModelSizeEstimator"]

logger = logging.getLogger(__name__)

MB = 1024**2


class _Gpu(NamedTuple):
    """A GPU: its free memory in MB, and how busy it is, from 0 to 1."""

    memoryFree: float
    load: float


class GPUtil:
    """What machin uses of the library GPUtil, which is not kept up any more, from torch."""

    @staticmethod
    def getAvailable(order: str = "load") -> list[int]:
        """Return the numbers of the GPUs, the least busy one first."""
        gpus = GPUtil.getGPUs()
        return sorted(range(len(gpus)), key=lambda number: gpus[number].load)

    @staticmethod
    def getGPUs() -> list[Any]:
        """Return all GPUs."""
        found = []
        for number in range(torch.cuda.device_count()):
            free, _ = torch.cuda.mem_get_info(number)
            try:
                load = torch.cuda.utilization(number) / 100
            except (ImportError, RuntimeError):  # it takes nvidia-ml-py
                load = 0.0
            found.append(_Gpu(free / MB, load))
        return found


class ModelSizeEstimator:
    """Estimate how much memory a model takes.

    Args:
        model (nn.Module): its parameters and buffers are counted.
        size_multiplier (float): for what else it needs: inputs, gradients.

    Source: ``machin.parallel.assigner.ModelSizeEstimator``.
    """

    def __init__(self, model: nn.Module, size_multiplier: float = 2) -> None:
        self.model = model
        self.size_multiplier = size_multiplier

    def get_parameter_sizes(self) -> float:
        """Return the size of all parameters in MB."""
        return sum(each.numel() * each.element_size() for each in self.model.parameters()) / MB

    def get_buffer_sizes(self) -> float:
        """Return the size of all buffers in MB."""
        return sum(each.numel() * each.element_size() for each in self.model.buffers()) / MB

    def estimate_size(self) -> float:
        """Return the estimate in MB."""
        return (self.get_parameter_sizes() + self.get_buffer_sizes()) * self.size_multiplier


class ModelAssigner:
    """Assign models to devices, by gradient descent on the probabilities of their places.

    The cost of a placement has four parts, each with a weight: data sent between models on
    devices that are far apart; memory beyond what devices have; computation in other proportions
    than devices have power; and the uncertainty of the probabilities.

    Args:
        models (list[nn.Module]): to assign.
        model_connection (dict): for pairs of indices of models, how much data goes from one to
            the other; positive.
        devices (list[torch.device | str]): to choose from; those that are not there are left out.
            None: all GPUs. If none is left, the CPU.
        model_size_multiplier (float): see ``ModelSizeEstimator``.
        max_mem_ratio (float): how much of a device's free memory may be used.
        cpu_weight (float): the power of the CPU, that of an idle GPU being 1.
        connection_weight, size_match_weight, complexity_match_weight, entropy_weight (float): of
            the four parts.
        iterations (int): of the optimization.
        update_rate (float): its learning rate.
        gpu_gpu_distance, cpu_gpu_distance (float): between devices; positive.
        move_models (bool): move the models to their devices.

    Raises:
        RuntimeError: the models need more memory than there is.

    Source: ``machin.parallel.assigner.ModelAssigner``.
    """

    def __init__(
        self,
        models: list[nn.Module],
        model_connection: dict[tuple[int, int], float],
        devices: list[torch.device | str] | None = None,
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
        places = _available(devices)
        sizes = [ModelSizeEstimator(m, model_size_multiplier).estimate_size() for m in models]
        memory, power = _capacities(places, max_mem_ratio, cpu_weight)
        if sum(sizes) > sum(memory):
            raise RuntimeError(
                f"Estimated model will use {sum(sizes):.2f} MB, but only have {sum(memory):.2f} MB "
                f"allowed memory in total on {[str(place) for place in places]}."
            )
        connections = torch.zeros(len(models), len(models))
        for pair, weight in model_connection.items():
            connections[pair] = weight
        distances = torch.tensor(
            [[_distance(a, b, gpu_gpu_distance, cpu_gpu_distance) for a in places] for b in places],
            dtype=torch.float,
        )
        placement = torch.randn(len(models), len(places), requires_grad=True)
        optimizer = torch.optim.Adam([placement], lr=update_rate)
        model_size = torch.tensor([sizes], dtype=torch.float)
        for _ in range(iterations):
            self.optimize_placement(
                optimizer,
                placement,
                model_size,
                torch.tensor([memory], dtype=torch.float),
                model_size,  # a model takes as much computation as it has parameters
                torch.tensor([power], dtype=torch.float),
                connections,
                distances,
                connection_weight,
                size_match_weight,
                complexity_match_weight,
                entropy_weight,
            )
        self._assignment = [places[index] for index in placement.argmax(1).tolist()]
        if move_models:
            for model, place in zip(models, self._assignment, strict=True):
                model.to(place)

    @property
    def assignment(self) -> list[torch.device]:
        """The device of each model."""
        return self._assignment

    @staticmethod
    def optimize_placement(
        optimizer: Any,
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
            placement (Tensor): ``[n, m]``, logarithms of probabilities, but for a constant.
            model_size, model_complexity (Tensor): ``[1, n]``.
            size_capacity, complexity_capacity (Tensor): ``[1, m]``.
            model_connection (Tensor): ``[n, n]``.
            device_distance (Tensor): ``[m, m]``.
            connection_weight, size_match_weight, complexity_match_weight, entropy_weight (float):
                of the parts of the cost.
        """
        place = placement.softmax(-1)
        apart = place @ _share(device_distance) @ place.T
        apart = apart * (1 - torch.eye(len(place)))
        connection = (_share(model_connection) * apart).mean()
        overflow = (model_size @ place - size_capacity).relu().mean()
        load = _share(model_complexity) @ place
        imbalance = (load - _share(complexity_capacity)).square().mean()
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


def _share(values: Tensor) -> Tensor:
    total = values.sum()
    return values / total if total else values


def _available(devices: list[torch.device | str] | None) -> list[torch.device]:
    gpus = [torch.device("cuda", number) for number in GPUtil.getAvailable(order="load")]
    if devices is None:
        return gpus or [torch.device("cpu")]
    found = []
    for device in map(torch.device, devices):
        if device.type == "cuda" and device not in gpus:
            logger.warning("device %s is not there; no model is assigned to it", device)
        else:
            found.append(device)
    return found or [torch.device("cpu")]


def _capacities(
    devices: list[torch.device], max_mem_ratio: float, cpu_weight: float
) -> tuple[list[float], list[float]]:
    """Return how many MB each device may give, and how much power it has."""
    gpus = GPUtil.getGPUs()
    memory, power = [], []
    for device in devices:
        if device.type == "cpu":
            memory.append(psutil.virtual_memory().available / MB * max_mem_ratio)
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
