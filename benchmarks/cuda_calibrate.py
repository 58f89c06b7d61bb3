"""Calibrate twelve jobs on a CUDA device under two limits, beside searches by trying.

    python benchmarks/cuda_calibrate.py --minutes 8
    python benchmarks/cuda_calibrate.py --read benchmarks/results/calibration_cuda.json

For each job and limit: what batchfit answered, with how many runs, seconds and out-of-memory errors
(OOMs); the true largest batch; and what accelerate's decorator (the package itself where it is
installed, else its rule), the algorithm of Lightning's BatchSizeFinder (double, then bisect) and
plain bisection up to a cap would have cost. Whether one batch runs is measured once and shared, so
that the searches cost the device nothing twice; each is charged the seconds of every run it asks.

One process per job and limit, so that a crash costs one; the result is rewritten after each; jobs
that the time does not reach are listed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks")]

from calibration_jobs import JOBS  # noqa: E402

from batchfit.calibration import ProbeOptions, calibrate, find_meter  # noqa: E402
from batchfit.calibration.job import Job  # noqa: E402
from batchfit.calibration.probes import run_probe  # noqa: E402
from batchfit.calibration.search import Search, bisection, doubling, halving  # noqa: E402
from batchfit.estimator.units import parse_bytes  # noqa: E402

RESULT = ROOT / "benchmarks" / "results" / "calibration_cuda.json"
CAP = 4096
QUICK = ProbeOptions(warm_up=2, repeats=1, patience=5.0)
#: Seconds for one job under one limit; a probe takes some tenths of a second there.
TIMEOUT = 120


class Trials:
    """Whether batches run under a limit; each is tried once, and its seconds are kept."""

    def __init__(self, name: str, device: str, limit: int) -> None:
        self._meter = find_meter(device, limit)
        self._job = Job(JOBS[name], self._meter.device, ())
        self._limit = limit
        self.known: dict[int, tuple[bool, float]] = {}
        self.asked: list[int] = []

    def __call__(self, batch: int) -> bool:
        self.asked.append(batch)
        if batch not in self.known:
            start = time.perf_counter()
            ran = run_probe(self._job, self._meter, batch, self._limit, QUICK).ran
            self.known[batch] = ran, time.perf_counter() - start
        return self.known[batch][0]

    def charge(self, search: Callable[[Trials], Search]) -> dict[str, Any]:
        """What a search finds and costs."""
        self.asked.clear()
        found = search(self)
        seconds = sum(self.known[batch][1] for batch in set(self.asked))
        return {"batch": found.largest, "runs": found.runs, "oom": found.failures,
                "seconds": round(seconds, 2)}  # fmt: skip


def accelerates(trials: Trials) -> Search:
    """accelerate's decorator; without the package, halving."""
    try:
        from accelerate.utils import find_executable_batch_size
    except ImportError:
        return halving(trials, CAP)
    tried: dict[int, bool] = {}

    @find_executable_batch_size(starting_batch_size=CAP)
    def train(batch: int) -> int:
        tried[batch] = trials(batch)
        if not tried[batch]:
            raise RuntimeError("CUDA out of memory.")
        return batch

    try:
        largest = int(train())
    except RuntimeError:
        largest = 0
    return Search(largest, len(tried), sum(not ran for ran in tried.values()))


def true_largest(trials: Callable[[int], bool], guess: int) -> int:
    """A search that starts at a guess and its successor: two runs confirm a right one."""
    if not guess:
        return doubling(trials, CAP).largest
    if not trials(guess):
        return bisection(trials, 0, guess).largest
    low, step = guess, 1
    while low + step <= CAP and trials(low + step):
        low, step = low + step, 2 * step
    return bisection(trials, low, min(low + step, CAP + 1)).largest


def one(name: str, device: str, limit: int) -> dict[str, Any]:
    """A job under a limit: batchfit, the truth, the searches."""
    start = time.perf_counter()
    made = calibrate(JOBS[name], device=device, budget=limit, cap=CAP, options=QUICK)
    seconds = time.perf_counter() - start
    trials = Trials(name, device, limit)
    answer = made.answer()
    row: dict[str, Any] = {
        "job": name,
        "limit": limit,
        "truth": true_largest(trials, answer.batch),
        "batchfit": {
            "batch": answer.batch,
            "runs": len(made.probes),
            "oom": sum(not probe.ran for probe in made.probes),
            "seconds": round(seconds, 2),
            "blind": made.blind,
            "probes": [probe.to_dict() for probe in made.probes],
            "interval": [answer.low, answer.high],
            "notes": made.notes,
        },
        "accelerate": trials.charge(accelerates),
        "lightning": trials.charge(lambda t: doubling(t, CAP, start=2)),
        "bisection": trials.charge(lambda t: bisection(t, 0, CAP)),
    }
    row["key"] = made.key
    return row


def run_all(args: argparse.Namespace) -> dict[str, Any]:
    """Every job under every limit, until the time is up."""
    end = time.monotonic() + 60 * args.minutes
    rows: list[dict[str, Any]] = []
    missing: list[str] = []
    result = {"rows": rows, "not_run": missing, "torch": torch.__version__}
    order = [(name, size) for size in map(parse_bytes, args.limit) for name in args.jobs or JOBS]
    for name, limit in order:
        left = end - time.monotonic()
        if left < 5:
            missing.append(f"{name} at {limit}")
            continue
        command = [sys.executable, __file__, "--one", name, str(limit), "--device", args.device]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=min(left, TIMEOUT), check=False
            )
            if done.returncode:
                lines = done.stderr.strip().splitlines() or ["no message"]
                rows.append({"job": name, "limit": limit, "error": lines[-1][:300]})
            else:
                rows.append(json.loads(done.stdout.strip().splitlines()[-1]))
        except subprocess.TimeoutExpired:
            rows.append({"job": name, "limit": limit, "error": "took too long"})
        print(f"{name} at {limit / 2**30:g} GiB: {rows[-1].get('truth', rows[-1].get('error'))}")
        _write(Path(args.output), result)
    _write(Path(args.output), result)
    return result


def _write(path: Path, result: dict[str, Any]) -> None:
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    os.replace(beside, path)


def show(result: dict[str, Any]) -> None:
    """The table on the terminal."""
    table = Table("job", "limit", "true", *(f"{m}: batch, runs, OOMs, s" for m in METHODS))
    for row in result["rows"]:
        limit = f"{row['limit'] / 2**30:g} GiB"
        if "error" in row:
            table.add_row(row["job"], limit, row["error"])
            continue
        cells = [
            f"{row[m]['batch']}, {row[m]['runs']}, {row[m]['oom']}, {row[m]['seconds']:g}"
            for m in METHODS
        ]
        table.add_row(row["job"], limit, str(row["truth"]), *cells)
    console = Console()
    console.print(table)
    if result["not_run"]:
        console.print("not run:", ", ".join(result["not_run"]))


METHODS = ("batchfit", "accelerate", "lightning", "bisection")


def main() -> None:
    """Run, or show what was run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--limit", nargs="+", default=["8GiB", "16GiB"])
    parser.add_argument("--jobs", nargs="+", choices=JOBS)
    parser.add_argument("--output", default=str(RESULT))
    parser.add_argument("--read", metavar="RESULT")
    parser.add_argument("--one", nargs=2, metavar=("JOB", "BYTES"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(one(args.one[0], args.device, int(args.one[1]))))
    elif args.read:
        show(json.loads(Path(args.read).read_text(encoding="utf-8")))
    else:
        show(run_all(args))


if __name__ == "__main__":
    main()
