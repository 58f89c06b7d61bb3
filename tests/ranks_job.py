"""Run by ``torchrun`` in test_calibration_ranks.py: two ranks calibrate together."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from batchfit.calibration import CalibrationError, ProbeOptions, calibrate


def calibrated(kind: str) -> dict[str, object]:
    """What this rank gets of one joint calibration."""
    rank = dist.get_rank()
    weight = torch.zeros(1000, requires_grad=True)

    def step(batch: int) -> None:
        if kind == "wall" and rank == 1 and batch > 60:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        if kind == "fault" and rank == 1 and batch > 10:
            raise ValueError("a fault of rank 1")
        each = 3 if kind == "uneven" and rank == 1 else 2
        rows = torch.empty(batch * each, 2**15).fill_(1.0)
        (weight.sum() * rows.sum()).backward()
        weight.grad = None

    options = ProbeOptions(warm_up=1, repeats=1)
    try:
        made = calibrate(step, device="cpu", budget=100 * 2 * 2**17, options=options)
    except (CalibrationError, ValueError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {
        "batch": made.largest_batch(),
        "asked": [probe.batch for probe in made.probes],
        "ran": [probe.ran for probe in made.probes],
        "ranks": made.key["ranks"],
    }


def main(folder: str) -> None:
    """Calibrate three times, and write what came of it."""
    dist.init_process_group("gloo")
    found = {kind: calibrated(kind) for kind in ("wall", "uneven", "fault")}
    (Path(folder) / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
