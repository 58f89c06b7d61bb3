"""Meters: how much memory a run takes on the device in front of you, behind one interface.

=======  =========================  ============================  =================================
device   peak allocated             peak reserved                 source
=======  =========================  ============================  =================================
cuda     max_memory_allocated       max_memory_reserved           torch.cuda (ROCm: the same calls)
xpu      max_memory_allocated       max_memory_reserved           torch.xpu
mps      after each step only       driver_allocated_memory       torch.mps keeps no peak
cpu      allocator events           none: nothing is cached       torch.profiler (meter_cpu.py)
=======  =========================  ============================  =================================
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from batchfit.estimator.units import format_bytes

from .errors import CalibrationError

__all__ = ["AcceleratorMeter", "Memory", "Meter", "MpsMeter", "Watch", "find_meter"]


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of a device at one moment. All in bytes.

    Attributes:
        total: of the device, as the process sees it (a MIG slice is a device).
        free: that nobody holds.
        reserved: held by this process's allocator, in use or cached.
        allocated: of that, in use.
    """

    total: int
    free: int
    reserved: int
    allocated: int


@dataclass(slots=True)
class Watch:
    """What was seen of one run. All in bytes.

    Attributes:
        peak: the most that was allocated at once.
        reserved: the most that the allocator held; None where there is no caching allocator.
        ends: what was allocated when each step had ended.
        seconds: how long each step took.
        retries: how often the allocator gave back its cache to serve a request.
    """

    peak: int = 0
    reserved: int | None = None
    ends: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    retries: int = 0


class Meter(Protocol):
    """A device that memory is measured on.

    Attributes:
        device: where steps run.
        limit: bytes that the allocator may reserve, enforced by the meter; None: the device's own.
    """

    device: torch.device
    limit: int | None

    def watch(self, existing: int = 0) -> Any:
        """A context manager that yields a :class:`Watch`, complete once the block has ended.

        ``existing``: bytes of the job that were on the device before; the CPU's meter, which sees
        only what happens within the block, adds them.

        Within it, each step runs in :meth:`step`. Where the limit is exceeded, the block or the
        step raises ``torch.OutOfMemoryError``.
        """

    def step(self, watch: Watch) -> Any:
        """A context manager around one step."""

    def memory(self) -> Memory:
        """The device's memory now, with this process's cache given back."""

    def release(self) -> None:
        """Give back what nobody uses any more."""

    def describe(self) -> dict[str, str]:
        """Names and versions that decide how much memory a job takes."""


def find_meter(device: str | torch.device | None = None, limit: int | None = None) -> Meter:
    """The meter of a device.

    Args:
        device: None takes the accelerator that torch sees, else the CPU.
        limit: bytes that the allocator may reserve; None: what the device has.

    Raises:
        CalibrationError: there is no such device, or none that can be measured.
    """
    chosen = _default_device() if device is None else _parse(device)
    if chosen.type == "cpu":
        from .meter_cpu import CpuMeter

        return CpuMeter(limit)
    if chosen.type in ("cuda", "xpu"):
        module = getattr(torch, chosen.type, None)
        if module is None or not module.is_available():
            raise CalibrationError(_absent(chosen.type))
        index = module.current_device() if chosen.index is None else chosen.index
        if index >= module.device_count():
            raise CalibrationError(
                f"there is no device {chosen.type}:{index}; torch sees {module.device_count()}"
            )
        return AcceleratorMeter(torch.device(chosen.type, index), limit)
    if chosen.type == "mps":
        if not torch.backends.mps.is_available():
            raise CalibrationError(_absent("mps"))
        return MpsMeter(limit)
    raise CalibrationError(
        f"memory cannot be measured on {chosen.type!r}; what can: cuda (ROCm too), xpu, mps, cpu"
    )


def _parse(device: str | torch.device) -> torch.device:
    try:
        return torch.device(device)
    except RuntimeError:
        raise CalibrationError(
            f"{device!r} names no device; write cuda:0, xpu, mps or cpu"
        ) from None


def _absent(kind: str) -> str:
    return (
        f"torch sees no {kind} device here (torch {torch.__version__}); to measure on the host "
        "give device='cpu', to predict without a device use batchfit.estimator"
    )


def _default_device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if torch.backends.mps.is_available():
        return torch.device("mps")
    xpu = getattr(torch, "xpu", None)
    if xpu is not None and xpu.is_available():
        return torch.device("xpu", xpu.current_device())
    return torch.device("cpu")


