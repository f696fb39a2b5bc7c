"""What workers have loaded when their processes start, on a cluster that forks them."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

from rayrpc._transports.ray import worker_forks
from rayrpc._transports.ray.cluster import through_client
from rayrpc._transports.ray.local_lease import fork_server

__all__ = ["load_torch", "needed", "torch_loaded"]

# How the names of variables begin that torch, and what it loads, read at that time.
_READ_AT_LOAD = (
    "ATEN_",
    "DNNL_",
    "GOMP_",
    "KMP_",
    "MKL_",
    "OMP_",
    "ONEDNN_",
    "OPENBLAS_",
    "PYTORCH_",
    "TORCH",
)
# What every worker loads; nothing of it loads Ray, nor looks at the process that it is in.
_MODULES = ("torch", "rayrpc.startup", "rayrpc._transports.direct.transport")
# What many programs load; it takes two thirds of torch's own time.
_LATER = ("torch.distributed.optim",)


@contextlib.contextmanager
def torch_loaded(environ: Mapping[str, str]) -> Iterator[None]:
    """Have workers that start within the block find torch loaded, where their cluster forks them.

    Args:
        environ (Mapping[str, str]): of the workers' program.
    """
    import ray  # which `rayrpc run` loads later

    path = fork_server()
    if path is None or through_client():
        yield
        return
    context = ray.get_runtime_context()
    with worker_forks.loaded(path, needed(environ), context.gcs_address, context.get_job_id()):
        yield


def load_torch(path: Path, environ: Mapping[str, str], seconds: float = 0.0) -> bool:
    """Have a local cluster load torch before there are workers.

    Args:
        path (Path): of the socket of its fork server.
        environ (Mapping[str, str]): of the workers' program.
        seconds (float): how long to wait until it is loaded.

    Returns:
        Whether it is.
    """
    return worker_forks.load(path, needed(environ), seconds)


def needed(environ: Mapping[str, str]) -> worker_forks.Load:
    """Return what the workers of a program need loaded.

    A process that has loaded it is of use to a program that needs the same: with the same
    environment, as far as torch reads it when it is loaded, and the same code of torch and rayrpc.

    Args:
        environ (Mapping[str, str]): of the workers' program.
    """
    package = Path(__file__).parents[1]
    changed = max(path.stat().st_mtime for path in package.rglob("*.py"))
    files = {"rayrpc": str(package / "__init__.py")}
    torch = importlib.util.find_spec("torch")
    if torch is not None and torch.origin is not None:
        files["torch"] = torch.origin
    return worker_forks.Load(
        modules=_MODULES,
        later=_LATER,
        files=files,
        version=f"{metadata.version('torch')} {changed}",
        environ={name: environ[name] for name in environ if name.startswith(_READ_AT_LOAD)},
        read=_READ_AT_LOAD,
    )
