"""The largest batch that fits, against public rows that say which one did and which did not.

    python benchmarks/max_batch.py tests/data/truth/max_batch.csv [--out max_batch.json]

For every row of high confidence the job is built as its columns say and two questions are asked:
does the batch that fitted fit, and does the one that failed fail? What lies outside the allocator
is one figure per GPU, not per row: the context that the library's catalogue derives from the number
of SMs (`gpus.py`). The total is the row's own where it gives one. Rows whose job cannot be built
here are listed with the reason.

Hugging Face rows need the library of their time in front on PYTHONPATH: transformers 4.41, and 4.48
for the sdpa row of Pythia, which 4.41 cannot do.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from batchfit.estimator import Estimate, Workload, estimate, find_gpu
from batchfit.estimator.gpus import context_bytes_of

MIB = 2**20

# Total bytes where the row states them; elsewhere the catalogue's.
TOTALS = {
    "t4_resnet50_none": 15_830_000_000,
    "t4_resnet50_per_block": 15_830_000_000,
    "xmem_cnxb_adamw_3060": 12_622_168_064,
    "xmem_r152_adam_3060": 12_622_168_064,
    "xmem_r101_sgd_4060": 8_318_222_336,
}
# Not in the catalogue: its nominal memory and 58 SMs (NVIDIA's product page).
LAPTOP_3080_TI = replace(
    find_gpu("RTX 3070 Laptop"), name="RTX 3080 Ti Laptop", total_bytes=16 * 2**30,
    sm_count=58, context_bytes=context_bytes_of("nvidia", 58, 1536),
)  # fmt: skip
NOT_BUILT = {
    "litgpt_llama2_7b_lora_40g": "needs litgpt at commit 8641822 (its own model and LoRA code)",
    "litgpt_llama2_13b_lora_40g": "needs litgpt at commit 8641822 (its own model and LoRA code)",
}
Job = Callable[[], Workload]


def once(trial: Callable[[torch.device, int], None], name: str) -> Workload:
    """A trial that makes everything anew and runs once, with an empty cache before it."""

    def build(device: torch.device) -> Callable[[int], None]:
        ran: list[int] = []

        def step(batch: int) -> None:
            if not ran:
                ran.append(batch)
                trial(device, batch)

        return step

    return Workload.from_step(build, name=name)


def t4_resnet50(checkpointed: bool) -> Workload:
    """Forward and backward of a fresh model; no optimizer, the gradients are allocated."""
    import torchvision
    from torch.utils.checkpoint import checkpoint

    def trial(device: torch.device, batch: int) -> None:
        model = torchvision.models.resnet50(num_classes=1000).to(device)
        if checkpointed:
            for layer in (model.layer1, model.layer2, model.layer3, model.layer4):
                for block in layer:
                    plain = block.forward
                    block.forward = lambda x, plain=plain: checkpoint(plain, x, use_reentrant=False)
        x = torch.randn(batch, 3, 224, 224, device=device)
        y = torch.randint(0, 1000, (batch,), device=device)
        output = model(x)
        nn.CrossEntropyLoss()(output, y).backward()

    return once(trial, "resnet50, 16 blocks checkpointed" if checkpointed else "resnet50")


def xmem(name: str, optimizer: str) -> Workload:
    """xMem's loop: CIFAR-10 at 86 pixels, 10 classes, zero_grad at its start, defaults."""
    import torchvision

    return Workload(
        model=lambda: torchvision.models.get_model(name, weights=None, num_classes=10),
        inputs=lambda b: torch.empty(b, 3, 86, 86),
        loss="cross_entropy",
        optimizer=optimizer,
        name=f"{name}, {optimizer}",
    )


def language_model(kind: str, length: int, attention: str) -> Workload:
    """The Hugging Face tables: fp16 weights, ``logits.sum()``, outputs stay until the next ones."""
    import transformers

    def build(device: torch.device) -> Callable[[int], None]:
        if kind == "pythia":
            config = transformers.GPTNeoXConfig(
                hidden_size=1024, num_hidden_layers=24, num_attention_heads=16,
                intermediate_size=4096, vocab_size=50304, rotary_pct=0.25,
                attn_implementation=attention,
            )  # fmt: skip
        else:
            config = transformers.OPTConfig(
                hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, ffn_dim=4096,
                vocab_size=50272, word_embed_proj_dim=512, do_layer_norm_before=False,
                attn_implementation=attention,
            )  # fmt: skip
        model = transformers.AutoModelForCausalLM.from_config(config, torch_dtype=torch.float16)
        model = model.to(device).train()
        kept: dict[str, Any] = {}

        def step(batch: int) -> None:
            ids = torch.randint(100, 1000, (batch, length), device=device)
            model.zero_grad()
            kept["outputs"] = model(input_ids=ids)
            kept["outputs"].logits.sum().backward()

        return step

    return Workload.from_step(build, name=f"{kind} {length} {attention}")


