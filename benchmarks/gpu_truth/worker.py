"""One job in a process of its own: predict it on the CPU, wait for the word, measure it.

The process says what it finds in lines of JSON on its standard output, each as soon as it is known,
and takes one line from its standard input: how many seconds it has, and which parts are known from
an earlier run.
"""

from __future__ import annotations

import gzip
import json
import os
import pickle
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import torch

from batchfit.estimator import BatchfitError, Budget, Estimate, Outcome, Workload, estimate
from batchfit.estimator.snapshot_compare import compare

from .device import MIB, Cuda, Device, card_gpu
from .jobs import Job, find_job
from .largest import OutOfTrials, find_largest
from .running import Run, run, with_weights_at_hand
from .workspaces import HiddenBytes, comparison_json, convolution_blocks

GIB = 2**30
LIMITS = {"8 GiB": 8 * GIB, "16 GiB": 16 * GIB}
_MOST_TRIALS = 10

Emit = Callable[[dict[str, Any]], None]


def parts_of(job: Job) -> list[str]:
    """What is measured of a job, the most telling first."""
    parts = [f"peak {batch}" for batch in job.batches]
    parts += ["largest 8 GiB", "snapshot", "operators", "largest 16 GiB"]
    return [*parts, "deterministic"] if job.convolutions else parts


@dataclass(slots=True)
class Clock:
    """When to stop: a moment of ``time.monotonic``."""

    ends: float

    def allows(self, seconds: float) -> bool:
        """Whether something that takes so long can still be begun."""
        return time.monotonic() + seconds < self.ends


def predict(job: Job, card: dict[str, Any]) -> tuple[Estimate, dict[str, Any]]:
    """The estimate for a card, and what of it goes into the result. Bytes.

    Raises:
        BatchfitError: the job cannot be predicted.
    """
    began = time.perf_counter()
    made = estimate(job.make().with_(name=job.name), gpu=card_gpu(card))
    peaks = {}
    for batch in job.batches:
        moment = made.peak_moment(batch)
        parts = {str(k): v for k, v in made.breakdown(batch).items() if v}
        peaks[str(batch)] = {
            "allocated": made.peak(batch), "least": made.peak_range(batch)[0],
            "reserved": made.reserved(batch), "breakdown": parts,
            "reached": f"{moment.phase} of step {moment.step}: {moment.operator} in "
                       f"{moment.module or 'the step'}",
        }  # fmt: skip
    largest = {}
    for name, limit in LIMITS.items():
        answer = made.answer(Budget(limit))
        largest[name] = {
            "batch": answer.batch,
            "outcome": str(answer.outcome),
            "capped": answer.outcome in (Outcome.CAPPED, Outcome.UNLIMITED),
        }
    notes = [note for note in made.notes if note != made.gpu.note]
    return made, {
        "settings": made.workload.describe(), "affine": made.affine, "peaks": peaks,
        "largest": largest, "notes": notes, "context": made.gpu.context_bytes,
        "seconds": round(time.perf_counter() - began, 2),
    }  # fmt: skip


