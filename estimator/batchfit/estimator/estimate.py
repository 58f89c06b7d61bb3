"""The estimate: peak memory at any batch size, where it goes, and the largest batch that fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from .allocator import AllocatorSettings, Replay, replay
from .answer import BatchAnswer, solve_batch, why_not_affine
from .budget import DEFAULT_MARGIN, Budget, explicit_budget, gpu_budget
from .explain import Reconciliation, explain
from .layers import LayerSums, layer_sums
from .solve import check_batch
from .timeline import Ints, Moment, Timeline, deviations, from_trace
from .tracing import Category, Phase, Trace, TraceOptions, trace
from .units import MIB
from .workload import Workload

# Largest number of elements that 32-bit index arithmetic can address: cuDNN and many CUDA kernels
# refuse larger tensors ("canUse32BitIndexMath", ATen/native/CanUse32BitIndexMath.h).
_MAX_ELEMENTS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class MemoryCurve:
    """Allocated bytes over a run, after each birth and death of a storage.

    Attributes:
        allocated: shape (events,), bytes.
        by_category: category -> shape (events,), bytes; they add up to ``allocated``.
        marks: (event, phase, step) at which each phase begins.
    """

    allocated: Ints
    by_category: dict[Category, Ints]
    marks: list[tuple[int, Phase, int]]


class Estimate:
    """What a workload needs on a GPU, for every batch size. Made by :func:`estimate`."""

    def __init__(
        self, workload: Workload, options: TraceOptions, timeline: Timeline | None,
        traces: list[Trace], notes: list[str], allocator: AllocatorSettings,
    ) -> None:  # fmt: skip
        self.workload = workload
        self.gpu = options.gpu
        self.allocator = allocator
        self._options = options
        self._timeline = timeline
        self._replays: dict[int, Replay] = {}
        self._limited: tuple[tuple[int, int], Replay] | None = None
        self._direct: dict[int, Timeline] = {}
        self._notes = notes
        self._log_notes = [t.log.notes for t in traces]
        self._itemsizes = np.asarray(traces[0].log.itemsizes, dtype=np.int64)
        self._confirmed: dict[int, bool] = {}
        self._first = traces[0].batch

    def __repr__(self) -> str:
        name = self.workload.name or "workload"
        return f"<Estimate of {name} on {self.gpu.name}>"

    # -- bytes -------------------------------------------------------------------------------

    @property
    def affine(self) -> bool:
        """Whether one timeline holds for all batch sizes; if not, each one asked for is traced."""
        return self._timeline is not None

    def timeline_at(self, batch: int) -> Timeline:
        """The timeline that holds at this batch size."""
        check_batch(batch)
        if self._timeline is not None:
            return self._timeline
        if batch not in self._direct:
            self._direct[batch] = from_trace(trace(self.workload, batch, self._options))
        return self._direct[batch]

    def replay(self, batch: int, budget: int | None = None) -> Replay:
        """Run the timeline through the allocator's twin, without a limit or within a budget.

        All replays without a limit are kept, and the last one within a budget: several questions
        are asked of it in turn.
        """
        timeline = self.timeline_at(batch)
        if budget is not None:
            if self._limited is None or self._limited[0] != (batch, budget):
                run = replay(
                    timeline.events, timeline.sizes(batch), settings=self.allocator, budget=budget,
                    optional=timeline.optional,
                )  # fmt: skip
                self._limited = (batch, budget), run
            return self._limited[1]
        if batch not in self._replays:
            sizes = timeline.sizes(batch)
            self._replays[batch] = replay(timeline.events, sizes, settings=self.allocator)
        return self._replays[batch]

    def peak(self, batch: int) -> int:
        """Bytes that ``torch.cuda.max_memory_allocated`` would report."""
        return self.replay(batch).peak_allocated

    def peak_range(self, batch: int) -> tuple[int, int]:
        """The least and the most that :meth:`peak` may be, as far as workspaces decide.

        The most is :meth:`peak`: each convolution takes the workspace that cuDNN asks for first.
        The least is without them: cuDNN may choose otherwise on this GPU, and does where memory is
        short. Equal where the job has no such convolution.
        """
        timeline = self.timeline_at(batch)
        if not timeline.optional:
            return self.peak(batch), self.peak(batch)
        least = replay(timeline.events, timeline.least(batch), settings=self.allocator)
        # Where the workspaces decide nothing, rounding may go either way.
        return min(least.peak_allocated, self.peak(batch)), self.peak(batch)

    def reserved(self, batch: int) -> int:
        """Bytes that ``torch.cuda.max_memory_reserved`` would report, with memory to spare."""
        return self.replay(batch).peak_reserved

    def peak_moment(self, batch: int, budget: int | None = None) -> Moment:
        """When the peak is reached: phase, step, operator and module."""
        run = self.replay(batch, budget)
        return self.timeline_at(batch).moment(run.peak_allocated_event, run.peak_allocated)

    def phase_peaks(self, batch: int) -> dict[Phase, int]:
        """The peak within each phase, over all steps."""
        timeline = self.timeline_at(batch)
        return timeline.phase_peaks(timeline.live_blocks(self.replay(batch).block_sizes))

    def breakdown(self, batch: int, budget: int | None = None) -> dict[Category, int]:
        """Bytes by category at the peak; they add up to :meth:`peak`.

        Args:
            batch: the batch size.
            budget: the peak within so many bytes, where cuDNN's workspaces may be smaller.
        """
        timeline = self.timeline_at(batch)
        return self._sum_at_peak(
            batch, lambda i: timeline.categories[i], self.replay(batch, budget)
        )

    def by_module(self, batch: int, depth: int | None = None) -> dict[str, int]:
        """Bytes by module path at the peak, largest first; they add up to :meth:`peak`.

        Args:
            batch: the batch size.
            depth: cut paths after so many names; None keeps them whole.
        """
        timeline = self.timeline_at(batch)

        def owner(i: int) -> str:
            path = timeline.modules[i]
            return path if depth is None else ".".join(path.split(".")[:depth])

        sums = self._sum_at_peak(batch, owner, self.replay(batch))
        return dict(sorted(sums.items(), key=lambda item: -item[1]))

    def _sum_at_peak(self, batch: int, key: Callable[[int], Any], run: Replay) -> dict[Any, int]:
        """Add up the blocks that are live at the peak; an unsplit rest counts for its storage."""
        sums: dict[Any, int] = {}
        for storage in self.timeline_at(batch).alive_at(run.peak_allocated_event):
            if run.block_sizes[storage]:
                group = key(storage)
                sums[group] = sums.get(group, 0) + run.block_sizes[storage]
        return sums

    def timeline(self, batch: int) -> MemoryCurve:
        """Allocated bytes over the run, in total and by category."""
        timeline = self.timeline_at(batch)
        deltas, index = timeline.deltas(self.replay(batch).block_sizes)
        kinds = np.asarray([list(Category).index(c) for c in timeline.categories])[index]
        curves = {
            category: np.cumsum(np.where(kinds == k, deltas, 0))
            for k, category in enumerate(Category)
        }
        return MemoryCurve(np.cumsum(deltas), curves, timeline.marks)

    @cached_property
    def layers(self) -> LayerSums | None:
        """torchinfo's sums and the layer tree; None for a workload from a step function."""
        timeline = self.timeline_at(self._first)
        sizes = timeline.sizes(self._first)
        state = sum(
            int(sizes[i])
            for i in timeline.alive_at(len(timeline.events) - 1)
            if timeline.categories[i] is Category.OPTIMIZER_STATE
        )
        return layer_sums(self.workload, self._options, state, self._first)

    def explain(self, batch: int) -> Reconciliation:
        """From what tensors ask for to what nvidia-smi shows, line by line."""
        return explain(self, check_batch(batch))

    def snapshot(self, batch: int) -> dict[str, Any]:
        """A snapshot as ``torch.cuda.memory._snapshot`` would give it, for PyTorch's viewer.

        Write it with :func:`batchfit.estimator.snapshot.write_snapshot`.
        """
        from .snapshot import predicted_snapshot  # it works on estimates

        return predicted_snapshot(self, check_batch(batch))

    # -- answers -----------------------------------------------------------------------------

    def budget(
        self, budget: int | str | Budget | None = None, margin: int | str | None = None
    ) -> Budget:
        """The budget meant: the GPU's, with a margin, or an explicit one."""
        if isinstance(budget, Budget):
            return budget
        if budget is not None:
            return explicit_budget(budget, self.gpu)
        return gpu_budget(self.gpu, DEFAULT_MARGIN if margin is None else margin)

    def fits(
        self, batch: int, budget: int | str | Budget | None = None, margin: int | str | None = None
    ) -> bool:
        """Whether a batch fits on the GPU, or in a budget.

        cuDNN's workspaces shrink where they must (:meth:`fits_with_workspaces`).
        """
        check_batch(batch)
        size = self._room(budget, margin)
        if self.timeline_at(batch).peak(batch) > size:
            return False  # more bytes alive than there are: no need to ask the allocator
        return self.replay(batch, size).oom is None

    def within(
        self, batch: int, budget: int | str | Budget | None = None, margin: int | str | None = None
    ) -> Replay:
        """What the allocator does on the GPU, or in a budget; ``oom`` says where it runs out."""
        return self.replay(check_batch(batch), self._room(budget, margin))

    def fits_with_workspaces(self, batch: int, budget: int | str | Budget | None = None) -> bool:
        """Whether a batch fits together with every workspace that cuDNN would like to have."""
        run = self.within(batch, budget)
        return run.oom is None and not run.skipped

    def _room(self, budget: int | str | Budget | None, margin: int | str | None) -> int:
        """Bytes that the allocator may reserve: the budget, and its own fraction of the GPU."""
        size = self.budget(budget, margin).bytes
        if self.allocator.memory_fraction < 1.0:
            size = min(size, int(self.gpu.total_bytes * self.allocator.memory_fraction))
        return size

    def index_limit(self) -> int:
        """The largest batch at which no tensor has more elements than 32 bits can count."""
        timeline = self.timeline_at(self._first)
        slopes = timeline.per_sample if self.affine else timeline.fixed // self._first
        fixed = timeline.fixed if self.affine else 0
        room = _MAX_ELEMENTS * self._itemsizes - fixed
        growing = (slopes > 0) & (self._itemsizes > 0)
        if not growing.any():
            return _MAX_ELEMENTS
        return max(1, int((room[growing] // slopes[growing]).min()))

    def largest_batch(
        self, budget: int | str | Budget | None = None, power_of_two: bool = False,
        multiple_of: int = 1, cap: int | None = None, margin: int | str | None = None,
    ) -> int:  # fmt: skip
        """The largest batch that fits; 0 if none does. See :meth:`answer`."""
        return self.answer(budget, power_of_two, multiple_of, cap, margin).batch

    def answer(
        self, budget: int | str | Budget | None = None, power_of_two: bool = False,
        multiple_of: int = 1, cap: int | None = None, margin: int | str | None = None,
    ) -> BatchAnswer:  # fmt: skip
        """The largest batch that fits, and what the number means.

        Args:
            budget: bytes that PyTorch may reserve, as an int or "22GiB"; None takes the GPU's
                total minus context and margin.
            power_of_two: only powers of two (times ``multiple_of``).
            multiple_of: only multiples of this.
            cap: never more than this, for example the size of the dataset.
            margin: bytes of the GPU to keep free.

        Raises:
            WorkloadError: conditions that no batch size meets.
            BudgetError: a budget that no job can be given.
        """
        return solve_batch(self, self.budget(budget, margin), power_of_two, multiple_of, cap)

    def needed(self, batch: int) -> int:
        """The smallest budget in bytes, to a MiB, in which this batch fits.

        It lies between the bytes that are alive at once and what an allocator without a limit
        reserves: short of memory, the allocator gives back what it caches.
        """
        low, high = self.timeline_at(batch).peak(batch) - 1, self.reserved(batch)
        while high - low > MIB:
            middle = (low + high) // 2
            if self.replay(batch, middle).oom is None:
                high = middle
            else:
                low = middle
        return high

    def out_of_memory(
        self, batch: int, budget: int | str | Budget | None = None, margin: int | str | None = None
    ) -> str | None:
        """PyTorch's message where this batch runs out, with the place; None if it fits."""
        run = self.within(batch, budget, margin)
        if run.oom is None:
            return None
        assert run.oom.event is not None
        moment = self.timeline_at(batch).moment(run.oom.event, run.oom.allocated)
        where = f"{moment.operator} in {moment.module or 'the step'}, {moment.phase} pass"
        return run.oom.message(where)

    def confirm(self, batch: int) -> bool:
        """Trace at the answer. Where the timeline is off there, give it up and trace each batch."""
        if self._timeline is None:
            return True
        if batch not in self._confirmed:
            third = trace(self.workload, batch, self._options)
            found = deviations(self._timeline, third)
            self._confirmed[batch] = found == []
            if found != []:
                self._notes.append(why_not_affine(found, batch))
                self._timeline = None
                self._replays.clear()
                self._limited = None
                self._direct[batch] = from_trace(third)
        return self._confirmed[batch]

    def add_note(self, text: str) -> None:
        """Something the reader of the estimate should know."""
        self._notes.append(text)

    @property
    def notes(self) -> list[str]:
        """What the reader should know: assumptions, and what is not certain and why."""
        seen = dict.fromkeys(self._notes)
        if self.gpu.note:
            seen[self.gpu.note] = None
        for notes in self._log_notes:
            seen.update(dict.fromkeys(notes))
        return list(seen)
