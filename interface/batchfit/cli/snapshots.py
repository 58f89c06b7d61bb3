"""``batchfit snapshot``: write a predicted memory snapshot, or read a real one to compare."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.text import Text

from batchfit.estimator import GPU, Estimate, estimate, find_gpu
from batchfit.estimator.snapshot import SnapshotError, load_snapshot, write_snapshot
from batchfit.estimator.snapshot_compare import SnapshotComparison, compare
from batchfit.estimator.solve import check_batch

from .console import facts, plain_bytes, render
from .plan import DEFAULT_GPU, allocator_settings
from .targets import Target, find_target
from .text import settings_in_words


@dataclass(frozen=True, slots=True)
class SnapshotJob:
    """A target traced on one GPU, and the batch size that is looked at.

    Attributes:
        settings: what the user wrote of the allocator's settings; may be empty.
        notes: what was assumed.
    """

    target: Target
    gpu: GPU
    batch: int
    settings: str
    estimate: Estimate
    notes: tuple[str, ...]

    @property
    def words(self) -> str:
        """The inputs and settings in words."""
        return settings_in_words(self.target, self.settings)

    def write(self, path: str) -> None:
        """Write the predicted snapshot."""
        write_snapshot(self.estimate, self.batch, path)


@dataclass(frozen=True, slots=True)
class Compared:
    """A real snapshot beside the prediction.

    Attributes:
        path: of the real one, as the user wrote it.
        notes: the job's, and what the snapshot itself gives reason to say.
    """

    path: str
    job: SnapshotJob
    found: SnapshotComparison
    notes: tuple[str, ...]


def check_output(path: str, force: bool) -> None:
    """Refuse, before anything slow is done, a file that should not or cannot be written.

    Raises:
        SnapshotError: it exists and ``--force`` was not given, or its folder does not.
    """
    file = Path(path)
    if file.is_dir():
        raise SnapshotError(f"cannot write the snapshot {path}: it is a folder; name a file in it")
    if not file.parent.is_dir():
        raise SnapshotError(f"cannot write the snapshot {path}: there is no folder {file.parent}")
    if file.exists() and not force:
        raise SnapshotError(f"{path} exists already; --force overwrites it")


def trace_job(
    text: str, given: dict[str, Any], stack: ExitStack, progress: Callable[[str], None]
) -> SnapshotJob:
    """Find and trace a target for one batch size.

    Raises:
        BatchfitError: anything that the user must settle.
    """
    gpu, batch = find_gpu(given.get("gpu", DEFAULT_GPU)), check_batch(given["batch"])
    allocator = allocator_settings(given)
    progress(f"loading {text}")
    target = find_target(text, given, stack)
    made = estimate(
        target.workload, gpu=gpu, attention=given.get("attention"), allocator=allocator,
        progress=progress,
    )  # fmt: skip
    made.confirm(batch)
    notes = list(target.notes)
    if "gpu" not in given:
        notes.append(f"no GPU was named: kernels are those of the {gpu.name}")
    elif gpu.note.startswith("'"):  # "'a100' is read as ..."; others are about its memory
        notes.append(gpu.note)
    notes += [note for note in made.notes if note != gpu.note]
    notes = list(dict.fromkeys(notes))
    return SnapshotJob(target, gpu, batch, given.get("allocator", ""), made, tuple(notes))


def snapshot_text(job: SnapshotJob, path: str) -> str:
    """What is printed once the file is written: what it holds, and how to open it."""
    page = Path(path).with_suffix(".html")
    command = (
        f"python -m torch.cuda._memory_viz trace_plot {shlex.quote(path)} "
        f"-o {shlex.quote(str(page))}"
    )
    moment = job.estimate.peak_moment(job.batch)
    where = f" in {moment.module}" if moment.module else ""
    operator = moment.operator.removeprefix("aten::")
    size = plain_bytes(Path(path).stat().st_size)
    rows = [
        ("snapshot", f"{path}, {size}, written"),
        ("peak reserved", plain_bytes(job.estimate.reserved(job.batch))),
        ("peak allocated", plain_bytes(job.estimate.peak(job.batch))),
        ("reached", f"step {moment.step}, {moment.phase}, {operator}{where}"),
        *(("note", note) for note in job.notes),
    ]
    return render(
        Text(f"{job.target.text} on {job.gpu.name}, batch {job.batch}", style="bold"),
        Text(job.words, style="dim"),
        "",
        facts(rows),
        "",
        "To open it, drop it onto https://pytorch.org/memory_viz, or make a page of it:",
        Text(command, no_wrap=True, overflow="ignore"),
    )


def compare_with(
    path: str,
    text: str,
    given: dict[str, Any],
    stack: ExitStack,
    progress: Callable[[str], None],
) -> Compared:
    """Read a real snapshot, predict the job, and lay one beside the other.

    Raises:
        BatchfitError: anything that the user must settle; the file is looked at first.
    """
    progress(f"reading {path}")
    snapshot = load_snapshot(path)
    job = trace_job(text, given, stack, progress)
    progress("comparing")
    try:
        found = compare(job.estimate, job.batch, snapshot)
    except SnapshotError as error:
        raise SnapshotError(f"cannot compare with {path}: {error}") from error
    notes = [*job.notes, *_remarks(snapshot, job, found)]
    return Compared(path, job, found, tuple(notes))


def _remarks(snapshot: dict[str, Any], job: SnapshotJob, found: SnapshotComparison) -> list[str]:
    """What may explain a difference."""
    remarks = []
    settings = snapshot.get("allocator_settings")
    if isinstance(settings, dict):
        real = settings.get("expandable_segments")
        if isinstance(real, bool) and real is not job.estimate.allocator.expandable_segments:
            remarks.append(
                f"the real job ran with expandable_segments:{real}, which changes what is "
                f"reserved; predict that with --allocator expandable_segments:{real}"
            )
    if found.older:
        remarks.append(
            f"{found.older} of the {found.real_blocks} real blocks are older than the record, so "
            "they have no frames and no order; record from before the model is made"
        )
    return remarks
