"""timm's public training brackets: does what is predicted lie between what ran and what failed?

    python benchmarks/timm_brackets.py tests/data/truth/timm_sample.csv --out sample.jsonl
    python benchmarks/timm_brackets.py tests/data/truth/timm_train_brackets.csv --limit 50

Each row of the CSV says that `recorded_batch` ran on an RTX 3090 and `next_larger_tried` did not.
The job is built as the truth files' README (item 8) says (`timm_job.py`), one process per row, and
two budgets are found: the smallest with which the allocator's twin runs each of the two batches. A
row is right if the budget lies between them.

**One budget for all rows**: 22.1 GiB. It was not fitted: public OOM messages of the same card
with CUDA 11.3 leave 21.8 to 22.5 GiB to PyTorch, and this is the value that the design of this
library named before the table was made. `--budget` shows others; the table prints the whole range.

A row is comparable unless its model cannot be made or traced here, or its note in the CSV says that
the recorded figure was not reproducible. Rows that are in the output file are not run again;
`--timm` chooses the code of the time (0.6.7, kept in a folder of its own) or the installed one.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

GIB = 2**30
MIB = 2**20
BUDGET_GIB = 22.1
RANGE_GIB = (21.8, 21.9, 22.0, 22.1, 22.2, 22.3, 22.4, 22.5)
OLD_TIMM = "0.6.7"
SECONDS = 900  # per row, after which it counts as failed
JOB = Path(__file__).with_name("timm_job.py")


def overlay(folder: Path) -> Path:
    """A folder with timm 0.6.7 in it, installed there if it is missing."""
    if not (folder / "timm").is_dir():
        command = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", str(folder)]
        subprocess.run([*command, f"timm=={OLD_TIMM}"], check=True)
    return folder


def key(row: dict[str, str]) -> str:
    return f"{row['model']}/{row['img_size']}/{row['channels_last']}/{row['recorded_batch']}"


def run(row: dict[str, str], first: Path | None) -> dict[str, Any]:
    """Estimate one row in a process of its own; a crash or a hang is an answer, too."""
    paths = ([str(first)] if first else []) + [os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in paths if p)}
    command = [sys.executable, str(JOB), json.dumps(row)]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return {"error": f"not ready after {SECONDS} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        said = done.stderr.strip().splitlines()
        return {"error": f"exit {done.returncode}: {said[-1][:200] if said else ''}"}
    answer: dict[str, Any] = json.loads(lines[-1])
    return answer


def distance(answer: dict[str, Any], budget: float) -> int:
    """Bytes by which a row is missed: above 0 predicts too much, below 0 too little, 0 is right."""
    if answer["need_recorded"] > budget:
        return int(answer["need_recorded"] - budget)
    if answer["need_larger"] <= budget:
        return int(answer["need_larger"] - budget) or -1
    return 0


def comparable(row: dict[str, Any]) -> bool:
    return "error" not in row and "differ" not in row.get("note", "")


def table(rows: list[dict[str, Any]], budget: float) -> Iterator[str]:
    used = [row for row in rows if comparable(row)]
    misses = [row for row in used if distance(row, budget)]
    for row in sorted(misses, key=lambda r: -abs(distance(r, budget))):
        off = distance(row, budget)
        yield (
            f"miss {row['model']:<44} {row['img_size']:>4} nhwc={row['channels_last']} "
            f"ran {row['recorded_batch']:>3} ({row['need_recorded'] / GIB:6.2f} GiB) "
            f"failed {row['next_larger_tried']:>3} ({row['need_larger'] / GIB:6.2f} GiB) "
            f"{off / MIB:+8.0f} MiB {100 * off / budget:+6.2f} %  {' '.join(row['peak_at'])}"
        )
    for row in rows:
        if not comparable(row):
            yield f"not comparable: {row['model']}: {row.get('error') or row.get('note')}"
    for gib in RANGE_GIB:
        right = sum(not distance(row, gib * GIB) for row in used)
        mark = "  <- stated" if abs(gib * GIB - budget) < 1 else ""
        yield f"budget {gib:.1f} GiB: {right} of {len(used)} right{mark}"
    share = 1 - len(misses) / len(used) if used else 0.0
    yield (
        f"{len(used) - len(misses)} of {len(used)} comparable rows right ({share:.1%}) on one "
        f"budget of {budget / GIB:.2f} GiB; {len(rows) - len(used)} not comparable"
    )


def summary(rows: list[dict[str, Any]], budget: float) -> dict[str, Any]:
    """The table as plain values. Bytes."""
    used = [row for row in rows if comparable(row)]
    keys = ("model", "img_size", "channels_last", "recorded_batch", "next_larger_tried")
    found = []
    for row in rows:
        entry = {name: row[name] for name in keys}
        if comparable(row):
            entry |= {name: row[name] for name in ("need_recorded", "need_larger", "timm", "torch")}
            entry |= {"off": round(distance(row, budget)), "peak_at": row["peak_at"]}
        else:
            entry["not_comparable"] = row.get("error") or row.get("note")
        found.append(entry)
    right = sum(not distance(row, budget) for row in used)
    return {"budget": round(budget), "right": right, "comparable": len(used), "rows": found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("csv", type=Path)
    parser.add_argument("--out", type=Path, help="JSON lines, one per row; default: in build/")
    parser.add_argument("--json", type=Path, help="write the table as JSON, too")
    parser.add_argument("--limit", type=int, help="only so many rows")
    parser.add_argument("--only", help="only models whose name contains this")
    parser.add_argument("--budget", type=float, default=BUDGET_GIB, help="GiB, for all rows")
    parser.add_argument("--timm", choices=("0.6.7", "installed"), default="0.6.7")
    parser.add_argument("--overlay", type=Path, default=Path("build/timm067"))
    parser.add_argument("--table", action="store_true", help="run nothing, only print the table")
    arguments = parser.parse_args()
    out = arguments.out or Path("build") / f"{arguments.csv.stem}.{arguments.timm}.jsonl"
    out.parent.mkdir(exist_ok=True)
    first = None
    if arguments.timm == OLD_TIMM and not arguments.table:
        first = overlay(arguments.overlay.resolve())
    with arguments.csv.open(newline="") as file:
        rows = [r for r in csv.DictReader(file) if (arguments.only or "") in r["model"]]
    rows = rows[: arguments.limit]
    known = {}
    if out.exists():
        known = {key(row): row for row in map(json.loads, out.read_text().splitlines())}
    for number, row in enumerate(rows, 1):
        if key(row) in known or arguments.table:
            continue
        known[key(row)] = {**row, **run(row, first)}
        with out.open("a") as file:
            file.write(json.dumps(known[key(row)]) + "\n")
        said = known[key(row)].get("error") or f"{known[key(row)]['seconds']} s"
        print(f"[{number}/{len(rows)}] {row['model']}: {said}", file=sys.stderr, flush=True)
    done = [known[key(row)] for row in rows if key(row) in known]
    print("\n".join(table(done, arguments.budget * GIB)))
    if arguments.json:
        arguments.json.write_text(
            json.dumps(summary(done, arguments.budget * GIB), indent=1) + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
