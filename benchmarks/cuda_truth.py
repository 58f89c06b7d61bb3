"""Predicted and measured, side by side, on the CUDA machine at hand.

    python benchmarks/cuda_truth.py [--minutes 8] [--out cuda_truth.json]
    python benchmarks/cuda_truth.py --read cuda_truth.json
    python benchmarks/cuda_truth.py --dry-run [--gpu h200]
    python benchmarks/cuda_truth.py --predict-again cuda_truth.json

About 35 training steps, each predicted on the CPU and run on the GPU as the same object: peaks at
three batch sizes, the true largest batch under limits of 8 and 16 GiB, the blocks that live at the
peak, what each operator allocates for itself, and what cuDNN's search and determinism change. The
result is written after every finding; the same command continues a run that was cut off. torch and
batchfit are all that is needed; torchvision and transformers add jobs. The third form predicts
only, without a GPU; the fourth replaces the predictions in a result by those of today.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
if find_spec("batchfit") is None:  # a clone that is not installed
    sys.path[1:1] = [str(HERE.parent / room) for room in ("estimator", "calibration", "interface")]

from gpu_truth import reader  # noqa: E402
from gpu_truth.device import describe_card  # noqa: E402
from gpu_truth.jobs import JOBS, Job  # noqa: E402
from gpu_truth.results import ResultError, Results, surroundings  # noqa: E402
from gpu_truth.schedule import Order, Say, Schedule, Task  # noqa: E402
from gpu_truth.worker import main as work  # noqa: E402
from rich.console import Console  # noqa: E402

_HOUR = 3600.0
# Seconds that are kept for the tables.
_AT_THE_END = 3.0
_WIDE = 220  # columns of the tables in a file
# cuDNN's search is run so many jobs after the job itself: some of it before the time ends.
_SEARCH_LATER = 6


def command(order: Order) -> list[str]:
    """The command line of a process for one job."""
    return [sys.executable, str(Path(__file__).resolve()), "--worker", json.dumps(order)]


def the_card() -> dict[str, Any]:
    """The GPU here, asked in a process that ends: the parent itself takes no memory on it.

    Raises:
        ResultError: there is none.
    """
    done = subprocess.run(
        [sys.executable, str(Path(__file__).resolve()), "--card"], capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ResultError(f"no CUDA device can be used here: {said}; --dry-run needs none")
    return {**json.loads(done.stdout.splitlines()[-1]), **surroundings()}


def catalogue_card(name: str) -> dict[str, Any]:
    """A card of the catalogue, in the form of :func:`describe_card`."""
    from batchfit.estimator import BatchfitError, find_gpu

    try:
        gpu = find_gpu(name)
    except BatchfitError as error:
        raise ResultError(str(error)) from error
    return {
        "name": gpu.name, "vendor": gpu.vendor, "total_bytes": gpu.total_bytes,
        "capability": list(gpu.capability), "sm_count": gpu.sm_count,
        "threads_per_sm": gpu.threads_per_sm, "torch": None, **surroundings(),
    }  # fmt: skip


def choose(only: Sequence[str], results: Results) -> list[Job]:
    """The jobs that were asked for and can run; of the others the result says why not."""
    capability = tuple(results.data["machine"]["capability"])
    chosen = []
    for job in JOBS:
        if only and not any(part in job.name for part in only):
            continue
        reason = job.missing(capability)
        if reason:
            results.give_reason(job, "measure", reason)
        else:
            chosen.append(job)
    return chosen


def in_order(jobs: Sequence[Job]) -> list[Task]:
    """The processes to run: each job, and later cuDNN's search for those with convolutions."""
    ranked = [(float(i), Task(job, "measure")) for i, job in enumerate(jobs)]
    ranked += [
        (i + _SEARCH_LATER + 0.5, Task(job, "benchmark"))
        for i, job in enumerate(jobs)
        if job.convolutions
    ]
    return [task for _, task in sorted(ranked, key=lambda pair: pair[0])]


def teller(options: argparse.Namespace, console: Console) -> Say:
    """Prints progress, unless it is not wanted."""

    def say(text: str) -> None:
        if not options.quiet:
            console.print(text, markup=False, highlight=False)

    return say


def measure(options: argparse.Namespace, console: Console) -> int:
    """Measure what the time allows and show it."""
    began = time.monotonic()
    results = Results.open(options.out, the_card())
    jobs = choose(options.only, results)
    tasks = in_order(jobs)
    if options.keep_snapshots:
        options.keep_snapshots.mkdir(parents=True, exist_ok=True)
    ahead = max(1, min(6, (os.cpu_count() or 2) // 2))
    folder = str(options.keep_snapshots.resolve()) if options.keep_snapshots else None
    seconds = 60 * options.minutes - (time.monotonic() - began) - _AT_THE_END
    Schedule(results, command, seconds, ahead, teller(options, console), folder).run(tasks)
    return show(options.out, console)


def predict(results: Results, options: argparse.Namespace, console: Console) -> int:
    """Predict every job, one after the other; 1 if one of them could not be."""
    jobs = choose(options.only, results)
    for job in jobs:
        results.job(job).pop("prediction", None)
        results.give_reason(job, "predict", "")
    Schedule(results, command, _HOUR, 0, teller(options, console)).run(
        [Task(job, "predict") for job in jobs]
    )
    failed = [job.name for job in jobs if "prediction" not in results.job(job)]
    console.print(f"{len(jobs) - len(failed)} of {len(jobs)} jobs predicted")
    return 1 if failed else 0


def show(path: Path, console: Console) -> int:
    """Print the table and write it as Markdown beside the result."""
    data = Results.read(path).data
    reader.print_tables(data, console)
    page = path.with_suffix(".md")
    page.write_text(reader.markdown(data), encoding="utf-8")
    console.print(f"written: {path}, {page}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=8.0, help="end after so many (8)")
    parser.add_argument("--out", type=Path, default=Path("cuda_truth.json"))
    parser.add_argument("--only", action="append", default=[], metavar="TEXT",
                        help="only jobs whose name contains this; may be given again")  # fmt: skip
    parser.add_argument("--keep-snapshots", type=Path, metavar="FOLDER",
                        help="keep each recorded snapshot, compressed, in this folder")  # fmt: skip
    parser.add_argument("--quiet", action="store_true", help="do not tell of each job")
    parser.add_argument("--read", type=Path, metavar="RESULT", help="print the table of a result")
    parser.add_argument("--dry-run", action="store_true", help="predict only; needs no GPU")
    parser.add_argument("--gpu", default="h200", help="the card of a dry run (h200)")
    parser.add_argument("--predict-again", type=Path, metavar="RESULT",
                        help="replace the predictions in a result")  # fmt: skip
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--card", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        return work(json.loads(options.worker))
    if options.card:
        print(json.dumps(describe_card()))
        return 0
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDE)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a time limit ends it tidily, too
    try:
        if options.read:
            return show(options.read, console)
        if options.predict_again:
            return predict(Results.read(options.predict_again), options, console)
        if options.dry_run:
            card = catalogue_card(options.gpu)
            return predict(Results.open(options.out, card), options, console)
        return measure(options, console)
    except ResultError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"stopped; what was found is in {options.out}", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
