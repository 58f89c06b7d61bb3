"""scaling_h100.yaml: memory of the process against the batch size, by nvidia-smi.

The absolute value holds the context and cached blocks, so growth is compared: reserved bytes from
the smallest batch of a series to each larger one. The answer's error is that of the largest.
"""

from __future__ import annotations

from itertools import pairwise

import yaml
from benchmarks.accuracy.entries import TRUTH, Answer, Entry, Question, compared
from benchmarks.accuracy.jobs.milabench import JOBS

MIB = 2**20
NOT_BUILT = {
    "resnet50-noio": "another loop of the same model; its options are not in the data",
    "lightning": "Lightning's own loop; its logging keeps tensors that are not known",
    "resnet152-ddp-gpus": "DDP on eight GPUs",
    "focalnet": "timm's script with its own data mixing and EMA, not described in the data",
    "dinov2": "the repository's own trainer, with several models and crops",
    "reformer": "its chunks and hash buckets depend on the data",
}
Series = list[tuple[int, int]]  # batch, bytes


def series() -> dict[str, Series]:
    """Name -> measured (batch, bytes), one per batch size: repeated runs differ by up to 0.03 %."""
    read = yaml.safe_load((TRUTH / "scaling_h100.yaml").read_text(encoding="utf-8"))
    found: dict[str, Series] = {}
    for name, values in read.items():
        points: dict[int, int] = {}
        for seen in values["observations"]:
            if seen["batch_size"] and seen["memory"]:
                size = int(float(str(seen["memory"]).split()[0]) * MIB)
                points[int(seen["batch_size"])] = min(
                    size, points.get(int(seen["batch_size"]), size)
                )
        found[name] = sorted(points.items())
    return found


def _why(name: str, points: Series) -> str:
    if name in JOBS:
        return ""
    found = [reason for start, reason in NOT_BUILT.items() if name.startswith(start)]
    if found:
        return found[0]
    if any(b[1] < a[1] for a, b in pairwise(points)):
        return "its memory falls where the batch grows: not decided by the batch alone"
    return "its job is not fully described in the data"


def entries(name: str) -> list[Entry]:
    found = []
    for row, points in series().items():
        if len(points) < 2:
            continue
        found.append(
            Entry(
                name, row, row.split("-")[0], "growth of process memory with the batch", "medium",
                JOBS[row].environment if row in JOBS else "", _why(row, points),
                {"points": points, "measured": points[-1][1] - points[0][1]},
            )
        )  # fmt: skip
    return found


def questions(entry: Entry) -> list[Question]:
    job, points = JOBS[entry.row], entry.facts["points"]
    return [Question(job, points[-1][0]), Question(job, points[0][0], -1)]


def solve(entry: Entry) -> Answer:
    points: Series = [(int(b), int(m)) for b, m in entry.facts["points"]]
    e = JOBS[entry.row].estimate()
    reserved = [e.reserved(batch) for batch, _ in points]
    return compared(
        points[-1][1] - points[0][1], reserved[-1] - reserved[0], affine=e.affine,
        points=[
            {"batch": batch, "measured": size, "predicted": predicted}
            for (batch, size), predicted in zip(points, reserved, strict=True)
        ],
    )  # fmt: skip