class AcceleratorMeter:
    """CUDA, ROCm and XPU: the caching allocator's own statistics. See :class:`Meter`."""

    def __init__(self, device: torch.device, limit: int | None = None) -> None:
        self.device = device
        self.limit = limit
        self._torch: Any = getattr(torch, device.type)

    @contextmanager
    def watch(self, existing: int = 0) -> Iterator[Watch]:
        seen = Watch()
        self.release()
        stats = self._torch.memory_stats(self.device)
        retries = stats.get("num_alloc_retries", 0)
        self._torch.reset_peak_memory_stats(self.device)
        with self._limited():
            try:
                yield seen
                self._torch.synchronize(self.device)
            finally:
                seen.peak = int(self._torch.max_memory_allocated(self.device))
                seen.reserved = int(self._torch.max_memory_reserved(self.device))
                stats = self._torch.memory_stats(self.device)
                seen.retries = int(stats.get("num_alloc_retries", 0) - retries)

    @contextmanager
    def step(self, watch: Watch) -> Iterator[None]:
        self._torch.synchronize(self.device)
        start = time.perf_counter()
        yield
        self._torch.synchronize(self.device)
        watch.seconds.append(time.perf_counter() - start)
        watch.ends.append(int(self._torch.memory_allocated(self.device)))

    @contextmanager
    def _limited(self) -> Iterator[None]:
        """set_per_process_memory_fraction bounds what the allocator reserves, without context."""
        if self.limit is None:
            yield
            return
        total = self.memory().total
        if self.limit > total:
            raise CalibrationError(
                f"a limit of {format_bytes(self.limit)} is more than the {format_bytes(total)} of "
                f"{self.device}"
            )
        before = self._fraction()
        set_fraction = self._torch.set_per_process_memory_fraction
        set_fraction(min(before, self.limit / total), self.device)
        try:
            yield
        finally:
            set_fraction(before, self.device)

    def _fraction(self) -> float:
        """The share of the device that the process may reserve already."""
        get = getattr(self._torch, "get_per_process_memory_fraction", None)
        return 1.0 if get is None else float(get(self.device))

    def memory(self) -> Memory:
        self.release()
        free, total = self._torch.mem_get_info(self.device)
        reserved = int(self._torch.memory_reserved(self.device))
        share = self._fraction()
        if share < 1.0:  # what the process may still take of its share
            free = min(free, int(total * share) - reserved)
        allocated = int(self._torch.memory_allocated(self.device))
        return Memory(int(total), max(int(free), 0), reserved, allocated)

    def release(self) -> None:
        gc.collect()  # an exception's frames and autograd graphs hang in cycles
        self._torch.synchronize(self.device)
        self._torch.empty_cache()

    def describe(self) -> dict[str, str]:
        properties = self._torch.get_device_properties(self.device)
        found = {
            "device": str(properties.name),
            "total": str(properties.total_memory),
            "driver": _driver(self.device),
            "torch": torch.__version__,
            "runtime": str(torch.version.hip or torch.version.cuda or torch.version.xpu or ""),
        }
        if self.device.type == "cuda":
            found["cudnn"] = str(torch.backends.cudnn.version() or "")  # type: ignore[no-untyped-call]
        return found


def _driver(device: torch.device) -> str:
    """The driver's version, as far as torch can tell it."""
    if device.type == "xpu":
        return str(getattr(torch.xpu.get_device_properties(device), "driver_version", ""))
    find = getattr(torch._C, "_cuda_getDriverVersion", None)
    return str(find()) if find is not None else ""


class MpsMeter:
    """Apple GPUs. torch.mps keeps no peak of what is allocated, but its driver pool only grows
    until it is given back, so that what it holds after the run is the peak of what was reserved.
    See :class:`Meter`.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.device = torch.device("mps")
        self.limit = limit

    @contextmanager
    def watch(self, existing: int = 0) -> Iterator[Watch]:
        seen = Watch()
        self.release()
        total = int(torch.mps.recommended_max_memory())
        if self.limit is not None:
            torch.mps.set_per_process_memory_fraction(min(self.limit / total, 2.0))
        try:
            yield seen
            torch.mps.synchronize()
        finally:
            seen.reserved = int(torch.mps.driver_allocated_memory())
            seen.peak = max([seen.reserved, *seen.ends])
            if self.limit is not None:
                # PYTORCH_MPS_HIGH_WATERMARK_RATIO's default (MPSAllocator.h)
                torch.mps.set_per_process_memory_fraction(1.7)

    @contextmanager
    def step(self, watch: Watch) -> Iterator[None]:
        torch.mps.synchronize()
        start = time.perf_counter()
        yield
        torch.mps.synchronize()
        watch.seconds.append(time.perf_counter() - start)
        watch.ends.append(int(torch.mps.current_allocated_memory()))

    def memory(self) -> Memory:
        self.release()
        total = int(torch.mps.recommended_max_memory())
        reserved = int(torch.mps.driver_allocated_memory())
        return Memory(
            total, max(total - reserved, 0), reserved, int(torch.mps.current_allocated_memory())
        )

    def release(self) -> None:
        gc.collect()
        torch.mps.synchronize()
        torch.mps.empty_cache()

    def describe(self) -> dict[str, str]:
        import platform

        return {
            "device": f"Apple {platform.machine()}",
            "total": str(torch.mps.recommended_max_memory()),
            "driver": platform.mac_ver()[0],
            "torch": torch.__version__,
        }
