"""op_memory_a100.csv: peaks of single operators, from Liger-Kernel's benchmark data."""

from __future__ import annotations

import json

from benchmarks.accuracy.entries import Answer, Entry, Question, compared, read_csv
from benchmarks.accuracy.jobs import liger

MIB = 2**20


def _row(values: dict[str, str]) -> str:
    config = json.loads(values["extra_benchmark_config_str"])
    width = f"_D{config['D']}" if "D" in config else ""
    return (
        f"{values['kernel_name']}_{values['kernel_operation_mode']}_{values['x_name']}"
        f"{values['x_value']}{width}"
    )


# The script compiles an embedding at every size, and what torch.compile keeps stays in the process:
# 12.8 and 14.5 GB before these rows began. Their growth from the smallest size is comparable.
BASES = {"embedding_full_V1024_D768", "embedding_full_V1024_D4096"}
HELD = "base of its series: the process still held gigabytes of earlier, compiled benchmarks"


def entries(name: str) -> list[Entry]:
    rows = {_row(row): row for row in read_csv("op_memory_a100.csv")}
    found = []
    for row_id, row in rows.items():
        measured = round(float(row["y_value_50"]) * MIB)
        facts = {
            "measured": measured, "x": int(row["x_value"]), "kernel": row["kernel_name"],
            "mode": row["kernel_operation_mode"],
            "config": json.loads(row["extra_benchmark_config_str"]),
        }  # fmt: skip
        metric = "max_memory_allocated"
        if row["kernel_name"] == "embedding":
            base = next(b for b in BASES if b.endswith(row_id.rpartition("_")[2]))
            metric = "growth of max_memory_allocated"
            facts |= {
                "base": int(rows[base]["x_value"]),
                "measured": measured - round(float(rows[base]["y_value_50"]) * MIB),
            }
        environment = liger.KERNELS[row["kernel_name"]][1]
        found.append(
            Entry(
                name, row_id, "micro-op", metric, "high", environment,
                HELD if row_id in BASES else "", facts,
            )
        )  # fmt: skip
    return found


def questions(entry: Entry) -> list[Question]:
    facts = entry.facts
    wanted = [(facts["x"], 1), *([(facts["base"], -1)] if "base" in facts else [])]
    return [
        Question(liger.job(facts["kernel"], x, facts["config"], facts["mode"]), 1, sign)
        for x, sign in wanted
    ]


def solve(entry: Entry) -> Answer:
    asked = questions(entry)
    made = [q.job.estimate() for q in asked]
    moment = made[0].peak_moment(asked[0].batch)
    predicted = sum(q.sign * e.peak(q.batch) for q, e in zip(asked, made, strict=True))
    return compared(
        entry.facts["measured"], predicted,
        peak_at=f"{moment.phase} of step {moment.step}: {moment.operator}",
    )  # fmt: skip
