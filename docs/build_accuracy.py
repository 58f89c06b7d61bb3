"""Write docs/accuracy.md from the result tables of the benchmarks.

    python docs/build_accuracy.py [--check]

Nothing is measured here: each section names the script whose output it shows.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.accuracy import probes, report  # noqa: E402
from benchmarks.accuracy.entries import entries  # noqa: E402
from benchmarks.accuracy.tables.timm import BUDGET, RANGE_GIB, judge  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "accuracy.md"
MIB, GIB = 2**20, 2**30
Records = list[dict[str, Any]]

HEAD = """# How far off is it?

Every figure here comes from a script in this repository; the measurements are public ones, with
their sources in [tests/data/truth/README.md](../tests/data/truth/README.md) and
[tests/data/oracle/README.md](../tests/data/oracle/README.md). The page is written by
`docs/build_accuracy.py` from `benchmarks/results`. No constant is fitted to a row.

`python -m benchmarks.accuracy` does it all: each row's job is built as its source built it, with
the libraries of its time, predicted in a process of its own, and compared."""


def load(name: str) -> Any:
    path = RESULTS / name
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def section(*parts: str) -> str:
    return "\n\n".join(part for part in parts if part)


def figures(summary: report.Summary) -> list[str]:
    return [
        str(summary.rows), f"{summary.median:.3f} %", f"{summary.p90:.2f} %",
        f"{summary.worst:.2f} %", f"{summary.under:.0%}",
    ]  # fmt: skip


FIGURES = ["rows", "median", "p90", "worst", "predicted too little"]


def row_name(record: dict[str, Any]) -> str:
    return str(record["id"]).split("/", 1)[1]


def in_bytes(records: Records) -> str:
    known = report.causes()
    body = [
        [row_name(r), r["metric"].split(" (")[0], f"{r['measured'] / MIB:,.1f}",
         f"{r['predicted'] / MIB:,.1f}", f"{r['error_pct']:+.3f} %", known.get(r["id"], "")]
        for r in records if report.in_bytes(r)
    ]  # fmt: skip
    return table(["row", "metric", "measured MiB", "predicted MiB", "error", "cause"], body)


def summary_of(rows: Records) -> str:
    groups = [[*key, *figures(s)] for key, s in report.groups(rows).items()]
    return table(["family", "metric", *FIGURES], groups)


def whole(records: Records) -> str:
    rows = []
    high = [r for r in report.of_table(records, "peaks") if r["confidence"] == "high"]
    convolutional = ("vision CNN", "video CNN", "segmentation")
    for name, chosen in (
        ("measured peaks, high confidence", high),
        ("of them without convolutions", [r for r in high if r["family"] not in convolutional]),
        ("single operators on an A100", report.of_table(records, "operators")),
        ("recorded steps", report.of_table(records, "steps")),
        ("growth with the batch on an H100", report.of_table(records, "scaling")),
    ):
        summary = report.summarize(r["error_pct"] for r in chosen if report.in_bytes(r))
        if summary:
            rows.append([name, *figures(summary)])
    answers = []
    for name, key in (("which batch ran, which failed", "largest"), ("timm's brackets", "timm"),
                      ("all of timm's brackets", "timm-all")):  # fmt: skip
        right, asked = report.right(report.of_table(records, key))
        if asked:
            answers.append(f"{name}: {right} of {asked} right ({right / asked:.1%})")
    return section(
        "## In short", table(["", *FIGURES], rows), "\n".join(f"- {line}" for line in answers)
    )


def missed(records: Records) -> str:
    rows = [
        [r["id"], f"{r['error_pct']:+.2f} %" if report.in_bytes(r) else f"{r['off_pct']:+.2f} % of "
         "the budget", cause]
        for r, cause in report.misses(records)
    ]  # fmt: skip
    return section(
        "## What is off, and why",
        "Rows in bytes that are off by more than 3 %, and wrong answers about a batch.",
        table(["row", "off", "cause"], rows),
    )


def measured(records: Records) -> str:
    rows = report.of_table(records, "peaks")
    return section("## Measured peaks of known jobs", summary_of(rows), in_bytes(rows))


def operators(records: Records) -> str:
    rows = report.of_table(records, "operators")
    exact = sum(abs(r["error_pct"]) <= 0.5 for r in rows if report.in_bytes(r))
    total = sum(report.in_bytes(r) for r in rows)
    return section(
        "## Single operators",
        f"Liger-Kernel's benchmark data on an A100. {exact} of {total} within 0.5 %.",
        in_bytes(rows),
    )


def steps(records: Records) -> str:
    body = [
        [row_name(r), f"{r['measured'] / MIB:,.1f}", f"{r['predicted'] / MIB:,.1f}",
         f"{r['error_pct']:+.3f} %", f"{r['matched_share']:.2%}"]
        for r in report.of_table(records, "steps") if report.in_bytes(r)
    ]  # fmt: skip
    return section(
        "## Recorded steps, block by block",
        "Public memory snapshots; the share of the bytes alive at the peak that the prediction has "
        "as a block of the same size.",
        table(["step", "measured MiB", "predicted MiB", "error", "matched"], body),
    )


def scaling(records: Records) -> str:
    rows = [r for r in report.of_table(records, "scaling") if "points" in r]
    body = [
        [row_name(r), f"{r['points'][0]['batch']} to {r['points'][-1]['batch']}",
         f"{r['measured'] / MIB:,.0f}", f"{r['predicted'] / MIB:,.0f}", f"{r['error_pct']:+.3f} %"]
        for r in rows
    ]  # fmt: skip
    return section(
        "## Growth with the batch on an H100",
        "milabench's memory of the process by nvidia-smi; compared with reserved bytes.",
        table(["job", "batch", "measured MiB", "predicted MiB", "error"], body),
    )


def largest(records: Records) -> str:
    body = [
        [row_name(r), r["gpu"], str(r["fitted"] or ""), str(r["failed"] or ""),
         str(r["predicted_largest"]), "yes" if r["right"] else f"off by {r['off_pct']:.1f} %"]
        for r in report.of_table(records, "largest") if "right" in r
    ]  # fmt: skip
    return section(
        "## The largest batch",
        "Public reports of what ran and what failed. What lies outside the allocator is the "
        "catalogue's context.",
        table(["row", "GPU", "ran", "failed", "predicted largest", "right"], body),
    )


def brackets(records: Records, name: str, title: str) -> str:
    rows = [r for r in report.of_table(records, name) if "right" in r]
    if not rows:
        return ""
    shares = ", ".join(
        f"{gib:.1f}: {sum(judge(r, round(gib * GIB))['right'] for r in rows)}" for gib in RANGE_GIB
    )
    right, asked = report.right(rows)
    waiting = len(entries((name,))) - sum(r["id"].startswith(f"{name}/") for r in records)
    open_rows = (
        f" The other {waiting} rows of the file are still to be run (`--table {name}` goes on); "
        "those that were are a random choice."
        if waiting
        else ""
    )
    known = report.causes()
    body = [
        [row_name(r), str(r["fitted"]), str(r["failed"]), f"{r['off'] / MIB:+,.0f} MiB",
         f"{r['off_pct']:+.1f} %", report.cause_of(r["id"], known)]
        for r in rows if not r["right"]
    ]  # fmt: skip
    return section(
        f"## {title}",
        f"On one budget of {BUDGET / GIB:.1f} GiB for the card, does the largest batch that ran "
        f"fit, and the next size not? {right} of {asked} right.{open_rows} Right with other "
        f"budgets, in GiB: {shares}. The misses:",
        table(["model", "ran", "failed", "off", "", "cause"], body),
    )


def peer_table(rows: list[report.PeerRow], first: str) -> str:
    body = []
    for r in rows:
        errors = (
            [f"{v:.2f} %" for v in (r.errors.median, r.errors.p90, r.errors.worst)]
            if r.errors
            else ["", "", ""]
        )
        share = f"{r.right} of {r.judged}" if r.judged else ""
        seconds = f"{r.seconds:.1f}" if r.seconds else ""
        body.append([r.name, f"{r.answered} of {r.asked}", *errors, share, seconds, r.reason])
    header = [first, "answered", "median", "p90", "worst", "largest batch right", "s per job",
              "most often, where it had no answer"]  # fmt: skip
    return table(header, body)


def peers(result: dict[str, Any]) -> str:
    rows = report.peer_rows(result["rows"], result["peers"])
    curves = probes.rows(result["rows"])
    return section(
        "## Other tools on the same jobs",
        "From their published packages, asked as their documentation shows; a rule that names a "
        "batch is right if that batch ran and the one that failed is larger. Seconds are medians "
        "in one process, without its start; batchfit's hold both traces and the replay.",
        peer_table(rows, "tool") if len(rows) > 1 else "Not asked in this run.",
        "And curves through measured points: the smallest batches are the probes, the largest "
        "batch of each series is predicted.",
        peer_table(curves, "curve"),
    )


def not_built(records: Records) -> str:
    reasons: dict[str, list[str]] = {}
    for r in records:
        reason = r.get("not_built") or r.get("error")
        if reason:
            reasons.setdefault(reason, []).append(r["id"])
    rows = [[reason, str(len(ids)), ", ".join(ids)] for reason, ids in reasons.items()]
    return section("## Not compared", table(["why", "rows", "which"], rows))


def breadth() -> str:
    rows = load("breadth.json")
    families: dict[str, Records] = {}
    for row in rows:
        families.setdefault(row["model"].split(":")[0], []).append(row)
    body = [
        [name, str(len(chosen)), str(sum(r["status"] == "ok" for r in chosen)),
         str(sum(not r.get("affine", True) for r in chosen))]
        for name, chosen in families.items()
    ]  # fmt: skip
    return section(
        "## Breadth",
        "`python benchmarks/breadth.py`: models of public libraries that are traced with AMP "
        "and AdamW; what does not trace ends in an error of ours.",
        table(["library", "models", "traced", "of them not affine in the batch"], body),
    )


def speed() -> str:
    rows = load("speed.json")["rows"]

    def cell(row: dict[str, Any], key: str, digits: int = 2) -> str:
        value = row.get(key)
        return "" if value is None else f"{value:.{digits}f}" if isinstance(value, float) else value

    body = [
        [r["model"], cell(r, "both_traces_s"), cell(r, "answer_s"),
         cell(r, "real_forward_backward_s"), cell(r, "mem_tracker_fake_s"), cell(r, "torchinfo_s"),
         cell(r, "peak_of_a_new_batch_ms", 1), cell(r, "timeline_peak_ms"),
         f"{r['process_peak_bytes'] / 2**30:.2f} GiB" if "process_peak_bytes" in r else ""]
        for r in rows
    ]  # fmt: skip
    return section(
        "## Speed",
        "`python benchmarks/speed.py` on two CPU cores. The answer includes a third trace. A "
        "new batch size is replayed through the allocator's twin; a timeline alone is faster.",
        table(
            ["model", "both traces s", "answer s", "one real step s", "MemTracker, fake s",
             "torchinfo s", "peak of a new batch ms", "timeline alone ms", "process"], body,
        ),
    )  # fmt: skip


def build() -> str:
    """The page."""
    result = load("accuracy.json")
    rows = result["rows"]
    parts = [
        HEAD, whole(rows), missed(rows), peers(result), measured(rows), operators(rows),
        steps(rows), scaling(rows), largest(rows),
        brackets(rows, "timm", "timm's training brackets on an RTX 3090, a sample"),
        brackets(rows, "timm-all", "All of timm's training brackets"), not_built(rows),
        breadth() if load("breadth.json") else "", speed() if load("speed.json") else "",
    ]  # fmt: skip
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail where the page is out of date")
    options = parser.parse_args()
    page = build()
    if options.check:
        return 0 if PAGE.exists() and PAGE.read_text(encoding="utf-8") == page else 1
    PAGE.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
