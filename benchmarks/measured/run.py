"""Predict every row of a table of measured peaks and compare.

    python benchmarks/measured/run.py tests/data/truth/measured_peaks.csv [--out results.json]

Rows whose model code has changed since are run in an overlay of the libraries of their time: the
pinned packages are installed with pip into a folder under ``--overlays`` and put in front of the
path of a process of its own. Rows without a job here are listed with the reason. Resumable: rows in
the output file are not run again.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

# Bytes per unit as the source printed it (README of the data, "Units and meaning").
UNITS = {
    "bytes": 1, "MB(1e6)": 10**6, "GB(1e9)": 10**9, "MiB": 2**20, "MB(=2^20)": 2**20,
    "GB(=MiB/1000)": 1000 * 2**20, "GiB": 2**30, "GB(unit ambiguous)": 2**30,
}  # fmt: skip
HF_ROWS = ("hfsdpa", "nb_bert", "fms", "hub_bert")


def predict(row_id: str) -> dict[str, Any]:
    """Run in a process of its own: the prediction for one row."""
    from jobs import JOBS

    from batchfit.estimator import estimate

    job = JOBS[row_id]
    start = time.perf_counter()
    e = estimate(job.workload(), gpu=job.gpu, workspaces=job.workspaces, attention=job.attention,
                 allocator="")  # fmt: skip
    predicted = job.measure(e, job.batch) if job.measure else e.peak(job.batch)
    moment = e.peak_moment(job.batch)
    return {
        "predicted": predicted,
        "reserved": e.reserved(job.batch),
        "peak_at": f"{moment.phase} of step {moment.step}: {moment.operator} in {moment.module}",
        "affine": e.affine,
        "seconds": round(time.perf_counter() - start, 1),
    }


def overlay(packages: tuple[str, ...], root: Path) -> Path | None:
    """The folder with these pinned packages; installed at first use."""
    if not packages:
        return None
    folder = root / hashlib.sha1(" ".join(packages).encode()).hexdigest()[:10]
    if not folder.exists():
        packages = (
            *packages,
            "requests",
            "urllib3<3",
            "charset-normalizer",
            "psutil",
            "certifi",
            "idna",
        )
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target"]
        subprocess.run([*command, str(folder), *packages], check=True)
    return folder


def in_process(row_id: str, library: tuple[str, ...], overlays: Path) -> dict[str, Any]:
    folder = overlay(library, overlays)
    path = [str(folder)] if folder else []
    path += filter(None, [os.environ.get("PYTHONPATH", "")])
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(path), HF_HUB_OFFLINE="1")
    command = [sys.executable, __file__, "--predict", row_id]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip() or "no output").splitlines()[-1]
        return {"error": last}
    return dict(json.loads(done.stdout.splitlines()[-1]))


def report(results: dict[str, dict[str, Any]]) -> None:
    print(f"{'row':52} {'measured':>15} {'predicted':>15} {'error':>8}  cause")
    for row_id, r in results.items():
        if "predicted" not in r:
            print(f"{row_id:52} {r['measured']:>15} {'-':>15} {'-':>8}  {r.get('error', '')}")
            continue
        print(
            f"{row_id:52} {r['measured']:>15} {r['predicted']:>15} {r['error_pct']:>+8.2f}  "
            f"{r['cause']}"
        )
    for title, chosen in (
        (
            "without convolutions",
            lambda r: r["family"] not in ("vision CNN", "video CNN", "segmentation"),
        ),
        ("all", lambda r: True),
    ):
        errors = sorted(
            abs(r["error_pct"]) for r in results.values() if "predicted" in r and chosen(r)
        )
        if errors:
            print(
                f"{title}: {len(errors)} rows, median {statistics.median(errors):.3f} %, p90 "
                f"{errors[int(0.9 * (len(errors) - 1))]:.2f} %, worst {errors[-1]:.2f} %"
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", type=Path, nargs="?")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--confidence", default="high")
    parser.add_argument("--only", default="")
    parser.add_argument(
        "--overlays", type=Path, default=Path.home() / ".cache" / "batchfit-overlays"
    )
    parser.add_argument("--predict", metavar="ROW", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.predict:
        print(json.dumps(predict(options.predict)))
        return 0
    from jobs import JOBS

    results: dict[str, dict[str, Any]] = {}
    if options.out and options.out.exists():
        results = {r["id"]: r for r in json.loads(options.out.read_text())["rows"]}
    rows = list(csv.DictReader(options.table.open()))
    for row in rows:
        row_id = row["id"]
        if row["confidence"] != options.confidence or options.only not in row_id:
            continue
        if "predicted" in results.get(row_id, {}) and not options.only:
            continue
        measured = round(float(row["value"]) * UNITS[row["unit"]])
        result: dict[str, Any] = {
            "id": row_id, "family": row["family"], "metric": row["metric"], "measured": measured,
            "cause": "",
        }  # fmt: skip
        job = JOBS.get(row_id)
        if job is None:
            result["error"] = "no job: its model code cannot be had here"
        else:
            result |= in_process(row_id, job.library, options.overlays)
            if "predicted" in result:
                result["error_pct"] = round(100 * (result["predicted"] / measured - 1), 4)
                if abs(result["error_pct"]) > 3:
                    result["cause"] = job.cause or "not explained"
        results[row_id] = result
        print(row_id, result.get("error_pct", result.get("error")), flush=True)
        if options.out:
            options.out.write_text(json.dumps({"rows": list(results.values())}, indent=1) + "\n")
    report(results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
