"""Devices of this process: their free memory, and how busy they are."""

from __future__ import annotations

from typing import NamedTuple

import psutil
import torch

__all__ = ["GPUtil", "Gpu", "MB", "available_memory"]

MB = 1024**2


class Gpu(NamedTuple):
    """A GPU, with the attributes that the library GPUtil gives it.

    Args:
        memoryFree (float): in MB.
        load (float): from 0, idle, to 1.
    """

    memoryFree: float
    load: float


class GPUtil:
    """List GPUs by torch, as machin does by the library GPUtil, which is no longer maintained.

    Source: ``GPUtil``.
    """

    @staticmethod
    def getAvailable(order: str = "load") -> list[int]:
        """Return the numbers of the GPUs.

        Args:
            order (str): accepted for GPUtil's sake.

        Returns:
            list[int]: the least busy first.

        Source: ``GPUtil.getAvailable``.
        """
        gpus = GPUtil.getGPUs()
        return sorted(range(len(gpus)), key=lambda number: gpus[number].load)

    @staticmethod
    def getGPUs() -> list[Gpu]:
        """Return all GPUs, by number.

        Source: ``GPUtil.getGPUs``.
        """
        found = []
        for number in range(torch.cuda.device_count()):
            free, _ = torch.cuda.mem_get_info(number)
            try:
                load = torch.cuda.utilization(number) / 100
            except (ImportError, RuntimeError):  # it needs nvidia-ml-py
                load = 0.0
            found.append(Gpu(free / MB, load))
        return found


def available_memory() -> float:
    """Return the memory of this machine that is available, in MB."""
    return float(psutil.virtual_memory().available / MB)
