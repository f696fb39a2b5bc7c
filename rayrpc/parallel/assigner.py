"""Which model goes to which device of a process, or of the workers of a group.

``ModelAssigner`` is that of ``machin.parallel.assigner``.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import psutil
import torch
from torch import Tensor, nn

from rayrpc import api
from rayrpc._runtime import current
from rayrpc.rref import RRef

__all__ = ["ClusterModelAssigner", "ModelAssigner", "ModelSizeEstimator"]

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
        memory, power = _capacities(places, max_mem_ratio, cpu_weight)
        problem = _Problem(
            [ModelSizeEstimator(m, model_size_multiplier).estimate_size() for m in models],
            model_connection,
            [str(place) for place in places],
            memory,
            power,
            [[_distance(a, b, gpu_gpu_distance, cpu_gpu_distance) for a in places] for b in places],
        )
        weights = (connection_weight, size_match_weight, complexity_match_weight, entropy_weight)
        self._assignment = [places[i] for i in problem.solve(weights, iterations, update_rate)]
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


class _Problem(NamedTuple):
    """What is to be placed, and where it may be.

    Args:
        sizes: of the models in MB.
        connections: between models.
        places: names of the m places.
        memory: of each in MB.
        power: of each.
        distances: ``m * m``.
    """

    sizes: list[float]
    connections: dict[tuple[int, int], float]
    places: list[str]
    memory: list[float]
    power: list[float]
    distances: list[list[float]]

    def solve(
        self, weights: tuple[float, float, float, float], iterations: int, update_rate: float
    ) -> list[int]:
        """Return the index of each model's place.

        Raises:
            RuntimeError: there is not enough memory.
        """
        needed, there = sum(self.sizes), sum(self.memory)
        if needed > there:
            raise RuntimeError(
                f"Estimated model will use {needed:.2f} MB, but only have {there:.2f} MB "
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
            # a model takes as much computation as it has parameters
            ModelAssigner.optimize_placement(
                optimizer,
                placement,
                sizes,
                memory,
                sizes,
                power,
                connections,
                distances,
                *weights,
            )
        found: list[int] = placement.argmax(1).tolist()
        return found


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


# -- over the workers of a group ----------------------------------------------------------------


class _Place(NamedTuple):
    """A device of a worker.

    Args:
        worker (str): its name.
        device (str): as torch calls it there.
        node (str): where the worker is.
        card (str): differs for each piece of hardware.
        memory (float): what is free, in MB.
        load (float): how busy it is, from 0 to 1.
    """

    worker: str
    device: str
    node: str
    card: str
    memory: float
    load: float

    def __str__(self) -> str:
        return f"{self.worker}/{self.device}"

    @property
    def is_cpu(self) -> bool:
        """Whether it is the worker's CPU."""
        return self.device == "cpu"


class ClusterModelAssigner:
    """Assign models to the devices of other workers, as ``ModelAssigner`` does to one's own.

    Each worker is asked what it has: its GPUs, and the memory of its node.  Workers that have the
    same hardware get equal parts of it.

    Args:
        models (list[nn.Module]): to assign.
        model_connection (dict): as for ``ModelAssigner``.
        workers (list[str], optional): to choose from; default: all members of this process's RPC
            group but itself, or itself if it is alone.
        model_size_multiplier, max_mem_ratio, cpu_weight, connection_weight, size_match_weight,
            complexity_match_weight, entropy_weight, iterations, update_rate, gpu_gpu_distance,
            cpu_gpu_distance: as for ``ModelAssigner``.
        worker_distance (float): added between devices of two workers.
        node_distance (float): added, too, if these are on two nodes.
        move_models (bool): send each model to its device; ``models`` are then RRefs of them.

    Raises:
        RuntimeError: the models need more memory than there is; or RPC is not initialized.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        model_connection: dict[tuple[int, int], float],
        workers: Sequence[str] | None = None,
        model_size_multiplier: float = 2,
        max_mem_ratio: float = 0.5,
        cpu_weight: float = 0.1,
        connection_weight: float = 2,
        size_match_weight: float = 1e-2,
        complexity_match_weight: float = 1,
        entropy_weight: float = 1,
        iterations: int = 500,
        update_rate: float = 0.01,
        gpu_gpu_distance: float = 1,
        cpu_gpu_distance: float = 10,
        worker_distance: float = 10,
        node_distance: float = 100,
        move_models: bool = True,
    ) -> None:
        places = _places_of(_others() if workers is None else workers)
        seen_by = Counter(place.card for place in places)

        def distance(one: _Place, other: _Place) -> float:
            if one == other:
                return 0.0
            apart = gpu_gpu_distance if one.is_cpu == other.is_cpu else cpu_gpu_distance
            if one.worker != other.worker:
                apart += worker_distance
            return apart if one.node == other.node else apart + node_distance

        problem = _Problem(
            [ModelSizeEstimator(m, model_size_multiplier).estimate_size() for m in models],
            model_connection,
            [str(place) for place in places],
            [place.memory * max_mem_ratio / seen_by[place.card] for place in places],
            [
                (cpu_weight if place.is_cpu else 1 - place.load) / seen_by[place.card]
                for place in places
            ],
            [[distance(one, other) for one in places] for other in places],
        )
        weights = (connection_weight, size_match_weight, complexity_match_weight, entropy_weight)
        chosen = [places[i] for i in problem.solve(weights, iterations, update_rate)]
        self._assignment = [str(place) for place in chosen]
        self._models: list[RRef[nn.Module]] = []
        if move_models:
            self._models = [
                api.remote(place.worker, _put_on, args=(model, place.device))
                for model, place in zip(models, chosen, strict=True)
            ]

    @property
    def assignment(self) -> list[str]:
        """The place of each model, ``worker/device``, as ``RemoteModule`` takes it."""
        return self._assignment

    @property
    def models(self) -> list[RRef[nn.Module]]:
        """RRefs of the models at their places, if they were moved."""
        return self._models


def _others() -> list[str]:
    agent = current.get_agent()
    names = [info.name for info in agent.get_worker_infos()]
    return sorted(name for name in names if name != agent.info.name) or names


def _places_of(workers: Sequence[str]) -> list[_Place]:
    asked = [(name, api.rpc_async(name, _describe)) for name in workers]
    return [
        _Place(name, *described) for name, future in asked for described in _usable(future.wait())
    ]


def _usable(described: list[Any]) -> list[Any]:
    """Leave a CPU out beside GPUs, as ``ModelAssigner`` does where no devices are given."""
    return described[:-1] or described


def _describe() -> list[tuple[str, str, str, float, float]]:
    """Return this worker's GPUs, and last its CPU, as a ``_Place`` has them, without the name."""
    node = current.get_agent().member.node
    found = []
    for number, gpu in enumerate(GPUtil.getGPUs()):
        card = f"{node}/{torch.cuda.get_device_properties(number).uuid}"
        found.append((f"cuda:{number}", node, card, gpu.memoryFree, gpu.load))
    found.append(("cpu", node, node, psutil.virtual_memory().available / MB, 0.0))
    return found


def _put_on(model: nn.Module, device: str) -> nn.Module:
    return model.to(device)