JOBS: dict[str, Job] = {
    "t4_resnet50_none": lambda: t4_resnet50(False),
    "t4_resnet50_per_block": lambda: t4_resnet50(True),
    "xmem_cnxb_adamw_3060": lambda: xmem("convnext_base", "adamw:lr=1e-3"),
    "xmem_r101_sgd_4060": lambda: xmem("resnet101", "sgd:lr=1e-3,momentum=0"),
    "xmem_r152_adam_3060": lambda: xmem("resnet152", "adam:lr=1e-3"),
    "hfsdpa_opt350m_eager_2048b": lambda: language_model("opt", 1024, "eager"),
    "hfsdpa_pythia_eager_1024": lambda: language_model("pythia", 1024, "eager"),
    "hfsdpa_pythia_eager_2048": lambda: language_model("pythia", 2048, "eager"),
    "hfsdpa_pythia_sdpa_2048": lambda: language_model("pythia", 2048, "sdpa"),
}


def largest(result: Estimate, budget: int) -> int:
    """The largest batch whose need is within the budget."""
    return result.largest_batch(budget=budget)


def solve(row: dict[str, str]) -> dict[str, Any]:
    """One row of the table. Bytes."""
    name = row["id"]
    if name in NOT_BUILT:
        return {"id": name, "not_built": NOT_BUILT[name]}
    if name not in JOBS:
        return {"id": name, "not_built": "no job is written for it"}
    gpu = LAPTOP_3080_TI if row["gpu"] == "RTX3080Ti laptop" else find_gpu(row["gpu"])
    total = TOTALS.get(name, gpu.total_bytes)
    budget = total - gpu.context_bytes
    began = time.perf_counter()
    result = estimate(JOBS[name](), gpu=gpu)
    fitted = int(row["fits_batch_per_gpu"] or 0)
    failed = int(row["oom_batch_per_gpu"] or 0)
    answer: dict[str, Any] = {
        "id": name, "gpu": gpu.name, "total": total, "outside": gpu.context_bytes,
        "budget": budget, "fitted": fitted or None, "failed": failed or None,
        "predicted_largest": largest(result, budget),
    }  # fmt: skip
    off, right = 0, True
    for what, batch, runs in (("need_fitted", fitted, True), ("need_failed", failed, False)):
        if batch:
            answer[what] = result.needed(batch)
            if (result.replay(batch, budget).oom is None) is not runs:
                off, right = answer[what] - budget, False
    answer |= {"off": off, "off_percent": round(100 * off / budget, 2), "right": right}
    answer["seconds"] = round(time.perf_counter() - began, 1)
    return answer


def line(row: dict[str, Any]) -> str:
    if "not_built" in row:
        return f"{row['id']:<30} not built: {row['not_built']}"
    if "error" in row:
        return f"{row['id']:<30} error: {row['error']}"
    verdict = "right" if row["right"] else f"off by {row['off'] / MIB:+.0f} MiB"
    return (
        f"{row['id']:<30} {row['gpu']:<20} budget {row['budget'] / MIB:8.0f} MiB  fits "
        f"{row['fitted'] or '-':>4}  oom {row['failed'] or '-':>4}  predicted "
        f"{row['predicted_largest']:>4}  {verdict} ({row['off_percent']:+.2f} %)"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("csv", type=Path)
    parser.add_argument("--out", type=Path, help="write the table as JSON")
    parser.add_argument("--only", default="", help="only rows whose id contains this")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    os.environ.pop("PYTORCH_CUDA_ALLOC_CONF", None)
    rows = []
    with arguments.csv.open(newline="") as file:
        for row in csv.DictReader(file):
            if row["confidence"] != "high" or arguments.only not in row["id"]:
                continue
            try:
                rows.append(solve(row))
            except Exception as error:
                said = (str(error).splitlines() or [""])[0][:300]
                rows.append({"id": row["id"], "error": f"{type(error).__name__}: {said}"})
            print(line(rows[-1]), flush=True)
    judged = [row for row in rows if "right" in row]
    print(f"{sum(row['right'] for row in judged)} of {len(judged)} rows right")
    if arguments.out:
        arguments.out.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
