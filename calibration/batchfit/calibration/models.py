"""What is known of a job's memory before a probe: a timeline (for GPU or CPU), or nothing."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from batchfit.estimator import Estimate, Timeline, Workload
from batchfit.estimator.budget import Budget
from batchfit.estimator.timeline import merge
from batchfit.estimator.tracing import record_cpu
from batchfit.estimator.workload import Step

from .prior import EXACT, NOISE

__all__ = ["BlindModel", "CpuModel", "EstimateModel", "MemoryModel", "cpu_model"]

#: Above this no tensor of one batch can be addressed with 32 bits; no batch is asked for beyond.
_ANY = 2**31 - 1

# Batch sizes that are run to make a timeline on the CPU.
_CPU_PAIRS = ((2, 4), (8, 16))


class MemoryModel(Protocol):
    """Predicted bytes over the batch size.

    Attributes:
        blind: nothing is predicted; the other answers are then meaningless.
        noise: relative standard deviation of a repeated measurement on its device.
        notes: what the reader should know.
    """

    @property
    def blind(self) -> bool: ...

    @property
    def noise(self) -> float: ...

    @property
    def notes(self) -> list[str]: ...

    def allocated(self, batch: int, size: int | None = None) -> int:
        """Predicted peak of the allocated bytes; with ``size`` bytes to reserve, if given."""

    def reserved(self, batch: int) -> int | None:
        """Predicted peak of the reserved bytes; None without a caching allocator."""

    def fits(self, batch: int, size: int) -> bool:
        """Whether the predicted run goes through with so many bytes to reserve."""

    def needed(self, batch: int) -> int:
        """The smallest size, to a MiB, with which it goes through."""

    def uses_batch(self) -> bool:
        """Whether anything at all grows with the batch size."""

    def limit(self) -> int:
        """The largest batch size that makes sense to ask for."""

    def confirm(self, batch: int) -> bool:
        """Whether a trace at this batch size agrees; corrects the model where not."""

    def fingerprint(self) -> str:
        """A digest of what the job does to memory: the same job, the same digest."""


class EstimateModel:
    """An estimate for the GPU in front of us. See :class:`MemoryModel`."""

    blind = False
    noise = NOISE

    def __init__(self, estimate: Estimate) -> None:
        self.estimate = estimate

    @property
    def notes(self) -> list[str]:
        return self.estimate.notes

    def allocated(self, batch: int, size: int | None = None) -> int:
        if size is not None and size > 0:
            within = self.estimate.replay(batch, size)
            if within.oom is None:
                return within.peak_allocated
        return self.estimate.peak(batch)

    def reserved(self, batch: int) -> int:
        return self.estimate.reserved(batch)

    def fits(self, batch: int, size: int) -> bool:
        return size > 0 and self.estimate.fits(batch, Budget(size))

    def needed(self, batch: int) -> int:
        return self.estimate.needed(batch)

    def uses_batch(self) -> bool:
        if not self.estimate.affine:
            return True
        return self.estimate.timeline_at(1).grows()

    def limit(self) -> int:
        return self.estimate.index_limit()

    def confirm(self, batch: int) -> bool:
        return self.estimate.confirm(batch)

    def fingerprint(self) -> str:
        if not self.estimate.affine:
            return fingerprint_of(self.estimate.workload)
        return _digest_timeline(self.estimate.timeline_at(1))


class CpuModel:
    """A timeline of real runs on the CPU; nothing is rounded or cached there. See above."""

    blind = False
    noise = EXACT

    def __init__(self, timeline: Timeline, notes: Iterable[str] = ()) -> None:
        self._timeline = timeline
        self._peaks: dict[int, int] = {}
        self.notes = list(notes)

    def allocated(self, batch: int, size: int | None = None) -> int:
        if batch not in self._peaks:
            live = self._timeline.live_blocks(self._timeline.sizes(batch))
            self._peaks[batch] = int(live.max(initial=0))
        return self._peaks[batch]

    def reserved(self, batch: int) -> None:
        return None

    def fits(self, batch: int, size: int) -> bool:
        return self.allocated(batch) <= size

    def needed(self, batch: int) -> int:
        return self.allocated(batch)

    def uses_batch(self) -> bool:
        return self._timeline.grows()

    def limit(self) -> int:
        return _ANY

    def confirm(self, batch: int) -> bool:
        return True

    def fingerprint(self) -> str:
        return _digest_timeline(self._timeline)


class BlindModel:
    """Nothing is known; two probes make a line. See :class:`MemoryModel`."""

    blind = True

    def __init__(self, fingerprint: str, why: str, noise: float = NOISE) -> None:
        self.noise = noise
        self._fingerprint = fingerprint
        self.notes = [f"blind: {why}; a line through the probes stands in for a timeline"]

    def allocated(self, batch: int, size: int | None = None) -> int:
        return 0

    def reserved(self, batch: int) -> None:
        return None

    def fits(self, batch: int, size: int) -> bool:
        return size >= 0

    def needed(self, batch: int) -> int:
        return 0

    def uses_batch(self) -> bool:
        return True

    def limit(self) -> int:
        return _ANY

    def confirm(self, batch: int) -> bool:
        return True

    def fingerprint(self) -> str:
        return self._fingerprint


def cpu_model(workload: Workload, unit: int = 1) -> CpuModel | None:
    """The timeline of the workload on the CPU, from real runs at two small batch sizes.

    The CPU's own kernels decide what is allocated there, and no meta tensor runs them; so the
    recorder watches the step itself. A module that exists is copied first.

    Kernels round some of their buffers to pages, which no line through two sizes goes through;
    the larger the sizes, the less it matters. So a second pair is tried where the first does not
    do; None is returned where neither does.

    Args:
        workload: the job.
        unit: batch sizes are multiples of this.
    """
    copied = Workload(build=lambda device: start_copy(workload, device), name=workload.name)
    for pair in _CPU_PAIRS:
        first, second = (record_cpu(copied, unit * batch) for batch in pair)
        timeline = merge(first, second)
        if timeline is not None and not timeline.suspect():
            return CpuModel(timeline, dict.fromkeys([*first.log.notes, *second.log.notes]))
    return None


def start_copy(workload: Workload, device: torch.device) -> Step:
    """Start a workload on a copy of its module, so that the user's own is not touched."""

    def replica(module: nn.Module) -> tuple[nn.Module, Mapping[int, nn.Parameter]]:
        memo: dict[int, Any] = {}
        twin = copy.deepcopy(module, memo)
        return twin, {id(p): memo[id(p)] for p in module.parameters()}

    return workload.start(device, replica=replica)


def fingerprint_of(workload: Workload) -> str:
    """A digest of a workload's description, where there is no timeline to take it of."""
    text = repr(sorted(workload.describe().items()))
    if isinstance(workload.model, nn.Module):
        text += repr([(name, tuple(p.shape)) for name, p in workload.model.named_parameters()])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _digest_timeline(timeline: Timeline) -> str:
    digest = hashlib.sha256()
    for array in (timeline.events, timeline.fixed, timeline.per_sample):
        digest.update(np.ascontiguousarray(array, dtype="<i8").tobytes())
    digest.update("\n".join(timeline.operators).encode())
    return digest.hexdigest()[:16]
