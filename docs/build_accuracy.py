"""Write docs/accuracy.md from the result tables of the benchmarks.

    python docs/build_accuracy.py [--check]

Nothing is measured here: each section names the script whose output it shows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "accuracy.md"
MIB = 2**20

HEAD = """# How far off is it?

Every figure here comes from a script in this repository; the measurements are public ones, with
their sources in [tests/data/truth/README.md](../tests/data/truth/README.md) and
[tests/data/oracle/README.md](../tests/data/oracle/README.md). The page is written by
`docs/build_accuracy.py` from `benchmarks/results`. No constant is fitted to a row.
"""


def load(name: str) -> Any:
    path = RESULTS / name
    return json.loads(path.read_text()) if path.exists() else None


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def measured() -> str:
    rows = load("measured_peaks.json")["rows"]
    done = [r for r in rows if "predicted" in r]
    groups = {
        "all": done,
        "without convolutions": [r for r in done if "CNN" not in r["family"]],
    }
    summary = []
    for name, chosen in groups.items():
        errors = sorted(abs(r["error_pct"]) for r in chosen)
        under = sum(r["error_pct"] < -0.01 for r in chosen) / len(chosen)
        summary.append(
            f"- {name}: {len(errors)} rows, median {statistics.median(errors):.3f} %, p90 "
            f"{errors[int(0.9 * (len(errors) - 1))]:.2f} %, worst {errors[-1]:.2f} %, predicted "
            f"too little in {under:.0%}"
        )
    body = [
        [r["id"], r["metric"].split(" (")[0], f"{r['measured'] / MIB:,.1f}",
         f"{r['predicted'] / MIB:,.1f}", f"{r['error_pct']:+.3f} %", r["cause"]]
        for r in done
    ]  # fmt: skip
    missing = ", ".join(r["id"] for r in rows if "predicted" not in r)
    return "\n\n".join(
        [
            "## Measured peaks of known jobs",
            "`python benchmarks/measured/run.py tests/data/truth/measured_peaks.csv`: rows of high "
            "confidence, each built as its source built it, with the libraries of its time.",
            "\n".join(summary),
            table(["row", "metric", "measured MiB", "predicted MiB", "error", "cause"], body),
            f"Not predicted, since their model code cannot be built here: {missing}.",
        ]
    )


def largest() -> str:
    rows = load("max_batch.json")
    body = [
        [r["id"], r["gpu"], str(r.get("fitted") or ""), str(r.get("failed") or ""),
         str(r["predicted_largest"]), "yes" if r["right"] else f"off by {r['off_percent']:.1f} %"]
        for r in rows if "predicted_largest" in r
    ]  # fmt: skip
    right = sum(r.get("right", False) for r in rows)
    asked = len(body)
    return "\n\n".join(
        [
            "## The largest batch",
            "`python benchmarks/max_batch.py tests/data/truth/max_batch.csv`: public reports of "
            "what ran and what failed. What lies outside the allocator is the catalogue's context.",
            f"{right} of {asked} right.",
            table(["row", "GPU", "ran", "failed", "predicted largest", "right"], body),
        ]
    )


# Model -> what is known of the miss.
BRACKET_CAUSES = {
    "sequencer2d_l": "probably not memory: in NCHW the next size ran, predicted to need as much",
    "dpn107": "NHWC only, in NCHW the larger size ran; grouped convolutions suspected, not proven",
    "cait_m48_448": "not found; within 1 % of the budget",
    "xcit_medium_24_p8_384_dist": "not found; within 1 % of the budget",
    "fbnetv3_g": "not found; smaller than any cuDNN workspace",
}


def brackets() -> str:
    result = load("timm_sample.json")
    budget = int(result["budget"])
    misses = [
        [r["model"], r["channels_last"], r["recorded_batch"], r["next_larger_tried"],
         f"{r['off'] / MIB:+,.0f} MiB", f"{100 * r['off'] / budget:+.1f} %",
         BRACKET_CAUSES.get(r["model"], "not found")]
        for r in result["rows"] if r.get("off")
    ]  # fmt: skip
    return "\n\n".join(
        [
            "## timm's training brackets on an RTX 3090",
            "`python benchmarks/timm_brackets.py tests/data/truth/timm_sample.csv`: on one budget "
            f"of {int(result['budget']) / 2**30:.1f} GiB for the card, does the largest batch that "
            "ran fit, and the next size not?",
            f"{result['right']} of {result['comparable']} right. The misses:",
            table(["model", "NHWC", "ran", "failed", "off", "", "cause"], misses),
        ]
    )


def breadth() -> str:
    rows = load("breadth.json")
    families: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        families.setdefault(row["model"].split(":")[0], []).append(row)
    body = [
        [name, str(len(chosen)), str(sum(r["status"] == "ok" for r in chosen)),
         str(sum(not r.get("affine", True) for r in chosen))]
        for name, chosen in families.items()
    ]  # fmt: skip
    return "\n\n".join(
        [
            "## Breadth",
            "`python benchmarks/breadth.py`: models of public libraries that are traced with AMP "
            "and AdamW; what does not trace ends in an error of ours.",
            table(["library", "models", "traced", "of them not affine in the batch"], body),
        ]
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
    return "\n\n".join(
        [
            "## Speed",
            "`python benchmarks/speed.py` on two CPU cores. The answer includes a third trace. A "
            "new batch size is replayed through the allocator's twin; a timeline alone is faster.",
            table(
                ["model", "both traces s", "answer s", "one real step s", "MemTracker, fake s",
                 "torchinfo s", "peak of a new batch ms", "timeline alone ms", "process"], body,
            ),
        ]
    )  # fmt: skip


SECTIONS = {
    "measured_peaks.json": measured, "max_batch.json": largest, "timm_sample.json": brackets,
    "breadth.json": breadth, "speed.json": speed,
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail where the page is out of date")
    options = parser.parse_args()
    parts = [HEAD, *(make() for name, make in SECTIONS.items() if load(name) is not None)]
    page = "\n\n".join(part.strip() for part in parts) + "\n"
    if options.check:
        return 0 if PAGE.exists() and PAGE.read_text() == page else 1
    PAGE.write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
