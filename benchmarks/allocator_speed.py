"""Time `replay` on the recorded traces: milliseconds per 10,000 events on one core.

python benchmarks/allocator_speed.py tests/data/oracle
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import allocator_traces

from batchfit.estimator.allocator import AllocatorSettings, replay

REPEATS = 5


def timeline(trace: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Return a trace as births and deaths; what lives at its start is born first."""
    events: list[int] = []
    sizes: list[int] = []
    owner: dict[int, int] = {}

    def born(address: int, size: int) -> None:
        owner[address] = len(sizes)
        events.append(len(sizes))
        sizes.append(size)

    for segment in trace["start"].segments:
        for block in segment.blocks:
            if block.allocated:
                born(block.address, block.requested)
    for action, address, size, _ in trace["events"]:
        if action == "alloc":
            born(address, size)
        elif action == "free_completed":
            events.append(~owner.pop(address))
    return events, sizes


def main(arguments: list[str]) -> int:
    """Print the best of five runs per trace, classic and expandable."""
    folder = Path(arguments[0] if arguments else "tests/data/oracle")
    print(f"{'trace':10} {'events':>7} {'classic':>9} {'expandable':>11}   ms per 10,000 events")
    total = {False: 0.0, True: 0.0}
    count = 0
    for path in sorted(folder.glob("allocator/*.json.gz")):
        events, sizes = timeline(allocator_traces.read(path))
        count += len(events)
        row = []
        for expandable in (False, True):
            settings = AllocatorSettings(expandable_segments=expandable)
            best = min(_seconds(events, sizes, settings) for _ in range(REPEATS))
            total[expandable] += best
            row.append(best / len(events) * 1e7)
        print(f"{path.name[:9]:10} {len(events):7} {row[0]:9.1f} {row[1]:11.1f}")
    mean = [total[expandable] / count * 1e7 for expandable in (False, True)]
    print(f"{'all':10} {count:7} {mean[0]:9.1f} {mean[1]:11.1f}")
    return 0


def _seconds(events: list[int], sizes: list[int], settings: AllocatorSettings) -> float:
    start = time.perf_counter()
    replay(events, sizes, settings=settings)
    return time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
