"""A predicted snapshot opens in PyTorch's viewer, and its sums are the estimate's."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

import pytest
from torch.cuda import _memory_viz

from batchfit.estimator import Estimate
from batchfit.estimator.snapshot import SnapshotError, write_snapshot
from batchfit.estimator.snapshot_replay import real_peak

from .snapshots import BATCH, Snapshot, small, snapshot_of


@pytest.fixture(name="job")
def _job() -> Estimate:
    return small()


@pytest.fixture(name="snapshot")
def _snapshot() -> Snapshot:
    return snapshot_of()


def test_text_reports_of_the_viewer(job: Estimate, snapshot: Snapshot) -> None:
    memory = _memory_viz.memory(snapshot, lambda lines: lines)
    assert "aten::" in memory
    assert "optimizer state" in memory
    assert "seg_" in _memory_viz.segments(snapshot, lambda lines: lines)
    assert "cudaMalloc" in _memory_viz.trace(snapshot)
    # segsum raises where the blocks of a segment do not add up to it
    assert f"segments: {len(snapshot['segments'])}" in _memory_viz.segsum(snapshot)


@pytest.mark.parametrize("options", [{}, {"plot_segments": True}, {"filter_freed": True}])
def test_plots_of_the_viewer(snapshot: Snapshot, options: dict[str, bool]) -> None:
    html = _memory_viz.trace_plot(copy.deepcopy(snapshot), **options)
    assert "MemoryViz.js" in html
    assert "Allocator State History" in _memory_viz.segment_plot(snapshot)


def test_the_viewer_as_a_command(job: Estimate, tmp_path: Path) -> None:
    file, page = tmp_path / "predicted.pickle", tmp_path / "page.html"
    write_snapshot(job, BATCH, file)
    command = [sys.executable, "-m", "torch.cuda._memory_viz", "trace_plot", str(file)]
    subprocess.run([*command, "-o", str(page)], check=True, cwd=tmp_path)
    assert page.stat().st_size > file.stat().st_size


def test_what_the_page_needs(job: Estimate, snapshot: Snapshot, tmp_path: Path) -> None:
    """MemoryViz.js: pickle protocol 2 to 4, frames of three keys, "unknown" among categories."""
    write_snapshot(job, BATCH, tmp_path / "file")
    assert (tmp_path / "file").read_bytes()[:2] == b"\x80\x04"
    (events,) = snapshot["device_traces"]
    assert "unknown" in {event.get("category") for event in events}
    assert {"parameters", "gradients", "activations", "optimizer state"} <= {
        event.get("category") for event in events
    }
    for event in events:
        for frame in event["frames"]:
            assert {"name", "filename", "line"} <= set(frame)
    assert [note["name"] for note in snapshot["external_annotations"]][:3] == [
        "init",
        "step 1: forward",
        "step 1: backward",
    ]


@pytest.mark.parametrize("allocator", ["", "expandable_segments:True"])
@pytest.mark.parametrize("batch", [1, BATCH, 5000])
def test_sums(allocator: str, batch: int) -> None:
    estimated = small(allocator)
    made = snapshot_of(batch, allocator)
    peak = real_peak(made)
    assert peak.allocated == estimated.peak(batch) == sum(block.size for block in peak.live)
    assert peak.reserved == estimated.reserved(batch)
    assert peak.older == 0
    run = estimated.replay(batch)
    assert sum(s["total_size"] for s in made["segments"]) == run.end_reserved
    assert sum(s["allocated_size"] for s in made["segments"]) == run.end_allocated
    for segment in made["segments"]:
        assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"]
        assert segment["is_expandable"] == bool(allocator)


def test_events_balance(snapshot: Snapshot) -> None:
    """Every free follows its alloc, no two live blocks overlap, what is left is in the table."""
    (events,) = snapshot["device_traces"]
    assert [event["time_us"] for event in events] == list(range(len(events)))
    live: dict[int, int] = {}
    requested: set[int] = set()
    for event in events:
        address, size = event["addr"], event["size"]
        if event["action"] == "alloc":
            assert address not in live
            assert not any(a < address + size and address < a + live[a] for a in live)
            live[address] = size
        elif event["action"] == "free_requested":
            assert live[address] == size
            requested.add(address)
        elif event["action"] == "free_completed":
            requested.remove(address)
            assert live.pop(address) == size
    assert not requested
    table = {
        block["address"]: block["requested_size"]
        for segment in snapshot["segments"]
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    }
    assert table == live
    assert events[-1]["action"] == "snapshot"
    assert events[-1]["size"] == sum(s["allocated_size"] for s in snapshot["segments"])


def test_a_place_that_cannot_be_written(job: Estimate, tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match="cannot write the snapshot"):
        write_snapshot(job, BATCH, tmp_path / "no" / "such" / "folder")
