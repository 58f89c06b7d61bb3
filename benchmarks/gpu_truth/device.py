"""The GPU as the measurements see it: a few calls, so that tests can put another in its place."""

from __future__ import annotations

import gc
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from batchfit.calibration.gpu import gpu_from
from batchfit.estimator import GPU

MIB = 2**20


class Device(Protocol):
    """What a measurement asks of a GPU. All sizes in bytes."""

    torch_device: torch.device
    total: int

    def fresh(self) -> tuple[int, int]:
        """Give everything back and forget the peaks; (allocated, reserved) that are left.

        After (0, 0) the allocator is as in a new process: no segment, nothing in the cache.
        """
        ...

    def restart_peaks(self) -> None:
        """Forget the peaks; nothing is given back."""
        ...

    def allocated(self) -> int:
        """Allocated now."""
        ...

    def peaks(self) -> tuple[int, int]:
        """(allocated, reserved) at most since the last ``fresh`` or ``restart_peaks``."""
        ...

    def synchronize(self) -> None:
        """Wait for the GPU; an error of an earlier kernel is raised here."""
        ...

    def limit(self, size: int | None) -> None:
        """Let the allocator reserve this much and no more; None lifts the limit."""
        ...

    def outside(self) -> int:
        """What is taken on the GPU outside this process' allocator: total - free - reserved."""
        ...

    def recording(self) -> Any:
        """A context in which allocations are recorded; its value is called for the snapshot."""
        ...


class Cuda:
    """The first visible CUDA (or ROCm) device."""

    def __init__(self) -> None:
        torch.cuda.init()
        self.torch_device = torch.device("cuda", 0)
        self.total = int(torch.cuda.get_device_properties(0).total_memory)

    def fresh(self) -> tuple[int, int]:
        # Tensors in reference cycles first; then cuBLAS' workspaces, one for each thread and
        # stream, which the next GEMM allocates anew; then the cache. An OOM may have left an
        # asynchronous error: synchronize before anything is judged.
        gc.collect()
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    def restart_peaks(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    # What memory_allocated, max_memory_allocated and max_memory_reserved read, without the flat
    # dictionary of a hundred entries that each of them makes: HiddenBytes asks at every operator.
    def allocated(self) -> int:
        return int(torch.cuda.memory_stats_as_nested_dict(0)["allocated_bytes"]["all"]["current"])

    def peaks(self) -> tuple[int, int]:
        found = torch.cuda.memory_stats_as_nested_dict(0)
        return (
            int(found["allocated_bytes"]["all"]["peak"]),
            int(found["reserved_bytes"]["all"]["peak"]),
        )

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def limit(self, size: int | None) -> None:
        # The allocator compares reserved bytes, in steps of 2 MiB, with int(fraction * total).
        # One MiB more than asked, and the rounding of the fraction cannot take away a step.
        fraction = 1.0 if size is None else min((size + MIB) / self.total, 1.0)
        torch.cuda.set_per_process_memory_fraction(fraction)

    def outside(self) -> int:
        free, total = torch.cuda.mem_get_info()
        return int(total - free - torch.cuda.memory_reserved())

    @contextmanager
    def recording(self) -> Iterator[Callable[[], dict[str, Any]]]:
        record: Any = torch.cuda.memory._record_memory_history
        record("all", context="alloc", stacks="all" if _has_cpp_frames() else "python")
        try:
            yield torch.cuda.memory._snapshot
        finally:
            record(None)


def _has_cpp_frames() -> bool:
    """C++ frames can be unwound on Linux only, and not on every processor."""
    from torch._C._profiler import gather_traceback

    try:
        gather_traceback(False, False, True)
    except RuntimeError:
        return False
    return True


def describe_card() -> dict[str, Any]:
    """The machine and its software; initialises CUDA, so it is called in a process of its own."""
    found = torch.cuda.get_device_properties(0)
    torch.cuda.init()
    free, total = torch.cuda.mem_get_info()
    return {
        "name": found.name,
        "vendor": "amd" if torch.version.hip else "nvidia",
        "total_bytes": int(found.total_memory),
        "free_bytes": int(free),
        "driver_total_bytes": int(total),
        "capability": [found.major, found.minor],
        "sm_count": found.multi_processor_count,
        "threads_per_sm": found.max_threads_per_multi_processor,
        "devices_visible": torch.cuda.device_count(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cudnn": torch.backends.cudnn.version(),
        "driver": _driver(),
        "allocator_backend": torch.cuda.get_allocator_backend(),
    }


def _driver() -> list[str]:
    """Each card's name, driver, MiB in use and in all, as nvidia-smi prints them; may be empty."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    query = "--query-gpu=name,driver_version,memory.used,memory.total"
    try:
        done = subprocess.run(
            [command, query, "--format=csv,noheader"], capture_output=True, text=True, check=False,
            timeout=30,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.strip().splitlines() if done.returncode == 0 else []


def card_gpu(card: Mapping[str, Any]) -> GPU:
    """The catalogue's entry for a card, with what the card itself says; or one made of that.

    The budgets of this benchmark are given in bytes, so of the entry only what decides kernels and
    their workspaces counts: capability, SMs, threads per SM.
    """
    major, minor = card["capability"]
    return gpu_from(
        card["name"], card["vendor"], card["total_bytes"], (int(major), int(minor)),
        card["sm_count"], threads_per_sm=card["threads_per_sm"],
    )  # fmt: skip
