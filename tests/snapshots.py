"""What the tests of snapshots share: a small job's predicted snapshot, and recorded steps."""

from __future__ import annotations

import gzip
import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from batchfit.estimator import Estimate, estimate
from batchfit.estimator.snapshot import predicted_snapshot

STEPS = Path(__file__).parent / "data" / "oracle" / "steps"
BATCH = 32
Snapshot = dict[str, Any]


@cache
def small(allocator: str = "") -> Estimate:
    """A perceptron with AdamW, on an A100."""
    model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 1000))
    return estimate(
        model, torch.empty(2, 512), gpu="A100 80GB", optimizer="adamw", loss="cross_entropy",
        allocator=allocator,
    )  # fmt: skip


@cache
def snapshot_of(batch: int = BATCH, allocator: str = "") -> Snapshot:
    """Its predicted snapshot, made once; copy it before changing it."""
    return predicted_snapshot(small(allocator), batch)


def recorded_step(name: str) -> dict[str, Any]:
    """A recorded training step (tests/data/oracle/README.md)."""
    recorded: dict[str, Any] = json.loads(gzip.decompress((STEPS / f"{name}.json.gz").read_bytes()))
    return recorded


def step_snapshot(recorded: dict[str, Any]) -> Snapshot:
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
