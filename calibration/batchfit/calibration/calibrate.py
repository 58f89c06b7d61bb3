"""Calibrate a job on the device in front of us: trace, probe, solve, verify."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from batchfit.estimator import Estimate, TraceError, Workload, WorkloadError
from batchfit.estimator import estimate as make_estimate
from batchfit.estimator.answer import traced_batches
from batchfit.estimator.steps import refuse_lazy

from .answer import Conditions
from .budget import DeviceBudget, measure_budget
from .calibration import Calibration
from .errors import CalibrationError, StaleCalibration
from .gpu import gpu_of
from .isolate import isolated
from .job import Job
from .meters import Meter, find_meter
from .models import BlindModel, EstimateModel, MemoryModel, cpu_model, fingerprint_of
from .prior import EXACT, NOISE
from .probe import Probe
from .probes import ProbeOptions, run_probe
from .ranks import find_ranks
from .rounds import Rounds
from .state import preserved
from .store import check_key, make_key, read_file

__all__ = ["calibrate", "current_key"]

Log = Callable[[str], None]
Work = Workload | nn.Module | Callable[[int], Any]


def calibrate(
    work: Work,
    example_inputs: Any = None,
    *,
    device: str | torch.device | None = None,
    budget: int | str | None = None,
    margin: int | str | None = None,
    risk: float = 0.01,
    power_of_two: bool = False,
    multiple_of: int = 1,
    cap: int | None = None,
    dataset: int | None = None,
    probes: int = 3,
    verify: bool = True,
    estimate: Estimate | None = None,
    blind: bool = False,
    protect: Sequence[Any] = (),
    isolate: bool = False,
    saved: str | os.PathLike[str] | None = None,
    options: ProbeOptions | None = None,
    progress: Log | None = None,
    **settings: Any,
) -> Calibration:
    """Measure a job on a device and find the largest batch that fits.

    Two or three short probes correct the job's timeline; the answer is then run once. Everything
    that the probes change is put back. Under torch.distributed every rank calls this, and all get
    the smallest of their answers.

    Args:
        work: a :class:`Workload`; a module, with example inputs and settings as in
            ``batchfit.estimator.estimate``; or a function ``step(batch)`` that does one whole step
            on objects of the caller's own (there is no timeline then: the fit is blind).
        example_inputs: with a module: one batch, batch dimension 0.
        device: None takes the accelerator that torch sees, else the CPU.
        budget: bytes that the job may reserve, enforced meanwhile; None: what the device has free.
        margin: bytes of that to keep free; None: 256 MiB, or nothing beside a budget.
        risk: probability of running out of memory that is accepted.
        power_of_two, multiple_of, cap, dataset: which answers are wanted (:class:`Conditions`).
        probes: runs before the answer itself is tried, at most.
        verify: run the answer; step back where it fails.
        estimate: one that was made already, for this device.
        blind: use no timeline.
        protect: objects that the step changes and that it cannot be seen to reach (what a function
            closes over is found).
        isolate: run each probe in a process of its own.
        saved: a file; if it holds a calibration of this job here, no probe is made; else the new
            one is written to it.
        options: how a probe is made.
        progress: told what is done, and what each probe told.
        **settings: with a module: further attributes of :class:`Workload`.

    Raises:
        CalibrationError: the device or the step does not allow it.
        WorkloadError, TraceError: the job cannot be used as described.
        Whatever the step itself raises that is not out of memory, as it is.
    """
    log: Log = progress or (lambda text: None)
    conditions = Conditions(
        power_of_two=power_of_two, multiple_of=multiple_of, cap=cap, dataset=dataset, risk=risk
    )
    if isinstance(probes, bool) or not isinstance(probes, int) or probes < 1:
        raise WorkloadError(f"probes must be a positive number of runs, found {probes!r}")
    chosen = _as_work(work, example_inputs, settings)
    meter = find_meter(device)
    if isinstance(chosen, Workload) and isinstance(chosen.model, nn.Module):
        refuse_lazy(chosen.model)
    job = Job(chosen, meter.device, protect)
    ranks = find_ranks()
    with preserved(job.protected):
        log("tracing")
        model = _model(job, meter, estimate, blind, conditions, log)
        key = _key(job, meter, model, ranks.size)
        room = measure_budget(meter.memory(), job.existing_bytes(), budget, margin)
        if saved is not None and Path(saved).exists():
            found = _reuse(saved, key, model, room, conditions, log)
            if found is not None:
                return found
        meter.limit = room.bytes + room.foreign
        log(f"budget {room}")

        def run(batch: int) -> Probe:
            if isolate:
                return isolated(job, meter, batch, room.bytes, options)
            return run_probe(job, meter, batch, room.bytes, options)

        rounds = Rounds(model, room, conditions, run, most=probes, ranks=ranks, log=log)
        rounds.explore()
        safe = rounds.verify() if verify and rounds.corrected is not None else 0
    made = Calibration(job.name, model, rounds.probes, room, conditions, key, safe, rounds.notes)
    log(str(made.answer()))
    if saved is not None:
        made.save(saved)
    return made


def current_key(saved: dict[str, str]) -> dict[str, str]:
    """The key that a saved calibration would have here, its workload taken on trust.

    Args:
        saved: its own key, which says what kind of device it is of.
    """
    kind = saved.get("kind") or None
    key = make_key(
        find_meter(kind).describe(), saved.get("job", ""), saved.get("precision", ""),
        find_ranks().size,
    )  # fmt: skip
    key["kind"] = saved.get("kind", "")
    if kind == "cpu":  # a budget is no property of the host
        key["total"] = saved.get("total", "")
    return key


def _as_work(work: Any, example_inputs: Any, settings: dict[str, Any]) -> Any:
    if isinstance(work, nn.Module):
        try:
            return Workload(model=work, inputs=example_inputs, name=type(work).__name__, **settings)
        except TypeError as error:
            raise WorkloadError(str(error).replace("Workload.__init__()", "calibrate()")) from error
    if example_inputs is not None or settings:
        given = [*settings, *(["example_inputs"] if example_inputs is not None else [])]
        raise WorkloadError(
            f"{', '.join(given)} go with a module only; a Workload and a step say all themselves"
        )
    if not isinstance(work, Workload) and not callable(work):
        raise WorkloadError(
            f"calibrate() takes a Workload, a module and example inputs, or a function step(batch);"
            f" found {type(work).__name__}"
        )
    return work


def _model(
    job: Job, meter: Meter, estimate: Estimate | None, blind: bool, conditions: Conditions, log: Log
) -> MemoryModel:
    """What is known before a probe; a step that cannot be traced is probed blind, and that said."""
    if estimate is not None:
        return EstimateModel(estimate)
    work, noise = job.workload, EXACT if meter.device.type == "cpu" else NOISE
    if work is None:
        why = "a function cannot be traced without its objects"
        return BlindModel(_function_digest(job), why, noise)
    if blind:
        return BlindModel(fingerprint_of(work), "as asked for", noise)
    unit = conditions.multiple_of
    traced_at = traced_batches(unit)
    try:
        if meter.device.type != "cpu":
            gpu = gpu_of(meter)
            return EstimateModel(make_estimate(work, gpu=gpu, traced_at=traced_at, progress=log))
        found = cpu_model(work, unit)
    except TraceError as error:
        why = f"the step could not be traced ({error})"
        return BlindModel(fingerprint_of(work), why, noise)
    why = "what the step allocates is no straight line in the batch"
    return found or BlindModel(fingerprint_of(work), why, noise)


def _function_digest(job: Job) -> str:
    """A function is told by its name and by the shapes of what it changes."""
    shapes = [
        (name, tuple(value.shape))
        for item in job.protected
        if isinstance(item, nn.Module)
        for name, value in item.state_dict().items()
        if isinstance(value, torch.Tensor)
    ]
    return hashlib.sha256(repr((job.name, shapes)).encode()).hexdigest()[:16]


def _key(job: Job, meter: Meter, model: MemoryModel, ranks: int) -> dict[str, str]:
    precision = job.workload.precision if job.workload and not job.workload.build else ""
    key = make_key(meter.describe(), model.fingerprint(), precision, ranks)
    key["kind"] = meter.device.type
    return key


def _reuse(
    path: Any, key: dict[str, str], model: MemoryModel, room: DeviceBudget,
    conditions: Conditions, log: Log,
) -> Calibration | None:  # fmt: skip
    """A saved calibration of this very job, with its timeline; None if it belongs elsewhere."""
    values = read_file(path)
    try:
        said = check_key(values["key"], key)
        found = Calibration.from_dict(values, model)
    except StaleCalibration as error:
        log(str(error))
        warnings.warn(f"{path}: {error}", stacklevel=3)
        return None
    except (KeyError, TypeError) as error:
        raise CalibrationError(f"{path} is damaged: {type(error).__name__} {error}") from error
    log(f"{path} holds {len(found.probes)} probes of this job; none is made")
    same = conditions == found.conditions and room.bytes == found.budget.bytes
    return Calibration(
        found.name, model, found.probes, room, conditions, found.key, found.safe if same else 0,
        said,
    )  # fmt: skip
