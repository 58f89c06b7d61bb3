"""The CPU's meter: PyTorch's profiler reports every byte that the CPU allocator hands out.

The profiler is chosen over the recorder of the trace because it sees what kernels allocate for
themselves (oneDNN's packed operands, scores of one block of attention), it leaves the step as it
is (any dispatch mode changes what autograd does in place), and it costs about 6 % of the time
(ResNet-18 at batch 4, 64 x 64). Nothing is rounded: the host has no caching allocator.
"""

from __future__ import annotations

import gc
import os
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from batchfit.estimator.units import format_bytes

from .errors import CalibrationError
from .meters import Memory, Watch

__all__ = ["CpuMeter"]

_STEP = "batchfit: step"


class CpuMeter:
    """Peak bytes of live allocations on the host. See :class:`~.meters.Meter`.

    A limit is enforced when the run is over, as the profiler gives its events only then: a run
    that exceeded it raises ``torch.OutOfMemoryError`` in the words of the CPU allocator.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.device = torch.device("cpu")
        self.limit = limit

    @contextmanager
    def watch(self, existing: int = 0) -> Iterator[Watch]:
        seen = Watch()
        with profile(
            activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=False
        ) as prof:
            yield seen
        self._read(prof, seen, existing)
        if self.limit is not None and seen.peak > self.limit:
            raise torch.OutOfMemoryError(
                f"DefaultCPUAllocator: not enough memory: the run allocated "
                f"{format_bytes(seen.peak)}, the limit is {format_bytes(self.limit)}"
            )

    @contextmanager
    def step(self, watch: Watch) -> Iterator[None]:
        start = time.perf_counter()
        with record_function(_STEP):
            yield
        watch.seconds.append(time.perf_counter() - start)

    @staticmethod
    def _read(prof: Any, seen: Watch, existing: int) -> None:
        """Add up the allocator's events in order of time, and read the sum at each step's end."""
        changes: list[tuple[int, int]] = []
        ends: list[int] = []
        for event in prof.profiler.kineto_results.events():
            name = event.name()
            if name == "[memory]":
                changes.append((event.start_ns(), event.nbytes()))
            elif name == _STEP:
                ends.append(event.start_ns() + event.duration_ns())
        changes.sort(key=lambda change: change[0])
        live = seen.peak = existing
        ends.sort()
        for moment, size in changes:
            while ends and ends[0] < moment:
                seen.ends.append(live)
                ends.pop(0)
            live += size
            seen.peak = max(seen.peak, live)
        seen.ends += [live] * len(ends)

    def memory(self) -> Memory:
        total, free = _host_memory()
        if self.limit is not None:
            return Memory(self.limit, self.limit, 0, 0)
        return Memory(total, free, 0, 0)

    def release(self) -> None:
        gc.collect()

    def describe(self) -> dict[str, str]:
        return {
            "device": f"CPU {platform.machine()}, {torch.get_num_threads()} threads",
            "total": str(_host_memory()[0]) if self.limit is None else str(self.limit),
            "driver": "",
            "torch": torch.__version__,
            "runtime": "",
        }


def _host_memory() -> tuple[int, int]:
    """Total and available bytes of this host, or of the container it runs in."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        total, free = (int(lines[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
    elif sys.platform == "win32":
        total, free = _windows_memory()
    else:
        try:
            total = free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (ValueError, OSError):
            raise CalibrationError(
                "this system does not say how much memory the host has; give budget="
            ) from None
    for limit_file, used_file in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        limit, used = (Path("/sys/fs/cgroup") / name for name in (limit_file, used_file))
        if limit.exists() and used.exists() and (text := limit.read_text().strip()).isdigit():
            if int(text) < total:
                total, free = int(text), min(free, int(text) - int(used.read_text()))
            break
    return total, max(free, 0)


def _windows_memory() -> tuple[int, int]:
    import ctypes

    class Status(ctypes.Structure):
        _fields_ = [
            ("length", ctypes.c_ulong), ("load", ctypes.c_ulong),
            ("total", ctypes.c_ulonglong), ("available", ctypes.c_ulonglong),
            *((name, ctypes.c_ulonglong) for name in ("c", "d", "e", "f", "g")),
        ]  # fmt: skip

    status = Status()
    status.length = ctypes.sizeof(Status)
    ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status))  # type: ignore[attr-defined,unused-ignore]
    return int(status.total), int(status.available)
