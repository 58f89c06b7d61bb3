"""Recorded training steps (tests/data/oracle/steps): the peak, and the blocks alive there."""

from __future__ import annotations

from benchmarks.accuracy.entries import ORACLE, Answer, Entry, Question, compared
from benchmarks.accuracy.jobs.base import Job
from tests.recorded_jobs import JOBS
from tests.snapshots import recorded_step, step_snapshot

from batchfit.estimator.snapshot_compare import compare

STEPS = ORACLE / "steps"


def entries(name: str) -> list[Entry]:
    found = []
    for path in sorted(STEPS.glob("*.json.gz")):
        row = path.name.removesuffix(".json.gz")
        real = recorded_step(row)["step"]["real"]
        facts = {"measured": real["peak_allocated"]}
        found.append(Entry(name, row, "recorded step", "peak_allocated", "high", facts=facts))
    return found


def questions(entry: Entry) -> list[Question]:
    make, batch, gpu = JOBS[entry.row]
    return [Question(Job(make, batch, gpu), batch)]


def solve(entry: Entry) -> Answer:
    (asked,) = questions(entry)
    found = compare(asked.job.estimate(), asked.batch, step_snapshot(recorded_step(entry.row)))
    return compared(
        entry.facts["measured"], found.predicted_allocated,
        matched_share=round(found.matched_share, 5), reserved=found.predicted_reserved,
    )  # fmt: skip
