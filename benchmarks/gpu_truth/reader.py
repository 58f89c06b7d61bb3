"""The result as tables: for the terminal, as Markdown, or as rows for a page of the documents."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

MIB = 2**20


@dataclass(frozen=True, slots=True)
class Table:
    """A table of text.

    Attributes:
        title, note: above it; the note may be empty.
        header: names of the columns.
        rows: of the same length.
    """

    title: str
    header: list[str]
    rows: list[list[str]]
    note: str = ""


def tables(data: dict[str, Any]) -> list[Table]:
    """Every table of a result; those without rows are left out."""
    made = [summary(data), peaks(data), largest(data), snapshots(data), operators(data),
            cudnn(data), outside(data), missing(data)]  # fmt: skip
    return [table for table in made if table.rows]


def markdown(data: dict[str, Any]) -> str:
    """The page."""
    blocks = ["# Predicted and measured", machine_line(data)]
    for table in tables(data):
        blocks.append(f"## {table.title}")
        if table.note:
            blocks.append(table.note)
        blocks.append("\n".join(markdown_rows(table)))
    return "\n\n".join(blocks) + "\n"


def markdown_rows(table: Table) -> list[str]:
    """The lines of a Markdown table, its header first."""
    lines = [table.header, ["---"] * len(table.header), *table.rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]


def print_tables(data: dict[str, Any], console: Console) -> None:
    """Print every table."""
    console.print(escape(machine_line(data)))
    for table in tables(data):
        shown = RichTable(title=table.title, caption=table.note or None, title_justify="left")
        for number, name in enumerate(table.header):
            right = number > 0 and _numeric(table, number)
            shown.add_column(name, justify="right" if right else "left", no_wrap=right)
        for row in table.rows:
            shown.add_row(*(escape(cell) for cell in row))
        console.print(shown)


def _numeric(table: Table, column: int) -> bool:
    return all(row[column][:1] in "0123456789+-" for row in table.rows)


def machine_line(data: dict[str, Any]) -> str:
    """The machine in one line."""
    m = data["machine"]
    parts = [
        m["name"], f"{m['total_bytes'] / MIB:,.0f} MiB",
        f"capability {'.'.join(map(str, m['capability']))}", f"{m['sm_count']} SMs",
    ]  # fmt: skip
    parts += [f"{k} {m[k]}" for k in ("torch", "cuda", "hip", "cudnn") if m.get(k)]
    parts += [f"driver {line.split(', ')[1]}" for line in m.get("driver", [])[:1]]
    parts += [f"{k}={v}" for k, v in m.get("environment", {}).items()]
    return ", ".join(parts) + "."


# -- rows ----------------------------------------------------------------------------------------


def _jobs(data: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    yield from data["jobs"].items()


def _measured(data: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], dict[str, Any], Any]]:
    """(name, entry, run, prediction) of every peak that was measured to its end."""
    for name, entry in _jobs(data):
        predicted = entry.get("prediction", {}).get("peaks", {})
        for batch in entry["batches"]:
            run = entry["parts"].get(f"peak {batch}", {})
            if run.get("allocated") and not run.get("oom") and str(batch) in predicted:
                yield name, entry, run, predicted[str(batch)]


def _error(predicted: int, real: int) -> float:
    """Per cent."""
    return 100 * (predicted / real - 1)


def error_rows(data: dict[str, Any]) -> list[dict[str, Any]]:
    """One row for each measured peak: names, bytes, and errors in per cent."""
    return [
        {
            "job": name, "family": entry["family"], "batch": run["batch"],
            "allocated": run["allocated"], "predicted_allocated": predicted["allocated"],
            "allocated_error": _error(predicted["allocated"], run["allocated"]),
            "reserved": run["reserved"], "predicted_reserved": predicted["reserved"],
            "reserved_error": _error(predicted["reserved"], run["reserved"]),
        }
        for name, entry, run, predicted in _measured(data)
    ]  # fmt: skip


def summary(data: dict[str, Any]) -> Table:
    """By family: how far off the peaks are, and how many largest batches are right."""
    rows = error_rows(data)
    right: dict[str, list[bool]] = {}
    for _, entry in _jobs(data):
        for part, found in entry["parts"].items():
            if part.startswith("largest") and "verdict" in found and found["verdict"] != "bracket":
                ok = found["verdict"] in ("exact", "capped")
                right.setdefault(entry["family"], []).append(ok)
    families = list(dict.fromkeys(row["family"] for row in rows))
    body = []
    for name in ["all", *families] if rows else []:
        chosen = [row for row in rows if name in ("all", row["family"])]
        judged = [ok for family, oks in right.items() if name in ("all", family) for ok in oks]
        line = [name, str(len(chosen))]
        for column in ("allocated_error", "reserved_error"):
            errors = sorted(abs(row[column]) for row in chosen)
            line += [f"{statistics.median(errors):.3f} %", f"{_p90(errors):.2f} %",
                     f"{errors[-1]:.2f} %"]  # fmt: skip
        under = sum(row["allocated_error"] < -0.01 for row in chosen)
        body.append([*line, f"{under / len(chosen):.0%}", f"{sum(judged)} of {len(judged)}"])
    header = ["family", "rows", "allocated: median", "p90", "worst", "reserved: median", "p90",
              "worst", "predicted too little", "largest batch right"]  # fmt: skip
    return Table("In short", header, body, "Errors are those of the predicted peaks.")


def _p90(ordered: list[float]) -> float:
    """The nearest-rank 90th percentile of sorted numbers.

    >>> _p90([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0])
    9.0
    """
    return ordered[-(-9 * len(ordered) // 10) - 1]


def peaks(data: dict[str, Any]) -> Table:
    """Every measured peak beside the predicted one."""
    body = []
    for name, entry, run, predicted in _measured(data):
        remarks = []
        settings = entry["prediction"]["settings"]
        if settings.get("precision") == "amp-fp16" and run["optimizer_steps"] < 2:
            remarks.append(f"GradScaler let only {run['optimizer_steps']} optimizer steps pass")
        if any(run["left"]):
            remarks.append(f"{run['left'][0]} B were left over before it began")
        body.append([
            name, str(run["batch"]), _mib(run["allocated"]), _mib(predicted["allocated"]),
            f"{_error(predicted['allocated'], run['allocated']):+.3f} %", _mib(run["reserved"]),
            _mib(predicted["reserved"]),
            f"{_error(predicted['reserved'], run['reserved']):+.2f} %",
            f"{run['seconds'][-1]:.3f}", "; ".join(remarks),
        ])  # fmt: skip
    header = ["job", "batch", "allocated MiB", "predicted", "error", "reserved MiB", "predicted",
              "error", "s/step", "remark"]  # fmt: skip
    return Table("Peaks", header, body, "max_memory_allocated and max_memory_reserved.")


def largest(data: dict[str, Any]) -> Table:
    """The true largest batch beside the predicted one."""
    body = []
    for name, entry in _jobs(data):
        for part, found in entry["parts"].items():
            if not part.startswith("largest") or "verdict" not in found:
                continue
            limit = part.removeprefix("largest ")
            predicted = entry["prediction"]["largest"][limit]["batch"]
            true = str(found["fits"])
            if found["verdict"] == "capped":
                true = f"at least {found['fits']}"
            elif found["verdict"] == "bracket":
                above = "?" if found["fails"] is None else str(found["fails"] - 1)
                true = f"{found['fits']} to {above}"
            off = ""
            if found["verdict"] == "found":
                off = f"{100 * (predicted / found['fits'] - 1):+.2f} %"
            body.append([name, limit, str(predicted), true, found["verdict"], off,
                         str(len(found["trials"]))])  # fmt: skip
    header = ["job", "limit", "predicted", "true", "verdict", "off", "trials"]
    note = "Under set_per_process_memory_fraction: the limit is on what the allocator reserves."
    return Table("The largest batch", header, body, note)


def snapshots(data: dict[str, Any]) -> Table:
    """How much of what lives at the peak is predicted, block by block."""
    body = []
    for name, entry in _jobs(data):
        found = entry["parts"].get("snapshot", {})
        if "matched_share" not in found:
            continue
        most = found["only_real"][0] if found["only_real"] else None
        extra = found["only_predicted"][0] if found["only_predicted"] else None
        body.append([
            name, str(found["batch"]), f"{100 * found['matched_share']:.2f} %",
            str(found["blocks"]["real"]), str(found["blocks"]["predicted"]),
            f"{_mib(most['bytes'])} MiB: {' < '.join(most['where'])}" if most else "",
            f"{_mib(extra['bytes'])} MiB: {' < '.join(extra['where'])}" if extra else "",
        ])  # fmt: skip
    header = ["job", "batch", "matched", "blocks", "predicted", "most that is missing",
              "most that is too much"]  # fmt: skip
    return Table("Blocks alive at the peak", header, body, "The share of bytes at the real peak.")


def operators(data: dict[str, Any]) -> Table:
    """The largest temporaries that operators make for themselves, over all jobs."""
    found: dict[str, tuple[int, int, str, str]] = {}
    for name, entry in _jobs(data):
        for row in entry["parts"].get("operators", {}).get("operators", []):
            most, calls, call, job = found.get(row["operator"], (0, 0, "", ""))
            if row["hidden_bytes"] > most:
                most, call, job = row["hidden_bytes"], row["call"], name
            found[row["operator"]] = most, calls + row["calls"], call, job
    ordered = sorted(found.items(), key=lambda item: -item[1][0])
    body = [
        [operator, str(most), str(calls), job, call[:120]]
        for operator, (most, calls, call, job) in ordered[:40]
    ]
    header = ["operator", "largest B", "calls", "job", "called with"]
    return Table("Temporaries of operators", header, body, "Given back before the call returns.")


def cudnn(data: dict[str, Any]) -> Table:
    """The range that cuDNN's choice of algorithms spans."""
    body = []
    for name, entry in _jobs(data):
        batch, parts = entry["batches"][1], entry["parts"]
        plain = parts.get(f"peak {batch}", {})
        if not plain.get("allocated") or not {"benchmark", "deterministic"} & parts.keys():
            continue
        predicted = entry["prediction"]["peaks"][str(batch)]
        cells = [_mib(parts.get(k, {}).get("allocated", 0)) for k in ("benchmark", "deterministic")]
        blocks = parts.get("snapshot", {}).get("convolution_blocks", [])
        hidden = max(
            (row["hidden_bytes"] for row in parts.get("operators", {}).get("operators", [])
             if "conv" in row["operator"]), default=0,
        )  # fmt: skip
        shown = ", ".join(f"{b['times']} x {b['requested_bytes']}" for b in blocks[:3])
        body.append([name, str(batch), _mib(predicted["least"]), _mib(predicted["allocated"]),
                     _mib(plain["allocated"]), *cells,
                     str(hidden), shown])  # fmt: skip
    header = ["job", "batch", "predicted least", "most", "as it is", "benchmark", "deterministic",
              "largest in a convolution B", "blocks not explained B"]  # fmt: skip
    return Table("What cuDNN's choices change", header, body, "Peaks allocated, in MiB.")


