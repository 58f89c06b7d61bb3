"""Make an estimate: two traces, one timeline."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from torch import nn

from .allocator import AllocatorSettings
from .answer import TRACED_BATCHES
from .cuda_rules import BACKENDS, Backend
from .errors import WorkloadError
from .estimate import Estimate
from .gpus import GPU, find_gpu
from .solve import check_batch
from .timeline import deviations, merge
from .tracing import WORKSPACES, TraceOptions, trace
from .workload import Workload

#: Which GPU's kernels are assumed where none is named: the most common data-centre card.
DEFAULT_GPU = "A100 80GB"


def estimate(
    workload: Workload | nn.Module,
    example_inputs: Any = None,
    *,
    gpu: str | GPU | None = None,
    attention: Backend | None = None,
    workspaces: bool | Collection[str] = True,
    allocator: str | AllocatorSettings | None = None,
    traced_at: tuple[int, int] = TRACED_BATCHES,
    progress: Callable[[str], None] | None = None,
    **options: Any,
) -> Estimate:
    """Predict the GPU memory of a training step, without a GPU.

    Args:
        workload: a :class:`Workload`; or, in the short form, a module that exists.
        example_inputs: with a module: one batch, batch dimension 0 (see ``Workload.inputs``).
        gpu: decides kernels, workspaces and the budget; None takes an A100 80GB.
        attention: an attention kernel to prefer ("flash", "efficient", "cudnn", "math").
        workspaces: count what no operator shows: all kinds of it, none, or some of
            :data:`WORKSPACES` ("cublas", "kernels", "transposes", "convolutions").
        allocator: settings in the syntax of PYTORCH_ALLOC_CONF; None takes the environment's.
        traced_at: the two batch sizes that are traced; others than 2 and 3 for code that takes only
            some sizes.
        progress: told what is being done.
        **options: with a module: further attributes of :class:`Workload` (loss, optimizer, ...).

    Raises:
        WorkloadError, TargetError: the workload or a name cannot be used.
        TraceError, DataDependentError: the step cannot be traced.

    >>> import torch
    >>> e = estimate(nn.Linear(1024, 1024), torch.empty(8, 1024), optimizer="adamw", loss="mse")
    >>> sum(e.breakdown(64).values()) == e.peak(64)
    True
    """
    workload = _as_workload(workload, example_inputs, options)
    if attention is not None and attention not in BACKENDS:
        raise WorkloadError(f"attention must be one of {', '.join(BACKENDS)}; found {attention!r}")
    notes = []
    if gpu is None:
        notes.append(f"no GPU was named: kernels and budget are those of the {DEFAULT_GPU}")
    if allocator is None:
        allocator = AllocatorSettings.from_environment()
    elif isinstance(allocator, str):
        allocator = AllocatorSettings.parse(allocator)
    chosen = TraceOptions(
        find_gpu(DEFAULT_GPU if gpu is None else gpu), attention, _kinds(workspaces)
    )
    traces = []
    if len(traced_at) != 2 or check_batch(traced_at[0]) == check_batch(traced_at[1]):
        raise WorkloadError(f"traced_at must be two different batch sizes, found {traced_at!r}")
    for batch in traced_at:
        if progress is not None:
            progress(f"tracing at batch {batch}")
        traces.append(trace(workload, batch, chosen))
    timeline = merge(*traces)
    if timeline is not None and timeline.suspect():
        third = trace(workload, sum(traced_at), chosen)
        if deviations(timeline, third) != []:
            timeline = None
    if timeline is None:
        notes.append(
            f"the step takes different paths at batch {traced_at[0]} and {traced_at[1]}, "
            "or its sizes do not grow in proportion; each batch size was traced by itself"
        )
    elif not timeline.grows():
        notes.append(
            "nothing grows with the batch size: check that the inputs (or step(batch)) use it"
        )
    return Estimate(workload, chosen, timeline, traces, notes, allocator)


def _kinds(workspaces: bool | Collection[str]) -> tuple[str, ...]:
    if isinstance(workspaces, bool):
        return WORKSPACES if workspaces else ()
    if isinstance(workspaces, str) or not set(workspaces) <= set(WORKSPACES):
        raise WorkloadError(
            f"workspaces must be True, False or some of {', '.join(WORKSPACES)}; "
            f"found {workspaces!r}"
        )
    return tuple(kind for kind in WORKSPACES if kind in workspaces)


def _as_workload(workload: Any, example_inputs: Any, options: dict[str, Any]) -> Workload:
    if isinstance(workload, Workload):
        if example_inputs is not None or options:
            given = ", ".join(
                [*options, *(["example_inputs"] if example_inputs is not None else [])]
            )
            raise WorkloadError(
                f"a Workload describes the whole job already; it does not go with {given}"
            )
        return workload
    if not isinstance(workload, nn.Module):
        raise WorkloadError(
            "estimate() takes a Workload, or a module and example inputs; found "
            f"{type(workload).__name__}"
        )
    try:
        return Workload(
            model=workload, inputs=example_inputs, name=type(workload).__name__, **options
        )
    except TypeError as error:
        raise WorkloadError(str(error).replace("Workload.__init__() ", "estimate() ")) from error
