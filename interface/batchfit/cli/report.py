"""What ``batchfit estimate`` has found, as plain data: made once, shown as text or as JSON."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from batchfit.estimator import (
    GPU,
    BatchAnswer,
    Budget,
    Category,
    Estimate,
    LayerSums,
    Moment,
    TraceError,
    estimate,
)

from .options import WORKLOAD_OPTIONS
from .plan import Plan
from .targets import Target

SCHEMA = "batchfit.estimate/1"

#: Always there, null where they do not apply (a step function has no settings).
#: Whether it is inference is said by the form.
WORKLOAD_FIELDS = (
    "name", "form", *(name for name in WORKLOAD_OPTIONS if name != "inference"), "inputs",
)  # fmt: skip

# Batch sizes shown where none is asked for: the smallest, some powers of two, and the answer.
_POWERS = 3
_LARGEST_SHOWN = 1024

#: An answer beyond this says nothing but "any size you would use".
ANY = 65536


@dataclass(frozen=True, slots=True)
class Row:
    """What one batch size needs on one GPU.

    Attributes:
        peak: with memory to spare; if it fits only with smaller cuDNN workspaces, with those.
        least: the peak if cuDNN took no workspace for convolutions.
        reserved: with memory to spare.
        reserved_here: within the budget if it fits, else as `reserved`.
        out_of_memory: what PyTorch would say where it runs out; None if it fits.
    """

    batch: int
    gpu: str
    peak: int
    least: int
    reserved: int
    breakdown: dict[Category, int]
    moment: Moment
    fits: bool
    reserved_here: int
    out_of_memory: str | None


@dataclass(frozen=True, slots=True)
class Column:
    """One GPU: its budget, the answer, and the batch sizes looked at.

    Attributes:
        reserved: at the answer, within the budget; where nothing fits, with memory to spare.
        fits: every batch asked for fits; None where none was asked for.
    """

    name: str
    gpu: GPU
    estimate: Estimate
    answer: BatchAnswer
    reserved: int
    rows: tuple[Row, ...]
    fits: bool | None

    @property
    def budget(self) -> Budget:
        """What the answer was found for."""
        return self.answer.budget


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that is shown.

    Attributes:
        sums: torchinfo's, or None.
    """

    target: Target
    plan: Plan
    columns: tuple[Column, ...]
    sums: LayerSums | None
    notes: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """The answer of the exit status: each batch asked for fits; if none was, any does."""
        if not self.plan.asked:
            return True
        return all(
            column.answer.batch > 0 if column.fits is None else column.fits
            for column in self.columns
        )

    def modules(self) -> dict[str, int]:
        """Bytes by module at the peak of the first GPU's last batch size."""
        column = self.columns[0]
        return column.estimate.by_module(column.rows[-1].batch)


def make_report(target: Target, plan: Plan, progress: Callable[[str], None]) -> Report:
    """Trace, solve, and collect what there is to say.

    Raises:
        BatchfitError: the target cannot be traced as asked.
    """
    notes = list(target.notes)
    if not plan.named:
        budgets = "kernels" if plan.asked else "kernels and budget"
        notes.append(f"no GPU was named: {budgets} are those of the {plan.gpus[0].name}")
    traced: dict[tuple[Any, ...], Estimate] = {}
    columns = []
    for gpu, budget in zip(plan.gpus, plan.budgets, strict=True):
        # What a trace and its answers depend on: GPUs that share it share a trace.
        kind = (gpu.vendor, gpu.capability, gpu.sm_count, gpu.total_bytes)
        if kind not in traced:
            traced[kind] = estimate(
                target.workload, gpu=gpu, attention=plan.attention, allocator=plan.allocator,
                traced_at=plan.traced_at, progress=progress,
            )  # fmt: skip
        progress(f"{gpu.name}: looking for the largest batch")
        columns.append(_column(gpu, traced[kind], budget, plan))
    progress("adding up the layers")
    sums, why = _sums(columns[0].estimate)
    for column in columns:
        if column.gpu.note and plan.named:
            read = column.gpu.note.startswith("'")  # "'a100' is read as ..."
            notes.append(column.gpu.note if read else f"{column.name}: {column.gpu.note}")
        notes.extend(n for n in column.estimate.notes if n != column.estimate.gpu.note)
    notes.extend(why)
    return Report(target, plan, tuple(columns), sums, tuple(dict.fromkeys(notes)))


def _column(gpu: GPU, found: Estimate, budget: Budget, plan: Plan) -> Column:
    answer = found.answer(budget, plan.power_of_two, plan.multiple_of, plan.max_batch)
    rows = []
    for batch in plan.batches or _shown(answer, plan.smallest, found.affine):
        run = found.within(batch, budget)
        room = budget.bytes if run.oom is None and run.skipped else None
        row = Row(
            batch=batch, gpu=gpu.name, peak=found.replay(batch, room).peak_allocated,
            least=found.peak_range(batch)[0], reserved=found.reserved(batch),
            breakdown=found.breakdown(batch, room), moment=found.peak_moment(batch, room),
            fits=run.oom is None, reserved_here=_reserved(found, batch, budget),
            out_of_memory=found.out_of_memory(batch, budget),
        )  # fmt: skip
        rows.append(row)
    fits = all(row.fits for row in rows) if plan.batches else None
    reserved = _reserved(found, answer.batch, budget) if answer.batch else answer.reserved
    return Column(gpu.name, gpu, found, answer, reserved, tuple(rows), fits)


