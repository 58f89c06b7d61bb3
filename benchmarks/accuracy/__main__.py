"""Predict every public measurement and compare.

Each entry runs in a process of its own, in the libraries of its time (made with pip at first use).
Answers are kept as they come: what is there is not run again.
"""

from __future__ import annotations

import json
import platform
import shutil
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from . import report
from .entries import DEFAULT_TABLES, ROOT, TABLES, Entry, entries
from .environments import DEFAULT_FOLDER
from .peers import PEERS
from .runner import TIMEOUT, load, run_all, run_estimate, run_peers

RESULTS = ROOT / "benchmarks" / "results" / "accuracy.json"
WORK = ROOT / "build" / "accuracy"
# With only what is installed, in less than two minutes; at least one of each kind.
QUICK = (
    "peaks/amp_recipe_fp32", "peaks/nb_resnet50_t4_per_block", "peaks/liger_layernorm_n4096",
    "peaks/mmseg_unet_fcn_128", "operators/cross_entropy_full_V4096", "steps/trace-044",
    "steps/trace-068", "largest/xmem_r101_sgd_4060", "scaling/resnet50",
)  # fmt: skip
# Progress goes to stderr, so that a pipe gets the table alone.
NOISE = Console(stderr=True)


def shown(records: list[dict[str, Any]]) -> Table:
    table = Table(box=None)
    for name, side in (("entry", "left"), ("measured", "right"), ("predicted", "right"),
                       ("error", "right"), ("s", "right"), ("", "left")):  # fmt: skip
        table.add_column(name, justify=side, overflow="fold")  # type: ignore[arg-type]
    known = report.causes()
    for r in records:
        cause = report.cause_of(r["id"], known) if report.is_miss(r) else ""
        if report.in_bytes(r):
            cells = [f"{r['measured']:,}", f"{r['predicted']:,}", f"{r['error_pct']:+.3f} %"]
        elif "right" in r:
            cells = [
                f"{r['fitted'] or '-'} / {r['failed'] or '-'}", str(r.get("predicted_largest", "")),
                "right" if r["right"] else f"{r['off_pct']:+.2f} %",
            ]  # fmt: skip
        else:
            cells, cause = ["", "", "-"], r.get("not_built") or r.get("error", "")
        table.add_row(r["id"], *cells, f"{r.get('seconds', '')}", cause)
    return table


def conclude(records: list[dict[str, Any]]) -> None:
    out = Console(width=160)
    out.print(shown(records))
    for (family, metric), summary in report.groups(records).items():
        out.print(f"{family}, {metric}: {summary}")
    for name in TABLES:
        chosen = report.of_table(records, name)
        whole = report.summarize(r["error_pct"] for r in chosen if report.in_bytes(r))
        hits, asked = report.right(chosen)
        if whole:
            out.print(f"[bold]{name}[/]: {whole}")
        if asked:
            out.print(f"[bold]{name}[/]: {hits} of {asked} right ({hits / asked:.1%})")


def write(known: dict[str, Any], asked: dict[str, Any]) -> None:
    """The results file, from which docs/build_accuracy.py writes the page.

    Rows that this run does not know stay as they were; those of no entry go.
    """
    before = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    rows = {r["id"]: r for r in before.get("rows", [])} | known
    peers = before.get("peers", {}) | asked
    ids = [e.id for e in entries(TABLES)]
    made = {name: version(name) for name in ("torch", "torchvision", "numpy")}
    made["python"] = platform.python_version()
    result = {
        "made_with": made, "rows": [rows[i] for i in ids if i in rows],
        "peers": {i: peers[i] for i in ids if i in peers},
    }  # fmt: skip
    RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def pending(chosen: list[Entry], known: dict[str, Any], again: bool) -> list[Entry]:
    """What has to be run: no answer yet, or a failure while ``again``."""
    return [
        e for e in chosen
        if e.id not in known or (again and "error" in known[e.id])
        or bool(e.not_built) is not ("not_built" in known[e.id])
    ]  # fmt: skip


@click.command(help=__doc__)
@click.option("--table", "tables", multiple=True, type=click.Choice(list(TABLES)),
              help="Only these tables (default: all but timm-all, which takes hours).")  # fmt: skip
@click.option("--only", default="", help="Only entries whose id contains this; asked anew.")
@click.option("--quick", is_flag=True, help="A fixed small set; fails if it got worse.")
@click.option("--peers/--no-peers", default=True, help="Ask the other tools, too.")
@click.option("--again", is_flag=True, help="Ask anew what ended in an error.")
@click.option("--fresh", is_flag=True, help="Forget the answers that are there.")
@click.option("--jobs", default=1, show_default=True, help="Processes at a time.")
@click.option("--timeout", default=TIMEOUT, show_default=True, help="Seconds for one entry.")
@click.option("--environments", type=click.Path(path_type=Path), default=DEFAULT_FOLDER,
              help="Where libraries of the time are kept.")  # fmt: skip
@click.option("--work", type=click.Path(path_type=Path), default=WORK, help="Answers so far.")
@click.option("--list", "listing", is_flag=True, help="Name the entries, run nothing.")
def main(
    tables: tuple[str, ...], only: str, quick: bool, peers: bool, again: bool, fresh: bool,
    jobs: int, timeout: int, environments: Path, work: Path, listing: bool,
) -> None:  # fmt: skip
    chosen = [e for e in entries(tables or DEFAULT_TABLES) if only in e.id]
    if quick:
        chosen = [e for e in entries() if e.id in QUICK]
        work, peers = Path(tempfile.mkdtemp(prefix="batchfit-accuracy-")), False
    if listing:
        for e in chosen:
            click.echo(f"{e.id}  {e.not_built and '(not built: ' + e.not_built + ')'}")
        return
    answers, others = work / "answers.jsonl", work / "peers.jsonl"
    if fresh:
        for path in (answers, others):
            path.unlink(missing_ok=True)
    known = {} if only else load(answers)
    run_all(
        pending(chosen, known, again), lambda e: run_estimate(e, environments, timeout), answers,
        jobs, NOISE,
    )  # fmt: skip
    if peers:
        asked = {} if only else load(others, join=True)
        waiting = [e for e in chosen if not e.not_built and missing(asked.get(e.id))]
        run_all(
            waiting,
            lambda e: {"id": e.id, **run_peers(e, missing(asked.get(e.id)), environments, timeout)},
            others, jobs, NOISE,
        )  # fmt: skip
    known, asked = load(answers), load(others, join=True)
    records = [known[e.id] for e in chosen if e.id in known]
    conclude(records)
    if quick:
        shutil.rmtree(work)
        finish_quick(records)
    elif not only:
        write(known, asked)


def missing(record: dict[str, Any] | None) -> list[str]:
    """The peers that have not been asked."""
    return [name for name in PEERS if name not in (record or {})]


def finish_quick(records: list[dict[str, Any]]) -> None:
    before = json.loads(RESULTS.read_text(encoding="utf-8"))["rows"] if RESULTS.exists() else []
    found = report.worse(records, {r["id"]: r for r in before})
    for line in found:
        click.echo(f"worse: {line}", err=True)
    sys.exit(1 if found or len(records) < len(QUICK) else 0)


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.accuracy")
