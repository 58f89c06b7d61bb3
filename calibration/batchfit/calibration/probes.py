"""Run a step for real and measure it. Nothing of it stays: see :mod:`.state`."""

from __future__ import annotations

import statistics
import time
import traceback
from dataclasses import dataclass
from itertools import pairwise

import torch

from .job import Job
from .meters import Meter, Watch
from .oom import is_out_of_memory, out_of_memory_text
from .probe import Probe
from .state import preserved

__all__ = ["ProbeOptions", "run_probe"]

# Below this share of the device an ambiguous error is taken for a lack of memory.
_NEARLY_FULL = 0.05


@dataclass(frozen=True, slots=True)
class ProbeOptions:
    """How a probe is made.

    Attributes:
        warm_up: steps that are not timed. Optimizer state is born in the first, gradients and
            outputs of the step before are alive from the second on.
        repeats: steps that are timed.
        patience: seconds after which no further timed step begins.
    """

    warm_up: int = 2
    repeats: int = 3
    patience: float = 30.0


def run_probe(
    job: Job, meter: Meter, batch: int, budget: int, options: ProbeOptions | None = None
) -> Probe:
    """Measure one batch size; everything is as before afterwards, also after an exception.

    Args:
        job: what to run.
        meter: the device.
        batch: the batch size.
        budget: bytes that the job's allocator can reserve, to be noted in the probe.
        options: how.

    Raises:
        Whatever the step raises that is not out of memory, as it is.
    """
    with preserved(job.protected):
        probe = _attempt(job, meter, batch, budget, options or ProbeOptions())
    meter.release()
    return probe


def _attempt(job: Job, meter: Meter, batch: int, budget: int, options: ProbeOptions) -> Probe:
    before = meter.memory()
    own = job.existing_bytes()
    seen = Watch()
    error: BaseException | None = None
    try:
        with meter.watch(own) as seen:
            _steps(job, meter, batch, seen, options)
    except Exception as raised:
        nearly_full = _nearly_full(meter)
        if not is_out_of_memory(raised, nearly_full=nearly_full):
            raise
        text = out_of_memory_text(raised, nearly_full=nearly_full)
        _forget(raised)
        error = raised
    if error is not None:
        del error
        return Probe(batch, 0, None, 0.0, 0.0, len(seen.seconds), text, budget)
    # What this process held for others before the job is not the job's.
    foreign = max(before.allocated - own, 0)
    foreign_reserved = max(before.reserved - own, 0)
    timed = seen.seconds[options.warm_up :] or seen.seconds[-1:]
    return Probe(
        batch=batch,
        peak=seen.peak - foreign,
        reserved=None if seen.reserved is None else seen.reserved - foreign_reserved,
        seconds=statistics.median(timed),
        spread=_half_quartiles(timed),
        steps=len(seen.seconds),
        out_of_memory=None,
        budget=budget,
        leak=_leak(seen.ends[options.warm_up - 1 :]),
        retries=seen.retries,
    )


def _steps(job: Job, meter: Meter, batch: int, seen: Watch, options: ProbeOptions) -> None:
    step = job.start()
    begin = time.perf_counter()
    for number in range(options.warm_up + options.repeats):
        late = time.perf_counter() - begin > options.patience
        if number > options.warm_up and late:
            break
        with meter.step(seen):
            step(batch)


def _nearly_full(meter: Meter) -> bool:
    """Whether the device has next to nothing free, as far as it still answers."""
    try:
        memory = meter.memory()
    except RuntimeError:  # after a failed call the driver may refuse any other
        return True
    limit = memory.total if meter.limit is None else meter.limit
    taken = memory.total - memory.free if meter.limit is None else memory.reserved
    return limit - taken < _NEARLY_FULL * limit


def _forget(error: BaseException) -> None:
    """Let go of everything that the frames of an exception, and of its causes, hold."""
    current: BaseException | None = error
    while current is not None:
        traceback.clear_frames(current.__traceback__)
        current.__traceback__ = None
        following = current.__cause__ or current.__context__
        current.__cause__ = current.__context__ = None
        current = following
    torch.clear_autocast_cache()


def _half_quartiles(times: list[float]) -> float:
    if len(times) < 2:
        return 0.0
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return (high - low) / 2


def _leak(ends: list[int]) -> int:
    """Bytes by which every one of the steps left more behind; 0 if any did not."""
    growth = [after - before for before, after in pairwise(ends)]
    return max(min(growth), 0) if len(growth) >= 2 else 0
