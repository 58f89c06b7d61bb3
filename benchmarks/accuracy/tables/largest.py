"""max_batch.csv: does the batch that fitted fit, and does the one that failed fail?

What lies outside the allocator is one figure per GPU, not per row: the context that the library's
catalogue derives from the number of SMs. The total is the row's own where it gives one.
"""

from __future__ import annotations

from benchmarks.accuracy.entries import Answer, Entry, Question, read_csv
from benchmarks.accuracy.jobs import litgpt
from benchmarks.accuracy.jobs.base import Job
from benchmarks.accuracy.jobs.largest import JOBS as LARGEST
from benchmarks.accuracy.jobs.largest import TOTALS

from batchfit.estimator import Estimate, find_gpu
from batchfit.estimator.gpus import GPU

JOBS = {**LARGEST, **litgpt.LARGEST}
NOT_BUILT: dict[str, str] = {
    "timm3090_": "in the timm table, with its job",
    "t4_resnet50_resid": "what earlier cells held (1.1 GB) is inferred from these very numbers",
}


def _not_built(row: dict[str, str]) -> str:
    if row["id"] in JOBS:
        return ""
    found = [reason for start, reason in NOT_BUILT.items() if row["id"].startswith(start)]
    if found:
        return found[0]
    return "its job is not fully known" if row["confidence"] != "high" else "no job is written"


def entries(name: str) -> list[Entry]:
    return [
        Entry(
            name, row["id"], row["model"].split(",")[0], "fits or fails", row["confidence"],
            JOBS[row["id"]].environment if row["id"] in JOBS else "", _not_built(row),
            {"fitted": row["fits_batch_per_gpu"], "failed": row["oom_batch_per_gpu"]},
        )
        for row in read_csv("max_batch.csv")
    ]  # fmt: skip


def gpu_of(job: Job) -> GPU:
    return job.gpu if isinstance(job.gpu, GPU) else find_gpu(job.gpu)


def bracket(e: Estimate, fitted: int, failed: int, budget: int) -> Answer:
    """Whether the answer is right: runs where it ran, fails where it failed; 0 is unknown."""
    answer: Answer = {
        "budget": budget, "fitted": fitted or None, "failed": failed or None,
        "predicted_largest": e.largest_batch(budget=budget),
    }  # fmt: skip
    off, right = 0, True
    for what, batch, runs in (("need_fitted", fitted, True), ("need_failed", failed, False)):
        if batch:
            answer[what] = e.needed(batch)
            if (e.replay(batch, budget).oom is None) is not runs:
                off, right = answer[what] - budget, False
    return {**answer, "off": off, "off_pct": round(100 * off / budget, 2), "right": right}


def questions(entry: Entry) -> list[Question]:
    job = JOBS[entry.row]
    return [Question(job, int(entry.facts[key] or 0)) for key in ("fitted", "failed")]


def budget_of(entry: Entry) -> int:
    """Bytes that PyTorch may reserve on the row's card."""
    gpu = gpu_of(JOBS[entry.row])
    return TOTALS.get(entry.row, gpu.total_bytes) - gpu.context_bytes


def solve(entry: Entry) -> Answer:
    ran, failed = questions(entry)
    found = bracket(ran.job.estimate(), ran.batch, failed.batch, budget_of(entry))
    return {"gpu": gpu_of(ran.job).name, **found}