class Measuring:
    """The parts of one job, on a device."""

    def __init__(
        self, job: Job, workload: Workload, device: Device, made: Estimate,
        prediction: dict[str, Any], clock: Clock, snapshots: Path | None = None,
    ) -> None:  # fmt: skip
        self._job, self._device, self._made = job, device, made
        self._prediction, self._clock, self._snapshots = prediction, clock, snapshots
        self._workload = workload
        self._last = 0.0

    def all(self, have: list[str], emit: Emit) -> None:
        """Measure what is not known yet, and tell each part as soon as it is there."""
        outside = self._device.outside()
        emit({"outside": {"start": outside}})
        for part in parts_of(self._job):
            if part in have:
                continue
            if not part.startswith("peak") and not self._clock.allows(self._last):
                emit({"part": part, "found": {"no_time": True}})
                continue
            try:
                found = self._measure(part, outside)
            except Exception as error:  # of the job, of torch or of CUDA: it is the finding
                found = {"error": f"{type(error).__name__}: {str(error)[:500]}"}
            emit({"part": part, "found": found})
            self._device.limit(None)
            self._device.fresh()  # raises where the GPU is lost to this process
        emit({"outside": {"start": outside, "end": self._device.outside()}})

    def _measure(self, part: str, outside: int) -> dict[str, Any]:
        name, _, what = part.partition(" ")
        if name == "peak":
            return self._peak(int(what), outside)
        if name == "largest":
            return self._largest(what, outside)
        if name == "deterministic":
            return self._deterministic()
        return self._snapshot() if name == "snapshot" else self._operators()

    def _run(self, batch: int, **options: Any) -> Run:
        began = time.monotonic()
        done = run(self._device, self._workload, batch, **options)
        self._last = time.monotonic() - began
        return done

    def _peak(self, batch: int, outside: int) -> dict[str, Any]:
        needed = self._prediction["peaks"][str(batch)]["reserved"]
        if needed > self._device.total - outside:
            return {"skipped": f"it is predicted to reserve {needed // MIB} MiB"}
        return self._run(batch).as_json()

    def _largest(self, limit: str, outside: int) -> dict[str, Any]:
        size, predicted = LIMITS[limit], self._prediction["largest"][limit]
        if size > self._device.total - outside:
            return {"skipped": f"the GPU has no {limit} to give"}
        messages: dict[str, str] = {}

        def fits(batch: int) -> bool:
            if not self._clock.allows(self._last):
                raise OutOfTrials
            done = self._run(batch)
            if done.oom:
                messages[str(batch)] = done.oom
            return not done.oom

        self._device.limit(size)
        found = find_largest(fits, predicted["batch"], _MOST_TRIALS, predicted["capped"])
        return {**asdict(found), "verdict": found.verdict.name.lower(), "messages": messages}

    def _deterministic(self) -> dict[str, Any]:
        torch.backends.cudnn.deterministic = True
        try:
            return self._run(self._job.batches[1]).as_json()
        finally:
            torch.backends.cudnn.deterministic = False

    def _operators(self) -> dict[str, Any]:
        mode = HiddenBytes(self._device)
        done = self._run(self._job.batches[1], around=mode)
        return {"batch": done.batch, "oom": done.oom, "operators": mode.as_json()}

    def _snapshot(self) -> dict[str, Any]:
        batch = self._job.batches[1]
        kept: list[dict[str, Any]] = []
        with self._device.recording() as take:
            done = self._run(batch, at_end=lambda: kept.append(take()))
        if not kept:
            return {"skipped": f"out of memory while recording: {done.oom}"}
        if self._snapshots is not None:
            path = self._snapshots / f"{self._job.name.replace(' ', '-')}.pickle.gz"
            with gzip.open(path, "wb", compresslevel=3) as file:
                pickle.dump(kept[0], file, protocol=4)
        found = comparison_json(compare(self._made, batch, kept[0]))
        if self._job.convolutions:
            explained = self._made.timeline_at(batch).sizes(batch).tolist()
            found["convolution_blocks"] = convolution_blocks(kept[0], explained)
        return {"batch": batch, "allocated": done.allocated, **found}


def measure_benchmark(job: Job, workload: Workload, device: Device, emit: Emit) -> None:
    """The peaks under ``cudnn.benchmark``.

    It needs a process in which this job has not run: cuDNN's plan for a shape is kept once it is
    found (benchmark_cache in ATen/native/cudnn/Conv_v8.cpp, whose key does not hold the flag), and
    nothing would be searched for.
    """
    torch.backends.cudnn.benchmark = True
    done = run(device, workload, job.batches[1])
    emit({"part": "benchmark", "found": done.as_json()})


def main(order: dict[str, Any]) -> int:
    """Do what the parent process asks.

    Args:
        order: ``job`` (its name), ``kind`` ("predict", "measure" or "benchmark"), ``card``, and
            ``snapshots`` (a folder, or None).
    """
    warnings.simplefilter("ignore")
    out = _private_stdout()

    def emit(message: dict[str, Any]) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    job = find_job(order["job"])
    made: Estimate | None = None
    prediction: dict[str, Any] = {}
    if order["kind"] != "benchmark":
        try:
            made, prediction = predict(job, order["card"])
        except BatchfitError as error:
            emit({"failed": f"not predicted: {type(error).__name__}: {error}"})
            return 1
        emit({"prediction": prediction})
        if order["kind"] == "predict":
            return 0
    workload = with_weights_at_hand(job.make())
    emit({"ready": True, "cuda_untouched": not torch.cuda.is_initialized()})
    word = sys.stdin.readline()
    if not word:
        return 0
    go = json.loads(word)
    clock = Clock(time.monotonic() + go["seconds"])
    device = Cuda()
    if made is None:
        measure_benchmark(job, workload, device, emit)
    else:
        folder = Path(order["snapshots"]) if order.get("snapshots") else None
        measuring = Measuring(job, workload, device, made, prediction, clock, folder)
        measuring.all(go["have"], emit)
    emit({"done": True})
    return 0


def _private_stdout() -> TextIO:
    """Standard output for our lines alone: what libraries print goes to standard error."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return out
