"""Saved calibrations: a versioned JSON file, and the key that says where it applies."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import CalibrationError, StaleCalibration

__all__ = ["SCHEMA", "changes", "check_key", "make_key", "read_file", "write_file"]

#: The form of the file. A field that goes or changes its meaning needs a new number.
SCHEMA = "batchfit.calibration/1"

# What a part of the key is called in messages. A change of these makes a calibration void: moved
# to another GPU it is off by 9 to 24 % on public data, and the libraries choose the workspaces.
_DECISIVE = {
    "job": "the workload",
    "device": "the device",
    "total": "the memory of the device",
    "precision": "the precision",
    "allocator": "the allocator's settings",
    "torch": "torch",
    "runtime": "the CUDA or ROCm version",
    "cudnn": "cuDNN",
    "ranks": "the number of ranks",
}
# A change of these is said, no more: the allocator and the kernels are torch's, not the driver's.
_SAID = {"driver": "the driver"}


def make_key(device: Mapping[str, str], job: str, precision: str, ranks: int) -> dict[str, str]:
    """What a calibration depends on.

    Args:
        device: names and versions, of ``Meter.describe``.
        job: the fingerprint of the workload.
        precision: of the workload; empty where that is not known.
        ranks: processes that calibrated together.
    """
    settings = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    allocator = next((os.environ[name] for name in settings if name in os.environ), "")
    return {
        **dict.fromkeys(_DECISIVE, ""), **dict.fromkeys(_SAID, ""), **device, "job": job,
        "precision": precision, "allocator": allocator, "ranks": str(ranks),
    }  # fmt: skip


def changes(saved: Mapping[str, str], now: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """What differs between two keys, in words: what makes a calibration void, what does not."""
    void: list[str] = []
    said: list[str] = []
    for table, found in ((_DECISIVE, void), (_SAID, said)):
        for part, name in table.items():
            before, after = saved.get(part, ""), now.get(part, "")
            if before == after:
                continue
            text = f"{name} (was {before or 'none'}, is {after or 'none'})"
            # 2.14.1+cu130 and 2.14.1+cpu are one version, whose runtime is compared by itself.
            same = part == "torch" and _release(before) == _release(after)
            (said if same else found).append(text)
    return void, said


def _release(version: str) -> str:
    return re.split(r"[+ ]", version)[0]


def check_key(saved: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Refuse a calibration that belongs elsewhere.

    Returns:
        notes on what changed and does not matter much.

    Raises:
        StaleCalibration: what matters changed.
    """
    void, said = changes(saved, now)
    if void:
        raise StaleCalibration(
            f"the saved calibration does not apply here: {', '.join(void)} changed; calibrate anew"
        )
    return [f"since the calibration {text} changed" for text in said]


def write_file(path: str | os.PathLike[str], values: Mapping[str, Any]) -> None:
    """Write a calibration; a file that exists is replaced in one move.

    Raises:
        CalibrationError: it cannot be written.
    """
    target = Path(path)
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        beside.write_text(json.dumps({"schema": SCHEMA, **values}, indent=1) + "\n", "utf-8")
        beside.replace(target)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise CalibrationError(f"cannot write the calibration {path}: {error.strerror}") from error


def read_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a calibration.

    Raises:
        CalibrationError: it cannot be read, is no calibration, or is of another version.
    """
    try:
        values = json.loads(Path(path).read_text("utf-8"))
    except OSError as error:
        raise CalibrationError(f"cannot read the calibration {path}: {error.strerror}") from error
    except ValueError as error:
        raise CalibrationError(f"{path} is not a saved calibration: {error}") from error
    schema = values.get("schema") if isinstance(values, dict) else None
    if schema != SCHEMA:
        raise CalibrationError(
            f"{path} is not a calibration this version reads (schema {schema!r}, needed {SCHEMA!r})"
        )
    return dict(values)