def outside(data: dict[str, Any]) -> Table:
    """What the process holds outside the allocator."""
    body = [
        [
            name,
            _mib(entry["prediction"]["context"]),
            _mib(entry["outside"]["start"]),
            _mib(entry["outside"].get("end", 0)),
        ]
        for name, entry in _jobs(data)
        if "outside" in entry
    ]
    header = ["job", "predicted MiB", "at the start", "at the end"]
    note = "total - free - reserved: the context, its libraries, and whoever else uses the GPU."
    return Table("Outside the allocator", header, body, note)


def missing(data: dict[str, Any]) -> Table:
    """What was not run, or not to its end, and why."""
    body = []
    for name, entry in _jobs(data):
        for kind, reason in entry["reasons"].items():
            body.append([name, kind, reason])
        if entry["status"] == "not run" and not entry["reasons"]:
            body.append([name, "all", "not run: no time was left"])
        for part, found in entry["parts"].items():
            why = found.get("skipped") or found.get("error") or found.get("oom")
            why = why or ("no time was left" if found.get("no_time") else "")
            if why:
                body.append([name, part, why.splitlines()[0][:200]])
    return Table("Not run", ["job", "part", "why"], body)


def _mib(size: int) -> str:
    return f"{size / MIB:,.1f}" if size else "-"
