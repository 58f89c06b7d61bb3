"""timm's public training brackets on an RTX 3090: does the prediction lie between what ran and what
failed?

**One budget for all rows**: 22.1 GiB. It was not fitted: public OOM messages of the same card with
CUDA 11.3 leave 21.8 to 22.5 GiB to PyTorch, and this is the value that the design of this library
named before the table was made. The report shows the whole range.
"""

from __future__ import annotations

from typing import Any

from benchmarks.accuracy.entries import Answer, Entry, Question, read_csv
from benchmarks.accuracy.jobs import timm
from benchmarks.accuracy.jobs.base import Job

GIB = 2**30
BUDGET = round(22.1 * GIB)
RANGE_GIB = (21.8, 21.9, 22.0, 22.1, 22.2, 22.3, 22.4, 22.5)
FILES = {"timm": "timm_sample.csv", "timm-all": "timm_train_brackets.csv"}


def entries(name: str) -> list[Entry]:
    found = []
    for row in read_csv(FILES[name]):
        layout = "nhwc" if row["channels_last"] == "1" else "nchw"
        again = "differ" in row.get("note", "")
        found.append(
            Entry(
                name, f"{row['model']}_{row['img_size']}_{layout}", row.get("family", "timm"),
                "fits or fails", "medium", timm.ENVIRONMENT,
                f"the source says: {row['note']}" if again else "",
                {
                    "model": row["model"], "size": int(row["img_size"]),
                    "channels_last": row["channels_last"] == "1",
                    "fitted": int(row["recorded_batch"]), "failed": int(row["next_larger_tried"]),
                },
            )
        )  # fmt: skip
    return found


def job_of(entry: Entry) -> Job:
    facts = entry.facts
    return timm.job(facts["model"], facts["size"], facts["channels_last"])


def questions(entry: Entry) -> list[Question]:
    job = job_of(entry)
    return [Question(job, entry.facts["fitted"]), Question(job, entry.facts["failed"])]


def judge(answer: dict[str, Any], budget: int) -> Answer:
    """How far a row is missed, in bytes: above 0 predicts too much, below 0 too little."""
    off = 0
    if answer["need_fitted"] > budget:
        off = answer["need_fitted"] - budget
    elif answer["need_failed"] <= budget:
        off = min(answer["need_failed"] - budget, -1)
    return {"off": off, "off_pct": round(100 * off / budget, 2), "right": off == 0}


def solve(entry: Entry) -> Answer:
    e = job_of(entry).estimate()
    fitted, failed = entry.facts["fitted"], entry.facts["failed"]
    moment = e.peak_moment(fitted)
    answer = {
        "budget": BUDGET, "fitted": fitted, "failed": failed, "need_fitted": e.needed(fitted),
        "need_failed": e.needed(failed), "affine": e.affine,
        "peak_at": f"{moment.phase}: {moment.operator} in {moment.module}",
    }  # fmt: skip
    return {**answer, **judge(answer, BUDGET)}
