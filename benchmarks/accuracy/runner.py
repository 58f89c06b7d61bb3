"""Run entries, each in a process of its own, and keep every answer the moment it is there."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .entries import ROOT, Entry
from .environments import prepare, variables

TIMEOUT = 900  # seconds for one entry, after which it counts as failed
Record = dict[str, Any]


def load(path: Path, join: bool = False) -> dict[str, Record]:
    """The answers so far, by id; a line cut off by a crash is skipped.

    Of several answers for one id the last one holds, or all of them joined.
    """
    found: dict[str, Record] = {}
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue
            before = found.get(record["id"], {}) if join else {}
            found[record["id"]] = {**before, **record}
    return found


def append(path: Path, record: Record) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = not path.exists() or not path.stat().st_size or path.read_bytes().endswith(b"\n")
    with path.open("a", encoding="utf-8") as file:
        file.write(("" if whole else "\n") + json.dumps(record) + "\n")


def child(arguments: list[str], folders: list[Path], timeout: float) -> tuple[list[Record], str]:
    """Lines of JSON that a worker printed, and what went wrong ("" if nothing)."""
    command = [sys.executable, "-m", "benchmarks.accuracy.worker", *arguments]
    process = subprocess.Popen(
        command, cwd=ROOT, env=variables(folders), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    trouble = ""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        trouble = f"not ready after {timeout:.0f} s"
    if not trouble and process.returncode:
        said = (err.strip() or "no output").splitlines()[-1]
        trouble = f"exit {process.returncode}: {said[:300]}"
    lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    return lines, trouble


def run_estimate(entry: Entry, environments: Path, timeout: float = TIMEOUT) -> Record:
    """One entry's record; an error is an answer, too."""
    record: Record = {
        "id": entry.id, "family": entry.family, "metric": entry.metric,
        "confidence": entry.confidence, "environment": entry.environment,
    }  # fmt: skip
    if entry.not_built:
        return {**record, "not_built": entry.not_built}
    began = time.perf_counter()
    folder = prepare(entry.environment, environments)
    lines, trouble = child(["estimate", entry.id], [folder] if folder else [], timeout)
    record["process_seconds"] = round(time.perf_counter() - began, 1)
    if not lines:
        return {**record, "error": trouble or "no answer"}
    return {**record, **lines[-1]}


def run_peers(
    entry: Entry, names: Iterable[str], environments: Path, timeout: float = TIMEOUT
) -> dict[str, Record]:
    """The other tools' answers, by name; those after one that crashed are asked again."""
    waiting, found = list(names), {}
    folders = [prepare("peers", environments), prepare(entry.environment, environments)]
    while waiting:
        lines, trouble = child(
            ["peers", entry.id, ",".join(waiting)], [f for f in folders if f], timeout
        )
        for line in lines:
            found[line.pop("peer")] = line
        waiting = [name for name in waiting if name not in found]
        if waiting:  # the first without an answer is the one that ended the process
            found[waiting.pop(0)] = {"error": trouble or "no answer"}
    return found


def run_all(
    entries: list[Entry], work: Callable[[Entry], Record], out: Path, jobs: int, say: Any
) -> None:
    """Do the work for each entry, with a progress bar; answers go to the file one by one."""
    columns = (
        TextColumn("{task.description:<48.48}"), BarColumn(), MofNCompleteColumn(),
        TimeElapsedColumn(),
    )  # fmt: skip
    with Progress(*columns, console=say) as bar, ThreadPoolExecutor(jobs) as pool:
        task = bar.add_task("", total=len(entries))
        futures = {pool.submit(work, entry): entry for entry in entries}
        for future in as_completed(futures):
            append(out, future.result())
            bar.update(task, advance=1, description=futures[future].id)
