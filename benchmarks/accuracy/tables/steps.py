"""Recorded training steps (tests/data/oracle/steps): the peak, and the blocks alive there."""

from __future__ import annotations

import gzip
import json
from typing import Any

from benchmarks.accuracy.entries import ORACLE, Answer, Entry, Question, compared
from benchmarks.accuracy.jobs.base import Job

from batchfit.estimator.snapshot_compare import compare

STEPS = ORACLE / "steps"


def read(row: str) -> dict[str, Any]:
    recorded: dict[str, Any] = json.loads(gzip.decompress((STEPS / f"{row}.json.gz").read_bytes()))
    return recorded


def as_snapshot(recorded: dict[str, Any]) -> dict[str, Any]:
    """A recorded step as a snapshot: it has no addresses, so each block gets a segment."""
    events: list[dict[str, Any]] = []
    place: dict[int, tuple[int, int, int]] = {}
    live: dict[int, Any] = {}

    def add(action: str, address: int, size: int, frames: Any = ()) -> None:
        events.append({"action": action, "addr": address, "size": size, "frames": list(frames)})

    for event in recorded["events"]["events"]:
        if event[0] in ("i", "a"):
            number, requested, size = event[1:4]
            place[number] = (len(place) + 1) << 40, requested, size
            live[number] = []
            if event[0] == "a":
                live[number] = [{"name": event[4], "filename": event[5], "line": 0}]
                add("segment_alloc", place[number][0], size)
                add("alloc", place[number][0], requested, live[number])
        elif event[0] == "f":
            address, requested, size = place[event[1]]
            add("free_requested", address, requested)
            add("free_completed", address, requested)
            add("segment_free", address, size)
            del live[event[1]]
    segments = []
    for number, frames in live.items():
        address, requested, size = place[number]
        block: dict[str, Any] = {"address": address, "size": size, "requested_size": requested}
        block |= {"state": "active_allocated", "frames": frames}
        segments.append({"device": 0, "address": address, "total_size": size, "blocks": [block]})
    return {"segments": segments, "device_traces": [events]}


def entries(name: str) -> list[Entry]:
    found = []
    for path in sorted(STEPS.glob("*.json.gz")):
        row = path.name.removesuffix(".json.gz")
        real = read(row)["step"]["real"]
        facts = {"measured": real["peak_allocated"]}
        found.append(Entry(name, row, "recorded step", "peak_allocated", "high", facts=facts))
    return found


def questions(entry: Entry) -> list[Question]:
    from tests.recorded_jobs import JOBS

    make, batch, gpu = JOBS[entry.row]
    return [Question(Job(make, batch, gpu), batch)]


def solve(entry: Entry) -> Answer:
    (asked,) = questions(entry)
    found = compare(asked.job.estimate(), asked.batch, as_snapshot(read(entry.row)))
    return compared(
        entry.facts["measured"], found.predicted_allocated,
        matched_share=round(found.matched_share, 5), reserved=found.predicted_reserved,
    )  # fmt: skip
