"""One row of timm's training brackets as a workload, estimated in a process of its own.

    python benchmarks/timm_job.py '{"model": "resnet50", "img_size": 224, ...}'

Prints one line of JSON. The driver, `timm_brackets.py`, starts one such process per row, with the
version of timm that it wants on PYTHONPATH.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from typing import Any

os.environ["TIMM_FUSED_ATTN"] = "0"  # timm 0.6 had no fused attention

GPU = "RTX 3090"


def make_model(name: str, size: int) -> Any:
    """The timm model for images of this side; some models must be told it."""
    import timm

    model = timm.create_model(name)
    config = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", {})
    if config.get("input_size", (3, size, size))[-1] != size:
        try:
            return timm.create_model(name, img_size=size)
        except TypeError:
            return model  # takes any size
    return model


def build(row: dict[str, Any]) -> Any:
    """The step of timm 0.6's benchmark.py, as the truth files' README (item 8) describes it."""
    import torch
    from torch import nn

    size, channels_last = int(row["img_size"]), str(row["channels_last"]) == "1"

    def start(device: torch.device) -> Any:
        torch.backends.cudnn.benchmark = True
        model = make_model(row["model"], size).to(device).train()
        if channels_last:
            model = model.to(memory_format=torch.channels_last)
        classes = model.num_classes
        loss = nn.CrossEntropyLoss().to(device)
        optimizer = torch.optim.SGD(
            model.parameters(), lr=1e-4, momentum=0.9, nesterov=True, foreach=False
        )
        example: torch.Tensor | None = None

        def step(batch: int) -> None:
            nonlocal example
            if example is None:
                example = torch.randn(batch, 3, size, size, device=device)
                if channels_last:
                    example = example.contiguous(memory_format=torch.channels_last)
            optimizer.zero_grad(set_to_none=False)
            with torch.autocast("cuda", dtype=torch.float16):
                output = model(example)
                if isinstance(output, tuple):
                    output = output[0]
                target = torch.empty(batch, device=device, dtype=torch.long).random_(classes)
                loss(output, target).backward()
            optimizer.step()

        return step

    return start


def solve(row: dict[str, Any]) -> dict[str, Any]:
    """What both batch sizes of a row need."""
    import timm
    import torch

    from batchfit.estimator import Workload, estimate

    began = time.perf_counter()
    workload = Workload.from_step(build(row), name=row["model"])
    result = estimate(workload, gpu=GPU, workspaces=False)
    recorded, larger = int(row["recorded_batch"]), int(row["next_larger_tried"])
    moment = result.peak_moment(recorded)
    return {
        "timm": timm.__version__,
        "torch": torch.__version__,
        "need_recorded": result.needed(recorded),
        "need_larger": result.needed(larger),
        "peak_recorded": result.peak(recorded),
        "peak_larger": result.peak(larger),
        "affine": result.affine,
        "peak_at": [str(moment.phase), moment.operator, moment.module],
        "breakdown": {str(k): v for k, v in result.breakdown(recorded).items() if v},
        "notes": result.notes,
        "seconds": round(time.perf_counter() - began, 1),
    }


def main() -> int:
    warnings.simplefilter("ignore")
    row = json.loads(sys.argv[1])
    try:
        answer = solve(row)
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"}
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
