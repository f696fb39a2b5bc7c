"""A process of the differential suite: runs probes on one backend, one JSON line for each outcome.

``rank.py BACKEND RANK PORT NAMES OUTPUT``: ranks 0 and 1 are a group, "worker0" and "worker1",
and rank 0 runs the probes whose names are the lines of the file NAMES. Rank -1 makes no group, and
runs each probe in a fork of its own.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import pkgutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from probe import Probe

HERE = Path(__file__).resolve().parent
SECONDS = 30.0  # that one probe may take
CALL_SECONDS = 5.0  # that one call may take


def load() -> dict[str, Probe]:
    """Import the files of probes; return all probes by name."""
    import probe

    for module in pkgutil.iter_modules([str(HERE / "probes")]):
        importlib.import_module(f"probes.{module.name}")
    return probe.PROBES


def run(probe: Probe, output: str) -> None:
    """Run a probe, and add its outcome to the file ``output``."""
    import observed

    faulthandler.dump_traceback_later(SECONDS, exit=True)
    result: Any
    try:
        result = observed.describe(probe.run())
    except BaseException as exc:
        result = observed.describe_error(exc)
    faulthandler.cancel_dump_traceback_later()
    with open(output, "a") as file:
        file.write(json.dumps([probe.name, result]) + "\n")


def time_out_once(rpc: Any) -> Any:
    """Return an RRef whose creation has timed out, to be kept as long as probes run.

    When the creation of any RRef times out, torch notes it in the first RRef of the process to
    which that happened (``RRef::handleError`` has a static lambda that holds ``this``): without
    this one, the outcomes of probes would depend on which of them comes first.
    """
    rref = rpc.remote("worker1", time.sleep, (0.3,), timeout=0.05)
    with contextlib.suppress(RuntimeError):
        rref._get_future().wait()
    time.sleep(0.3)
    return rref


def main() -> None:
    """Run the probes that the command line names."""
    backend, rank, port, names, output = sys.argv[1:]
    sys.path.insert(0, str(HERE))
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=port)
    if backend == "rayrpc":
        import rayrpc

        rayrpc.install()
    from torch.distributed import rpc

    known = load()
    probes = [known[name] for name in Path(names).read_text().splitlines()]
    if rank == "-1":
        for number, probe in enumerate(probes, int(port)):
            if (child := os.fork()) == 0:
                # a port of its own: the probe before may have left its group as it was
                os.environ["MASTER_PORT"] = str(1024 + number % 60000)
                run(probe, output)
                os._exit(0)
            os.waitpid(child, 0)
        return
    options = rpc.TensorPipeRpcBackendOptions(rpc_timeout=CALL_SECONDS)
    faulthandler.dump_traceback_later(2 * SECONDS, exit=True)
    rpc.init_rpc(f"worker{rank}", rank=int(rank), world_size=2, rpc_backend_options=options)
    faulthandler.cancel_dump_traceback_later()
    if rank == "0":
        _timed_out = time_out_once(rpc)
        for probe in probes:
            run(probe, output)
        # a probe may have left a call open; rank 1 serves probes until rank 0 has ended
        faulthandler.dump_traceback_later(SECONDS, exit=True)
    rpc.shutdown()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
