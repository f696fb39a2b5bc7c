"""Run scenarios with many seeds, or show what one seed does.

python tests/simulation/simulate.py                         all scenarios, 1000 seeds each
python tests/simulation/simulate.py connection --seeds 5000-9000
python tests/simulation/simulate.py connection --seed 1829  run it again, shrink it, show it
"""

from __future__ import annotations

import argparse
import collections
import multiprocessing
import os
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))

from simulation.replacing import simulated
from simulation.scenario import run, shrink
from simulation.scenarios import SCENARIOS

BATCH = 50


def main(arguments: list[str]) -> int:
    """Run what the command line says; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help=", ".join(SCENARIOS))
    parser.add_argument("--seeds", type=_seeds, default=range(1000), help="FIRST-LAST, or a count")
    parser.add_argument("--seed", type=int, help="run this one, and show how it fails")
    parser.add_argument("--lines", action="store_true", help="switch threads at any line, too")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    options = parser.parse_args(arguments)
    names = options.scenarios or list(SCENARIOS)
    if options.seed is not None:
        return max(show(name, options.seed, options.lines) for name in names)
    return max(run_all(name, options.seeds, options.lines, options.jobs) for name in names)


def run_all(name: str, seeds: range, lines: bool, jobs: int) -> int:
    """Run a scenario with many seeds; print those that fail, and return the exit status."""
    began = time.monotonic()
    done = steps = 0
    failed: dict[str, list[int]] = collections.defaultdict(list)
    batches = [(name, seeds[i : i + BATCH], lines) for i in range(0, len(seeds), BATCH)]
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        for batch in pool.imap_unordered(_run_batch, batches):
            for seed, count, summary in batch:
                done += 1
                steps += count
                if summary is not None:
                    if not failed[summary]:
                        print(f"\r{name}, seed {seed}: {summary}", flush=True)
                    failed[summary].append(seed)
            if sys.stderr.isatty():
                print(f"\r{name}: {done} of {len(seeds)}", end="", file=sys.stderr, flush=True)
    seconds = time.monotonic() - began
    print(
        f"\r{name}: {done} schedules, {steps} steps in {seconds:.1f} s ({done / seconds:.0f} and "
        f"{steps / seconds:.0f} a second), {sum(map(len, failed.values()))} failed"
    )
    for summary, seeds_of_it in sorted(failed.items(), key=lambda item: -len(item[1])):
        print(f"{len(seeds_of_it):6d}  {summary}: seeds {sorted(seeds_of_it)[:8]}")
    return 1 if failed else 0


def show(name: str, seed: int, lines: bool) -> int:
    """Run a seed, shrink it if it fails, and print what happens; return the exit status."""
    scenario = SCENARIOS[name]
    with simulated():
        result = run(scenario, seed, lines=lines)
        if result.failure is None:
            steps, digest = result.scheduler.steps, result.scheduler.digest
            print(f"{name}, seed {seed}: passes, {steps} steps, checksum {digest:08x}")
            return 0
        print(f"{name}, seed {seed}: {result.failure.summary}", flush=True)
        small = shrink(scenario, seed, result, lines)
    assert small.failure is not None
    switches = len(small.scheduler.choices)
    print(f"shrunk to {small.scheduler.steps} steps and {switches} choices:\n{small.program}")
    print(f"\n{small.failure.summary}\n\n{small.failure.details}")
    return 1


def _run_batch(batch: tuple[str, range, bool]) -> list[tuple[int, int, str | None]]:
    """Return the seeds of a batch, how many steps each took, and how each failed."""
    name, seeds, lines = batch
    found = []
    with simulated():
        for seed in seeds:
            result = run(SCENARIOS[name], seed, lines=lines)
            failure = result.failure
            found.append((seed, result.scheduler.steps, failure and failure.summary))
    return found


def _seeds(text: str) -> range:
    first, dash, last = text.partition("-")
    return range(int(first), int(last) + 1) if dash else range(int(first))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
