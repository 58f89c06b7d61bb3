"""A predicted memory snapshot, in the format of ``torch.cuda.memory._dump_snapshot``.

PyTorch's own viewer opens it (pytorch.org/memory_viz, or ``python -m torch.cuda._memory_viz``), so
a job's timeline can be looked at in the usual tool before the job exists. Where a real snapshot has
Python frames, a predicted one has the operator with its module path, and the category with the
phase; ``line`` is the number of the step, 0 before the first. The keys are those that
THCPModule_memorySnapshot (torch/csrc/cuda/Module.cpp) writes and MemoryViz.js (torch/utils/viz)
reads.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .allocator import AllocatorSettings, Block, CachingAllocator, SegmentInfo
from .snapshot_file import SnapshotError, load_snapshot

if TYPE_CHECKING:
    from .estimate import Estimate
    from .timeline import Timeline

__all__ = ["SnapshotError", "load_snapshot", "predicted_snapshot", "write_snapshot"]

Frames = list[dict[str, Any]]

# The viewer colours events by their "category" if any event has one, and then (a slip in
# MemoryViz.js, annotate_snapshot: "snapshot.categores") fails unless one of them is "unknown".
_SEGMENT_CATEGORY = "unknown"


def predicted_snapshot(estimate: Estimate, batch: int) -> dict[str, Any]:
    """What ``torch.cuda.memory._snapshot()`` would return at the end of the predicted run.

    Args:
        estimate: of the workload.
        batch: the batch size.

    Returns:
        ``segments`` (the table at the end), ``device_traces`` (every event since the process began,
        in order; ``time_us`` counts events), ``allocator_settings`` and ``external_annotations``
        (where each phase begins). Sizes in bytes; those of alloc and free are the requested ones,
        as in a real snapshot.

    Raises:
        WorkloadError: not a batch size.
    """
    timeline = estimate.timeline_at(batch)
    history = _History(timeline, estimate.allocator)
    history.run(timeline.sizes(batch).tolist())
    return {
        "segments": [history.segment(info) for info in history.allocator.segments()],
        "device_traces": [history.entries],
        "allocator_settings": _settings(estimate.allocator),
        "external_annotations": history.annotations,
    }


def write_snapshot(estimate: Estimate, batch: int, path: str | Path) -> None:
    """Write :func:`predicted_snapshot` to a file that PyTorch's viewer opens.

    Raises:
        SnapshotError: the file cannot be written.
        WorkloadError: not a batch size.
    """
    snapshot = predicted_snapshot(estimate, batch)
    try:
        with Path(path).open("wb") as file:
            pickle.dump(snapshot, file, protocol=4)  # the newest that MemoryViz.js reads
    except OSError as error:
        reason = error.strerror or error
        raise SnapshotError(f"cannot write the snapshot {path}: {reason}") from error


def describe(timeline: Timeline, storage: int, step: int) -> Frames:
    """The frames of a storage that is born in a step, innermost first."""
    phase, category = str(timeline.phases[storage]), str(timeline.categories[storage])
    operator, module = timeline.operators[storage], timeline.modules[storage] or "step"
    about = {"phase": phase, "category": category}
    return [
        {"name": operator, "filename": module, "line": step, **about},
        {"name": category, "filename": phase, "line": step},
    ]


def birth_steps(timeline: Timeline) -> dict[int, int]:
    """The step in which each storage is born; 0 is before the first."""
    steps: dict[int, int] = {}
    ends = [start for start, _, _ in timeline.marks[1:]] + [len(timeline.events)]
    for (start, _, step), end in zip(timeline.marks, ends, strict=True):
        for event in timeline.events[start:end].tolist():
            if event >= 0:
                steps[event] = step
    return steps


class _History:
    """The timeline's events as trace entries of the allocator's twin."""

    def __init__(self, timeline: Timeline, settings: AllocatorSettings) -> None:
        self.allocator = CachingAllocator(settings, observer=self._on_segment)
        self.entries: list[dict[str, Any]] = []
        self.annotations: list[dict[str, Any]] = []
        self._timeline = timeline
        self._settings = settings
        self._frames: dict[int, Frames] = {}  # by storage
        self._shared: dict[tuple[Any, ...], Frames] = {}
        self._step = 0
        self._current: Frames = []

    def run(self, sizes: list[int]) -> None:
        """Replay the births and deaths of storages of these sizes (requested bytes)."""
        marks = iter([*self._timeline.marks, None])
        mark = next(marks)
        blocks: dict[int, Block] = {}
        for position, event in enumerate(self._timeline.events.tolist()):
            while mark is not None and mark[0] <= position:
                self._step = mark[2]
                self._annotate(f"step {mark[2]}: {mark[1]}" if mark[2] else str(mark[1]))
                mark = next(marks)
            storage = event if event >= 0 else ~event
            if not sizes[storage]:
                continue
            if event >= 0:
                self._current = self._frames[storage] = self._describe(storage)
                blocks[storage] = block = self.allocator.malloc(sizes[storage])
                block.storage = storage
                self._add("alloc", block.address, sizes[storage], self._current)
            else:
                block = blocks.pop(storage)
                self.allocator.free(block)
                for action in ("free_requested", "free_completed"):
                    self._add(action, block.address, sizes[storage], self._frames[storage])
        self._add("snapshot", 0, self.allocator.allocated, [])

    def segment(self, info: SegmentInfo) -> dict[str, Any]:
        """One segment of the table at the end."""
        blocks = []
        for block in info.blocks:
            blocks.append(
                {
                    "address": block.address,
                    "size": block.size,
                    "requested_size": block.requested,
                    "state": "active_allocated" if block.allocated else "inactive",
                    "frames": self._frames[block.storage] if block.storage is not None else [],
                }
            )
        return {
            "device": 0,
            "address": info.address,
            "total_size": info.size,
            "allocated_size": info.allocated,
            "active_size": info.allocated,
            "requested_size": sum(block.requested for block in info.blocks),
            "stream": info.stream,
            "segment_type": "small" if info.small else "large",
            "segment_pool_id": (0, 0),
            "is_expandable": info.expandable,
            "frames": [],
            "blocks": blocks,
        }

    def _describe(self, storage: int) -> Frames:
        """The frames of a storage; equal ones are one object, which makes the file smaller."""
        frames = describe(self._timeline, storage, self._step)
        key = tuple((f["name"], f["filename"], f["line"]) for f in frames)
        return self._shared.setdefault(key, frames)

    def _add(self, action: str, address: int, size: int, frames: Frames) -> None:
        entry = {
            "action": action,
            "addr": address,
            "size": size,
            "stream": 0,
            "time_us": len(self.entries),
            "frames": frames,
        }
        if action != "snapshot":
            entry["category"] = frames[0]["category"]
        if action.startswith("segment"):
            entry["category"] = _SEGMENT_CATEGORY
        self.entries.append(entry)

    def _on_segment(self, action: str, address: int, size: int, stream: int) -> None:
        self._add(action, address, size, self._current)

    def _annotate(self, name: str) -> None:
        self.annotations.append(
            {"device": 0, "time_us": len(self.entries), "name": name, "stage": "START"}
        )


def _settings(settings: AllocatorSettings) -> dict[str, Any]:
    """The allocator's settings under the names of Module.cpp; sizes in bytes, -1 for no limit."""
    return {
        "PYTORCH_CUDA_ALLOC_CONF": "",
        "max_split_size": -1 if settings.max_split_size is None else settings.max_split_size,
        "garbage_collection_threshold": settings.garbage_collection_threshold,
        "expandable_segments": settings.expandable_segments,
        "release_lock_on_cudamalloc": False,
        "pinned_use_cuda_host_register": False,
        "roundup_power2_divisions": {
            str(2**i): value for i, value in enumerate(settings.divisions())
        },
    }
