"""Check the allocator's twin against recorded traces: one row each, exit code 1 on any miss.

    python benchmarks/allocator_oracle.py tests/data/oracle

Exact: addresses of segments and moments of release are given; everything else is predicted.
Blind: only the moments of release are given. Required: everything exact; blind peak reserved exact
on classic traces, blind peak allocated within 0.5 %. What misses is told below the table.
The start of an expandable trace is not recorded but rebuilt (allocator_start.py); "opened" says
how many stretches that no event touches had to be taken as free to explain the GPU's choices.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import allocator_traces
from rich.console import Console
from rich.table import Table

ALLOCATED_TOLERANCE = 0.005


@dataclass(frozen=True, slots=True)
class Row:
    """One trace: its cells, and what is not as required."""

    cells: tuple[str, ...]
    misses: tuple[str, ...]


def main(arguments: list[str]) -> int:
    """Print the table; return 1 if any trace misses, 2 if there are none."""
    folder = Path(arguments[0]) if len(arguments) == 1 else None
    if folder is None:
        print(__doc__, file=sys.stderr)
        return 2
    paths = sorted(folder.glob("allocator/*.json.gz")) or sorted(folder.glob("*.json.gz"))
    if not paths:
        print(f"no *.json.gz in {folder} or {folder / 'allocator'}", file=sys.stderr)
        return 2
    table = Table("trace", "kind")
    for name in ("events", "exact", "blind reserved", "real", "", "blind allocated", "real", ""):
        table.add_column(name, justify="right")
    rows = [check(path) for path in paths]
    for row in rows:
        table.add_row(*row.cells)
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    console.print(table)
    missed = [row for row in rows if row.misses]
    for row in missed:
        for text in row.misses:
            console.print(f"{row.cells[0]}: {text}", soft_wrap=True, markup=False)
    console.print(f"{len(rows)} traces, {len(missed)} missed")
    return 1 if missed else 0


def check(path: Path) -> Row:
    """Replay one trace both ways."""
    trace = allocator_traces.read(path)
    exact, blind = allocator_traces.exact(trace), allocator_traces.blind(trace)
    real = trace["real"]
    reserved = blind.peak_reserved / real["peak_reserved"] - 1
    allocated = blind.peak_allocated / real["peak_allocated"] - 1
    misses = [f"exact: {exact.miss}"] if exact.miss else []
    if blind.miss:
        misses.append(f"blind: {blind.miss}")
    if reserved and not trace["expandable_segments"]:
        misses.append("blind: peak reserved is not exact")
    if abs(allocated) > ALLOCATED_TOLERANCE:
        misses.append(f"blind: peak allocated is more than {ALLOCATED_TOLERANCE:.1%} off")
    kind = "expandable" if trace["expandable_segments"] else "classic"
    cells = (
        path.name.removesuffix(".json.gz"),
        f"{kind}, {len(trace['opened'])} opened" if trace["opened"] else kind,
        str(len(trace["events"])),
        "MISS" if exact.miss else "yes",
        str(blind.peak_reserved),
        str(real["peak_reserved"]),
        f"{reserved:+.3%}" if reserved else "=",
        str(blind.peak_allocated),
        str(real["peak_allocated"]),
        f"{allocated:+.3%}" if allocated else "=",
    )
    return Row(cells, tuple(misses))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
