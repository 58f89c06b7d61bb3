"""What the suite compares: one entry per public measurement."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from .jobs.base import Job

ROOT = Path(__file__).resolve().parents[2]
TRUTH = ROOT / "tests" / "data" / "truth"
ORACLE = ROOT / "tests" / "data" / "oracle"

# Name on the command line -> module in tables/. "timm" is the sample, "timm-all" all 606 rows.
TABLES = {
    "peaks": "peaks", "operators": "operators", "steps": "steps", "largest": "largest",
    "scaling": "scaling", "timm": "timm", "timm-all": "timm",
}  # fmt: skip
DEFAULT_TABLES = ("peaks", "operators", "steps", "largest", "scaling", "timm")

# Bytes per unit as the source printed it (README of the data, "Units and meaning").
UNITS = {
    "bytes": 1, "MB(1e6)": 10**6, "GB(1e9)": 10**9, "MiB": 2**20, "MB(=2^20)": 2**20,
    "GB(=MiB/1000)": 1000 * 2**20, "GiB": 2**30, "GB(unit ambiguous)": 2**30,
}  # fmt: skip
Answer = dict[str, Any]


@dataclass(frozen=True)
class Entry:
    """One measurement.

    Attributes:
        table: name in :data:`TABLES`.
        row: its name within the table.
        family: kind of model.
        metric: what was measured.
        confidence: as the data says: high, medium, low.
        environment: which libraries it needs (``environments.toml``); "" for the installed ones.
        not_built: why there is no job for it; "" if there is one.
        facts: the row's values that the comparison needs.
    """

    table: str
    row: str
    family: str
    metric: str
    confidence: str
    environment: str = ""
    not_built: str = ""
    facts: dict[str, Any] = field(default_factory=dict, compare=False)

    @property
    def id(self) -> str:
        return f"{self.table}/{self.row}"


@dataclass(frozen=True)
class Question:
    """A job and a batch; an entry's figure is the signed sum over its questions.

    Of a bracket: the batch that ran, then the one that failed; batch 0 is unknown.
    """

    job: Job
    batch: int
    sign: int = 1


class Table(Protocol):
    """A module in ``tables``."""

    def entries(self, name: str) -> list[Entry]:
        """All rows of the data."""

    def questions(self, entry: Entry) -> list[Question]:
        """What other tools are asked."""

    def solve(self, entry: Entry) -> Answer:
        """Predict one row and compare. Runs in a process of its own."""


def table(name: str) -> Table:
    module: Table = import_module(f"benchmarks.accuracy.tables.{TABLES[name]}")
    return module


def entries(tables: Iterable[str] = DEFAULT_TABLES) -> list[Entry]:
    return [entry for name in tables for entry in table(name).entries(name)]


def find(entry_id: str) -> Entry:
    name = entry_id.split("/", 1)[0]
    return next(entry for entry in table(name).entries(name) if entry.id == entry_id)


def read_csv(name: str) -> list[dict[str, str]]:
    with (TRUTH / name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def compared(measured: int, predicted: int, **more: Any) -> Answer:
    """An answer in bytes."""
    error = round(100 * (predicted / measured - 1), 4)
    return {"measured": measured, "predicted": predicted, "error_pct": error, **more}
