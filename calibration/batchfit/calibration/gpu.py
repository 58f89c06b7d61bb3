"""The catalogue's entry for the device in front of us, or one made from what the driver says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from batchfit.estimator import GPU, TargetError, find_gpu
from batchfit.estimator.gpus import THREADS_PER_SM, context_bytes_of

from .meters import Meter

__all__ = ["gpu_from", "gpu_of"]


def gpu_of(meter: Meter) -> GPU:
    """A GPU with the kernels and the memory of the meter's device."""
    if meter.device.type != "cuda":
        return _other(meter)
    seen: Any = torch.cuda.get_device_properties(meter.device)
    return gpu_from(
        str(seen.name), "amd" if torch.version.hip else "nvidia", int(seen.total_memory),
        (int(seen.major), int(seen.minor)), int(seen.multi_processor_count),
        threads_per_sm=int(getattr(seen, "max_threads_per_multi_processor", 0)),
        arch=str(getattr(seen, "gcnArchName", "")),
    )  # fmt: skip


def gpu_from(
    name: str, vendor: str, total: int, capability: tuple[int, int], sm_count: int, *,
    threads_per_sm: int = 0, arch: str = "",
) -> GPU:  # fmt: skip
    """The catalogue's entry for a card, with the memory and SMs that it has; or one made of these.

    Args:
        name: as the driver gives it.
        vendor: "nvidia" or "amd".
        total: bytes.
        capability: CUDA compute capability. An entry of another one is another card.
        sm_count: streaming multiprocessors.
        threads_per_sm: 0 where the driver does not say.
        arch: "" for an NVIDIA card's own.
    """
    try:
        known = find_gpu(name)
    except TargetError:
        known = None
    if known is not None and known.capability == capability:
        return replace(known, total_bytes=total, sm_count=sm_count, note="")
    threads = threads_per_sm or THREADS_PER_SM.get(capability, 2048)
    return GPU(
        name=name,
        vendor=vendor,
        total_bytes=total,
        capability=capability,
        arch=(arch or f"sm_{capability[0]}{capability[1]}").split(":")[0],
        sm_count=sm_count,
        threads_per_sm=threads,
        bandwidth_gbs=0.0,
        context_bytes=context_bytes_of(vendor, sm_count, threads),
        category="here",
        exact_total=True,
        total_bytes_max=total,
        nominal_gb=round(total / 2**30),
        sources={"total_bytes": "the driver"},
        note="",
    )


def _other(meter: Meter) -> GPU:
    """XPU and MPS: kernels are taken to be those of an A100; what differs, the probes correct."""
    total = meter.memory().total
    return replace(
        find_gpu("A100 80GB"), name=meter.describe()["device"], vendor=meter.device.type,
        total_bytes=total, total_bytes_max=total, context_bytes=0,
        note="the timeline is that of an NVIDIA A100",
    )  # fmt: skip
