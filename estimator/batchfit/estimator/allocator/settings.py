"""The settings of PyTorch's CUDA allocator that change how much memory a job takes.

They come from ``PYTORCH_CUDA_ALLOC_CONF`` or ``PYTORCH_ALLOC_CONF`` (conf.py reads the syntax).
What they do is confirmed by real traces only for ``expandable_segments``: see `AllocatorSettings`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from batchfit.estimator.errors import WorkloadError
from batchfit.estimator.units import MIB

from .conf import ROUNDUP_INTERVALS, read_conf

__all__ = ["AllocatorSettings"]

LARGE_SEGMENT = 20 * MIB
"""Bytes of a segment that requests of 1 to 10 MiB share (AllocatorConfig.h, large_segment_size_).
Confirmed by 40 classic traces, and as the page of large expandable ranges by 4 more."""

_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # the first that is set wins, 2.14.1


@dataclass(frozen=True, slots=True)
class AllocatorSettings:
    """What the user told PyTorch's CUDA allocator. All sizes in bytes.

    Attributes:
        expandable_segments: one growing range per stream and pool instead of a segment per
            cudaMalloc. *Confirmed by traces.*
        max_split_size: blocks of this size and larger are neither split nor given to smaller
            requests; None: no limit. *Not confirmed by a trace*, read from the source.
        max_non_split_rounding: a request of ``max_split_size`` or more accepts a cached block up
            to this much larger. *Not confirmed by a trace.*
        large_segment_size: segment that requests of 1 to 10 MiB share, and the page of large
            expandable ranges. *Confirmed by traces at its default only.*
        roundup_power2_divisions: for sizes in [1, 2) MiB, [2, 4) MiB ... [32, 64) GiB, into how
            many steps a power of two is divided when a request is rounded up; smaller sizes use
            the first entry, larger ones the last; 0 and 1 mean multiples of 512 bytes; empty:
            all 0. *Not confirmed by a trace*; the table is that of the installed PyTorch.
        garbage_collection_threshold: fraction of the budget above which blocks that were not
            reused lately are returned before a new segment is taken; 0: never. *Not confirmed by
            a trace.*
        memory_fraction: ``per_process_memory_fraction``: the share of the device's memory that
            the process may reserve. Whoever knows the device lowers the budget by it; the twin
            itself does not use it.

    Raises:
        WorkloadError: a value that PyTorch does not accept.
    """

    expandable_segments: bool = False
    max_split_size: int | None = None
    max_non_split_rounding: int = LARGE_SEGMENT
    large_segment_size: int = LARGE_SEGMENT
    roundup_power2_divisions: tuple[int, ...] = ()
    garbage_collection_threshold: float = 0.0
    memory_fraction: float = 1.0

    def __post_init__(self) -> None:
        least = self.large_segment_size
        for valid, message in (
            (least > 10 * MIB, f"large_segment_size_mb must be above 10, not {least / MIB:g}"),
            (
                self.max_split_size is None or self.max_split_size >= least,
                f"max_split_size_mb must be at least {least // MIB} (the large segment size)",
            ),
            (
                len(self.roundup_power2_divisions) in (0, ROUNDUP_INTERVALS),
                f"roundup_power2_divisions needs {ROUNDUP_INTERVALS} values, one per power of two",
            ),
            (
                all(value >= 0 and value & (value - 1) == 0 for value in self.divisions()),
                "roundup_power2_divisions must be powers of two, or 0 to switch the rounding off",
            ),
            (
                0.0 <= self.garbage_collection_threshold < 1.0,
                "garbage_collection_threshold must lie between 0.0 and 1.0, both excluded",
            ),
            (
                0.0 <= self.memory_fraction <= 1.0,
                "per_process_memory_fraction must lie between 0.0 and 1.0",
            ),
        ):
            if not valid:
                raise WorkloadError(f"allocator settings: {message}")

    def divisions(self) -> tuple[int, ...]:
        """Return the 16 divisions, zeros if the rounding is off."""
        return self.roundup_power2_divisions or (0,) * ROUNDUP_INTERVALS

    @classmethod
    def parse(cls, text: str) -> AllocatorSettings:
        """Read the syntax of ``PYTORCH_CUDA_ALLOC_CONF``: ``key:value,key:value``.

        Raises:
            WorkloadError: unknown key, a value that PyTorch refuses, or ``backend:cudaMallocAsync``
                (another allocator, which this twin does not imitate).

        >>> AllocatorSettings.parse("expandable_segments:True").expandable_segments
        True
        >>> AllocatorSettings.parse("max_split_size_mb:128").max_split_size
        134217728
        """
        values = read_conf(text)
        settings = cls(**values)  # type: ignore[arg-type]  # each reader gives its field's type
        if settings.max_non_split_rounding < settings.large_segment_size and (
            "max_non_split_rounding" in values  # PyTorch leaves the default of 20 MiB alone
        ):
            least = settings.large_segment_size // MIB
            raise WorkloadError(
                f"allocator settings: max_non_split_rounding_mb must be at least {least}"
            )
        return settings

    @classmethod
    def from_environment(cls) -> AllocatorSettings:
        """Read the settings PyTorch would use in this process.

        ``PYTORCH_CUDA_ALLOC_CONF`` wins over ``PYTORCH_ALLOC_CONF`` (seen on torch 2.14.1).

        Raises:
            WorkloadError: as `parse`; the message names the variable.
        """
        for variable in _VARIABLES:
            text = os.environ.get(variable)
            if text is not None:
                try:
                    return cls.parse(text)
                except WorkloadError as error:
                    raise WorkloadError(f"{variable}: {error}") from None
        return cls()
