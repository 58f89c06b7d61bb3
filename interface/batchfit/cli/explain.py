"""``batchfit explain``: why PyTorch, nvidia-smi and torchinfo name different numbers."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from batchfit.estimator.explain import Reconciliation, explain

from .console import facts, plain_bytes, render
from .snapshots import SnapshotJob

SCHEMA = "batchfit.explain/1"


def explanation_json(job: SnapshotJob) -> dict[str, Any]:
    """The lines as one JSON object; docs/json.md describes every field."""
    found = asdict(explain(job.estimate, job.batch))
    batch = found.pop("batch")
    return {
        "schema": SCHEMA, "target": job.target.text, "gpu": job.gpu.name, "batch": batch,
        **{f"{name}_bytes": size for name, size in found.items()}, "notes": list(job.notes),
    }  # fmt: skip


def explanation_text(job: SnapshotJob) -> str:
    """The lines as text."""
    found = explain(job.estimate, job.batch)
    title = f"{job.target.text} on {job.gpu.name}, batch {job.batch}"
    lines = [(name, f"{plain_bytes(size):>9}  {meaning}") for name, size, meaning in found.rows()]
    below = [("workspace", _workspace(found)), *(("note", note) for note in job.notes)]
    return render(title, job.words, "", facts(lines), "", facts(below))


def _workspace(found: Reconciliation) -> str:
    return (
        f"{plain_bytes(found.workspace)} of what is allocated are taken by libraries and kernels "
        "for themselves"
    )
