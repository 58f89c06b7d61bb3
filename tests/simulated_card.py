"""A GPU for the tests of ``benchmarks/cuda_truth.py``: the simulated one, its allocator the twin.

Jobs run on meta tensors as in a trace; what they allocate goes through the twin after each step,
within the limit that was set. So measurements on it must find exactly what is predicted, and
whatever the benchmark does wrong with peaks, limits or left-overs shows as a difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from batchfit.estimator import GPU, Estimate
from batchfit.estimator.allocator import Replay, replay
from batchfit.estimator.timeline import from_trace
from batchfit.estimator.tracing import Phase, Recorder, Trace, TraceOptions
from batchfit.estimator.tracing.run import simulated_gpu


class SimulatedCard:
    """Implements the benchmark's ``Device``.

    Args:
        gpu: which.
        estimate: whose predicted snapshot is given for a real one.
        hidden: bytes that the card takes beyond what is predicted, for as long as a job runs.

    Attributes:
        limits: the limits that were set, in order.
        runs: how often it was emptied.
    """

    def __init__(self, gpu: GPU, estimate: Estimate | None = None, hidden: int = 0) -> None:
        self.torch_device = torch.device("cuda", 0)
        self.total = gpu.total_bytes
        self.limits: list[int | None] = []
        self.runs = 0
        self._gpu, self._estimate, self._hidden = gpu, estimate, hidden
        self._stack = ExitStack()
        self._recorder: Recorder | None = None
        self._limit: int | None = None

    def fresh(self) -> tuple[int, int]:
        self.close()
        self.runs += 1
        recorder, _ = self._stack.enter_context(simulated_gpu(TraceOptions(self._gpu)))
        recorder.ledger.begin(Phase.INIT)
        if self._hidden:
            recorder.ledger.transient(self._hidden, "hidden")
        self._recorder = recorder
        return 0, 0

    def close(self) -> None:
        """End the simulation: torch is as it was."""
        self._recorder = None
        self._stack.close()
        self._stack = ExitStack()

    def _replay(self) -> Replay:
        assert self._recorder is not None
        log, paths = self._recorder.ledger.log, self._recorder.ledger.modules.paths
        timeline = from_trace(Trace(0, log, paths, None))
        return replay(
            timeline.events, timeline.sizes(0), budget=self._limit, optional=timeline.optional
        )  # fmt: skip

    def restart_peaks(self) -> None: ...

    def allocated(self) -> int:
        return self._replay().end_allocated

    def peaks(self) -> tuple[int, int]:
        run = self._replay()
        return run.peak_allocated, run.peak_reserved

    def synchronize(self) -> None:
        run = self._replay()
        if run.oom is not None:
            raise torch.OutOfMemoryError(run.oom.message("the step"))

    def limit(self, size: int | None) -> None:
        self.limits.append(size)
        self._limit = size

    def outside(self) -> int:
        return self._gpu.context_bytes

    @contextmanager
    def recording(self) -> Iterator[Callable[[], dict[str, Any]]]:
        assert self._estimate is not None
        estimate = self._estimate
        yield lambda: estimate.snapshot(4)