def _reserved(found: Estimate, batch: int, budget: Budget) -> int:
    """What would be reserved on that GPU: near the limit the allocator gives back what it caches.

    Where the batch does not fit, it is what a GPU with memory to spare would show.
    """
    run = found.within(batch, budget)
    return found.reserved(batch) if run.oom is not None else run.peak_reserved


def _shown(answer: BatchAnswer, smallest: int, affine: bool) -> tuple[int, ...]:
    """Batch sizes for the table where the user names none.

    >>> from types import SimpleNamespace as A
    >>> _shown(A(batch=280), 1, True), _shown(A(batch=0), 8, True)
    ((1, 64, 128, 256, 280), (8,))
    """
    if not answer.batch:
        return (smallest,)
    if not affine:  # each size costs a trace
        return tuple(dict.fromkeys((smallest, answer.batch)))
    top = answer.batch
    if top > ANY:
        top = _LARGEST_SHOWN
    powers = [2**n for n in range(1, top.bit_length()) if smallest < 2**n < top]
    return tuple(dict.fromkeys((smallest, *powers[-_POWERS:], top)))


def _sums(found: Estimate) -> tuple[LayerSums | None, list[str]]:
    try:
        sums = found.layers
    except TraceError as error:
        return None, [f"no torchinfo sums: {error}"]
    if sums is None:
        return None, ["no torchinfo sums: a step function has no one model"]
    return sums, []


def short_by(peak: int, reserved: int, budget: Budget) -> int:
    """Bytes missing where a batch does not fit: of those allocated, else of those reserved."""
    return (peak if peak > budget.bytes else reserved) - budget.bytes


def as_json(report: Report) -> dict[str, Any]:
    """The report as one JSON object; docs/json.md describes every field."""
    sums = report.sums
    return {
        "schema": SCHEMA,
        "target": report.target.text,
        "workload": {
            **dict.fromkeys(WORKLOAD_FIELDS),
            **report.target.workload.describe(),
            "inputs": report.target.inputs or None,
        },
        "allocator": report.plan.settings or None,
        "batches": [_row_json(row, report.plan.asked) for c in report.columns for row in c.rows],
        "gpus": [_column_json(column, report.plan.asked) for column in report.columns],
        "torchinfo": None if sums is None else {
            "parameters_bytes": sums.parameters,
            "gradients_bytes": sums.gradients,
            "optimizer_state_bytes": sums.optimizer_state,
            "activations_per_sample_bytes": sums.activations_per_sample,
        },
        "layers": _layers_json(report) if report.plan.layers else None,
        "modules": [{"path": path, "bytes": size} for path, size in report.modules().items()]
        if report.plan.layers else None,
        "notes": list(report.notes),
    }  # fmt: skip


def _row_json(row: Row, asked: bool) -> dict[str, Any]:
    return {
        "batch": row.batch,
        "gpu": row.gpu,
        "peak_allocated_bytes": row.peak,
        "peak_without_workspaces_bytes": row.least,
        "peak_reserved_bytes": row.reserved,
        "breakdown": {c.value.replace(" ", "_"): row.breakdown.get(c, 0) for c in Category},
        "peak_moment": {
            "phase": str(row.moment.phase),
            "step": row.moment.step,
            "operator": row.moment.operator,
            "module": row.moment.module,
        },
        "fits": row.fits if asked else None,
        "reserved_in_budget_bytes": row.reserved_here if row.fits else None,
        "out_of_memory": row.out_of_memory if asked else None,
    }


def _column_json(column: Column, asked: bool) -> dict[str, Any]:
    answer = column.answer
    return {
        "name": column.name,
        "total_bytes": column.gpu.total_bytes,
        "context_bytes": column.budget.context,
        "margin_bytes": column.budget.margin,
        "budget_bytes": column.budget.bytes,
        "largest_batch": answer.batch,
        "largest_batch_with_workspaces": answer.with_workspaces,
        "outcome": answer.outcome.name.lower(),
        "peak_allocated_bytes": answer.peak,
        "peak_reserved_bytes": answer.reserved,
        "short_by_bytes": 0 if answer.batch
        else short_by(answer.peak, answer.reserved, answer.budget),
        "fits": column.fits if asked else None,
        "reserved_in_budget_bytes": column.reserved if answer.batch else None,
    }  # fmt: skip


def _layers_json(report: Report) -> list[dict[str, Any]] | None:
    if report.sums is None:
        return None
    return [
        {
            "path": layer.path,
            "kind": layer.kind,
            "depth": layer.depth,
            "parameters": layer.parameters,
            "output_bytes_per_sample": layer.output_bytes_per_sample,
        }
        for layer in report.sums.layers
    ]
