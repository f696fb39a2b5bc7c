"""Compare rayrpc with torch's own RPC: run each probe on both, and compare the outcomes.

    python tests/differential/compare.py [-k PATTERN] [--verbose]

Exits with 1 if an outcome differs that ``accepted.yaml`` does not name, or if that file names one
that does not differ.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import observed
import probe
import rank
import yaml

HERE = Path(__file__).resolve().parent
sys.path.insert(1, str(HERE.parent))
BACKENDS = ("torch", "rayrpc")
os.environ["RAY_AUTH_MODE"] = "disabled"  # before anything imports Ray
SECONDS = 900.0  # that all probes of a backend may take
END_SECONDS = 30.0  # that rank 1 may take to end after rank 0
NO_OUTCOME = "none: the process ended or hung"


@contextlib.contextmanager
def cluster() -> Iterator[None]:
    """Have a Ray cluster for all probes."""
    import ray
    from nodes import wait_for_nodes

    wait_for_nodes()
    with tempfile.TemporaryDirectory(prefix="rr-", ignore_cleanup_errors=True) as folder:
        os.environ["RAY_TMPDIR"] = folder
        ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
        try:
            os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
            yield
        finally:
            ray.shutdown()


def run_probes(backend: str, probes: list[probe.Probe]) -> dict[str, Any]:
    """Return the outcome of each probe on a backend, by name."""
    outcomes: dict[str, Any] = {}
    for alone in (True, False):
        left = [each.name for each in probes if each.alone is alone]
        while left:
            found = _run_once(backend, left, alone)
            outcomes.update(found)
            left = [name for name in left if name not in found]
            # where they share a process, the first of those that are left ended it
            ended, left = (left, []) if alone else (left[:1], left[1:])
            outcomes.update(dict.fromkeys(ended, NO_OUTCOME))
    return outcomes


def _run_once(backend: str, names: list[str], alone: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="rayrpc-differential-") as folder:
        (Path(folder) / "names").write_text("\n".join(names))
        output = Path(folder) / "outcomes"
        output.touch()
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        command = [sys.executable, str(HERE / "rank.py"), backend]
        rest = [str(port), str(Path(folder) / "names"), str(output)]
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        log = Path(folder) / "log"
        with log.open("w") as file:
            ranks = [
                subprocess.Popen([*command, number, *rest], env=environ, stdout=file, stderr=file)
                for number in (["-1"] if alone else ["0", "1"])
            ]
            end = time.monotonic() + SECONDS
            try:
                for each in ranks:
                    each.wait(max(0.0, end - time.monotonic()))
                    end = time.monotonic() + END_SECONDS
            except subprocess.TimeoutExpired:
                pass
            finally:
                for each in ranks:
                    each.kill()
                    each.wait(10)
        found = dict(json.loads(line) for line in output.read_text().splitlines())
        if len(found) < len(names):
            print(log.read_text()[-4000:], file=sys.stderr)
        return found


def compare(probes: list[probe.Probe], accepted: dict[str, str], verbose: bool) -> int:
    """Run the probes on both backends; print what differs; return how many are not as expected.

    Args:
        probes: to run.
        accepted: by the start of probes' names, why their outcomes may differ.
        verbose: print all outcomes.
    """
    with cluster():
        torchs, ours = (run_probes(backend, probes) for backend in BACKENDS)
    agreeing = bad = 0
    unused = set(accepted)
    for each in probes:
        one, other = torchs[each.name], ours[each.name]
        agrees = observed.agree(one, other, each.words)
        reasons = [start for start in accepted if each.name.startswith(start)]
        agreeing += agrees
        bad += not agrees and not reasons
        if not agrees:
            unused.difference_update(reasons)
        if verbose or not (agrees or reasons):
            print(f"{'agrees' if agrees else 'differs'}: {each.name}")
            print(f"  torch:  {json.dumps(one)[:500]}\n  rayrpc: {json.dumps(other)[:500]}")
            print("".join(f"  accepted: {accepted[start]}\n" for start in reasons), end="")
    for start in sorted(unused):
        if any(each.name.startswith(start) for each in probes):
            print(f"accepted.yaml names {start}, which agrees")
            bad += 1
    print(f"{agreeing} of {len(probes)} agree, {len(probes) - agreeing - bad} accepted, {bad} bad")
    return bad


def main() -> None:
    """Parse the command line and compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-k", default="", metavar="PATTERN", help="only probes with it in a name")
    parser.add_argument("--verbose", action="store_true", help="print all outcomes")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what it started ends with it
    rank.load()
    probes = probe.probes_of(options.k)
    accepted = yaml.safe_load((HERE / "accepted.yaml").read_text()) or {}
    sys.exit(1 if compare(probes, accepted, options.verbose) else 0)


if __name__ == "__main__":
    main()
