"""Models to the devices of the workers of an RPC group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from rayrpc import api
from rayrpc._runtime import current
from rayrpc.parallel.assigner.devices import GPUtil, available_memory
from rayrpc.parallel.assigner.model_assigner import ModelSizeEstimator
from rayrpc.parallel.assigner.placement import PlacementProblem, Weights
from rayrpc.rref_proxy import RRef

__all__ = ["ClusterModelAssigner"]

_Description = tuple[str, str, str, float, float]  # the fields of a _Place, without the worker


class _Place(NamedTuple):
    """A device of a worker.

    Args:
        worker (str): name of the worker.
        device (str): torch's name of the device in the worker.
        node (str): id of the worker's node.
        card (str): id of the hardware; workers may share it.
        memory (float): that is free, in MB.
        load (float): from 0, idle, to 1.
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
    """Assign models to the devices of other workers.

    Each worker reports its GPUs, or its CPU if it has none, and their free memory.  Workers that
    share hardware get equal parts of it.

    Args:
        models (list[nn.Module]): to assign.
        model_connection (dict[tuple[int, int], float]): as for ``ModelAssigner``.
        workers (list[str], optional): to choose from; default: all members of this process's RPC
            group except itself, or itself if it is alone.
        model_size_multiplier, max_mem_ratio, cpu_weight: as for ``ModelAssigner``.
        connection_weight, size_match_weight, complexity_match_weight: as for ``ModelAssigner``.
        entropy_weight, iterations, update_rate: as for ``ModelAssigner``.
        gpu_gpu_distance, cpu_gpu_distance: as for ``ModelAssigner``.
        worker_distance (float): added between devices of two workers.
        node_distance (float): added if these are on two nodes.
        move_models (bool): send each model to its device, and keep RRefs of them in ``models``.

    Raises:
        RuntimeError: the models need more memory than the devices have, or RPC is not initialized.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        model_connection: Mapping[tuple[int, int], float],
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
        places = _find_places(_other_workers() if workers is None else workers)
        sharers = Counter(place.card for place in places)

        def distance(one: _Place, other: _Place) -> float:
            if one == other:
                return 0.0
            apart = gpu_gpu_distance if one.is_cpu == other.is_cpu else cpu_gpu_distance
            if one.worker != other.worker:
                apart += worker_distance
            return apart if one.node == other.node else apart + node_distance

        problem = PlacementProblem(
            [ModelSizeEstimator(m, model_size_multiplier).estimate_size() for m in models],
            model_connection,
            [str(place) for place in places],
            [place.memory * max_mem_ratio / sharers[place.card] for place in places],
            [
                (cpu_weight if place.is_cpu else 1 - place.load) / sharers[place.card]
                for place in places
            ],
            [[distance(one, other) for one in places] for other in places],
        )
        weights = Weights(
            connection_weight, size_match_weight, complexity_match_weight, entropy_weight
        )
        chosen = [places[i] for i in problem.solve(weights, iterations, update_rate)]
        self._assignment = [str(place) for place in chosen]
        self._models: list[RRef[nn.Module]] = []
        if move_models:
            self._models = [
                api.remote(place.worker, _move_to, args=(model, place.device))
                for model, place in zip(models, chosen, strict=True)
            ]

    @property
    def assignment(self) -> list[str]:
        """The place of each model, as ``worker/device``, which ``RemoteModule`` accepts."""
        return self._assignment

    @property
    def models(self) -> list[RRef[nn.Module]]:
        """RRefs of the models at their places; none unless ``move_models``."""
        return self._models


def _other_workers() -> list[str]:
    agent = current.get_agent()
    names = [info.name for info in agent.get_worker_infos()]
    return sorted(name for name in names if name != agent.info.name) or names


def _find_places(workers: Sequence[str]) -> list[_Place]:
    futures = [(name, api.rpc_async(name, _describe_devices)) for name in workers]
    return [
        _Place(name, *description)
        for name, future in futures
        for description in _select_usable(future.wait())
    ]


def _select_usable(descriptions: list[_Description]) -> list[_Description]:
    """Drop the CPU of a worker with GPUs, as ``ModelAssigner`` does by default."""
    return descriptions[:-1] or descriptions


def _describe_devices() -> list[_Description]:
    """Return this worker's GPUs, and last its CPU."""
    node = current.get_agent().member.node
    found: list[_Description] = []
    for number, gpu in enumerate(GPUtil.getGPUs()):
        card = f"{node}/{torch.cuda.get_device_properties(number).uuid}"
        found.append((f"cuda:{number}", node, card, gpu.memoryFree, gpu.load))
    found.append(("cpu", node, node, available_memory(), 0.0))
    return found


def _move_to(model: nn.Module, device: str) -> nn.Module:
    return model.to(device)
