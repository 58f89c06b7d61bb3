"""Figures from records: per group, per table, per peer."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Record = dict[str, Any]
CAUSE_ABOVE = 3.0  # per cent: a larger miss needs a cause
UNDER = 0.01  # per cent: smaller distances are the rounding of what the source printed
CAUSES = Path(__file__).with_name("causes.toml")


@dataclass(frozen=True, slots=True)
class Summary:
    """Errors of a group of rows, in per cent of what was measured.

    Attributes:
        rows: how many.
        median, p90, worst: of the absolute error; p90 interpolates between neighbours.
        under: share of rows predicted too low, 0 to 1.
    """

    rows: int
    median: float
    p90: float
    worst: float
    under: float

    def __str__(self) -> str:
        return (
            f"{self.rows} rows, median {self.median:.3f} %, p90 {self.p90:.2f} %, worst "
            f"{self.worst:.2f} %, predicted too little in {self.under:.0%}"
        )


def summarize(errors: Iterable[float]) -> Summary | None:
    """Signed errors in per cent -> their summary; None if there are none."""
    signed = np.asarray(list(errors), dtype=float)
    if not signed.size:
        return None
    size = np.abs(signed)
    return Summary(
        signed.size, float(np.median(size)), float(np.percentile(size, 90)), float(size.max()),
        float((signed < -UNDER).mean()),
    )  # fmt: skip


def in_bytes(record: Record) -> bool:
    """Whether a record compares bytes (others compare fits and failures)."""
    return "error_pct" in record


def groups(records: Sequence[Record]) -> dict[tuple[str, str], Summary]:
    """(family, metric) -> summary, of the records that compare bytes."""
    found: dict[tuple[str, str], list[float]] = {}
    for record in records:
        if in_bytes(record):
            key = record["family"], record["metric"].split(" (")[0]
            found.setdefault(key, []).append(record["error_pct"])
    return {key: s for key, errors in sorted(found.items()) if (s := summarize(errors))}


def of_table(records: Iterable[Record], *names: str) -> list[Record]:
    return [record for record in records if record["id"].split("/")[0] in names]


def causes() -> dict[str, str]:
    """Record id -> why it is off, as far as known."""
    found: dict[str, str] = tomllib.loads(CAUSES.read_text(encoding="utf-8"))
    return found


def is_miss(record: Record) -> bool:
    """Whether a record needs a cause."""
    if in_bytes(record):
        return bool(abs(record["error_pct"]) > CAUSE_ABOVE)
    return not record.get("right", True)


def misses(records: Iterable[Record]) -> list[tuple[Record, str]]:
    """What is off, with its cause."""
    known = causes()
    return [(r, cause_of(r["id"], known)) for r in records if is_miss(r)]


def cause_of(entry_id: str, known: dict[str, str]) -> str:
    """The cause of a miss; a row of timm's sample stands in the whole table, too."""
    twin = entry_id.replace("timm-all/", "timm/")
    return known.get(entry_id) or known.get(twin) or "not explained"


def right(records: Iterable[Record]) -> tuple[int, int]:
    """How many answers about a batch that ran or failed are right, of how many."""
    judged = [bool(record["right"]) for record in records if "right" in record]
    return sum(judged), len(judged)


def worse(records: Iterable[Record], before: dict[str, Record], by: float = 0.1) -> list[str]:
    """Records that are further off than they were: by so many points, or no longer right."""
    found = []
    for now in records:
        then = before.get(now["id"], {})
        if "error" in now:
            found.append(f"{now['id']}: {now['error']}")
        elif in_bytes(now) and in_bytes(then):
            if abs(now["error_pct"]) > abs(then["error_pct"]) + by:
                found.append(f"{now['id']}: {then['error_pct']:+} % -> {now['error_pct']:+} %")
        elif then.get("right") and not now.get("right"):
            found.append(f"{now['id']}: was right, is off by {now['off_pct']:+} %")
    return found


@dataclass(frozen=True, slots=True)
class PeerRow:
    """One tool over the entries that batchfit answered.

    Attributes:
        name: the tool.
        answered, asked: entries with an answer, and all.
        errors: of the entries in bytes that it answered; None if there are none.
        right, judged: of the entries about a batch that ran or failed.
        seconds: median per entry answered.
        reason: what it said most often where it had no answer.
    """

    name: str
    answered: int
    asked: int
    errors: Summary | None
    right: int
    judged: int
    seconds: float
    reason: str


def peer_row(name: str, records: Sequence[Record], answers: dict[str, Record]) -> PeerRow:
    """A tool's answers, by entry id, over the entries of these records."""
    found = [answers[r["id"]] for r in records if r["id"] in answers]
    given = [a for a in found if "cannot" not in a and "error" not in a]
    refused = [a.get("cannot") or a["error"] for a in found if a not in given]
    hits, judged = right(given)
    times = [a["seconds"] for a in given if "seconds" in a]
    return PeerRow(
        name, len(given), len(found), summarize(a["error_pct"] for a in given if in_bytes(a)),
        hits, judged, float(np.median(times)) if times else 0.0,
        max(sorted(set(refused)), key=refused.count) if refused else "",
    )  # fmt: skip


def peer_rows(records: Sequence[Record], peers: dict[str, Record]) -> list[PeerRow]:
    """batchfit first, then the other tools, on the entries that all of them were asked about."""
    both = [r for r in records if r["id"] in peers and ("right" in r or in_bytes(r))]
    names = list(dict.fromkeys(name for r in both for name in peers[r["id"]] if name != "id"))
    rows = [peer_row("batchfit", both, {r["id"]: r for r in both})]
    for name in names:
        answers = {r["id"]: peers[r["id"]][name] for r in both if name in peers[r["id"]]}
        rows.append(peer_row(name, both, answers))
    return rows
