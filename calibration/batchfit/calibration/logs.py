"""Measured peaks in the logs of trainers, to compare a prediction with."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from batchfit.estimator.units import GIB, MIB

from .errors import CalibrationError

__all__ = ["LoggedPeak", "read_log"]


@dataclass(frozen=True, slots=True)
class LoggedPeak:
    """A peak that a trainer wrote down.

    Attributes:
        bytes: the largest value in the log.
        reserved: whether the trainer logs what is reserved, and not what is allocated.
        trainer: whose wording it is.
        resolution: bytes by which the printed value may be off.
    """

    bytes: int
    reserved: bool
    trainer: str
    resolution: int


@dataclass(frozen=True, slots=True)
class _Wording:
    trainer: str
    pattern: re.Pattern[str]
    unit: int
    reserved: bool = False


# How trainers print it, and the unit that their code divides by. The first that matches counts.
_WORDINGS = (
    _Wording("torch", re.compile(r"max_memory_allocated\D{0,40}?(\d{6,})\b"), 1),
    _Wording("torch", re.compile(r"max_memory_reserved\D{0,40}?(\d{6,})\b"), 1, reserved=True),
    # mmengine and mmcv, LoggerHook: int(max_memory_allocated / 2**20)
    _Wording("mmengine", re.compile(r"\bmemory: (\d+)(?![\d.]*\s*G)"), MIB),
    # detectron2, CommonMetricPrinter: max_memory_allocated / 1024.0 / 1024.0
    _Wording("detectron2", re.compile(r"\bmax_mem: (\d+)M\b"), MIB),
    # torchtitan, DeviceMemoryMonitor: max reserved, in GiB
    _Wording("torchtitan", re.compile(r"\bmemory:\s*([\d.]+)GiB"), GIB, reserved=True),
    # torchtune, get_memory_stats: max_memory_allocated / 1024**3
    _Wording("torchtune", re.compile(r"\bpeak_memory_alloc:([\d.]+)"), GIB),
    # litgpt: max_memory_allocated() / 1e9
    _Wording("litgpt", re.compile(r"\bMemory used: ([\d.]+) GB"), 10**9),
)


def read_log(path: str | os.PathLike[str]) -> LoggedPeak:
    """The largest peak in a trainer's log.

    Raises:
        CalibrationError: it cannot be read, or holds no wording that is known.
    """
    try:
        text = Path(path).read_text("utf-8", errors="replace")
    except OSError as error:
        raise CalibrationError(f"cannot read the log {path}: {error.strerror}") from error
    for wording in _WORDINGS:
        found = wording.pattern.findall(text)
        if found:
            printed = max(found, key=float)
            digits = len(printed.partition(".")[2])
            resolution = wording.unit if wording.unit > 1 else 1
            return LoggedPeak(
                int(float(printed) * wording.unit), wording.reserved, wording.trainer,
                max(int(resolution * 10.0**-digits), 1),
            )  # fmt: skip
    names = ", ".join(dict.fromkeys(wording.trainer for wording in _WORDINGS))
    raise CalibrationError(
        f"{path} holds no peak in a wording that is known ({names}); give the number itself"
    )
