"""How long tracing takes, beside a real step on the same CPU and beside other tools.

    python benchmarks/speed.py [--out results.json] [--threads N]

Times are minima over three runs in one process; process memory is the peak of a fresh process.
Compared are: both traces of an estimate, one real forward and backward pass, MemTracker (PyTorch's
own) over fake tensors, torchinfo on meta, and for a 7B model the memory that an estimate takes.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from batchfit.estimator import Workload, estimate

Made = tuple[torch.nn.Module, Callable[[int], Any], Callable[[Any], torch.Tensor], int]


def resnet50() -> Made:
    import torchvision

    model = torchvision.models.resnet50()
    return model, lambda b: torch.randn(b, 3, 224, 224), lambda out: out.sum(), 8


def gpt2() -> Made:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(use_cache=False))
    return model, lambda b: torch.randint(0, 50257, (b, 1024)), lambda out: out.logits.sum(), 1


MODELS = {"resnet50": resnet50, "gpt2": gpt2}


def best(function: Callable[[], Any], runs: int = 3) -> float:
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def measure(name: str) -> dict[str, Any]:
    make = MODELS[name]
    model, inputs, loss, batch = make()
    workload = Workload(
        model=model, inputs=inputs, loss=lambda out, _: loss(out), optimizer="sgd", name=name
    )

    def real() -> None:
        loss(model(inputs(batch))).backward()
        model.zero_grad()

    def tracker() -> None:
        with FakeTensorMode(allow_non_fake_inputs=True), MemTracker():
            fake, fake_inputs, fake_loss, _ = make()
            fake_loss(fake(fake_inputs(batch))).backward()

    def info() -> None:
        import torchinfo

        torchinfo.summary(model, input_data=inputs(batch), verbose=0, cache_forward_pass=False)

    made = estimate(workload, gpu="A100 80GB")
    batches = iter(range(1000, 100000))
    row = {
        "model": name,
        "real_batch": batch,
        "real_forward_backward_s": best(real),
        "both_traces_s": best(lambda: estimate(workload, gpu="A100 80GB")),
        "answer_s": best(lambda: made.largest_batch(), 1),
        "peak_of_a_new_batch_ms": 1000 * best(lambda: made.peak(next(batches)), 20),
        "timeline_peak_ms": 1000 * best(lambda: made.timeline_at(2).peak(next(batches)), 20),
        "events": len(made.timeline_at(2).events),
        "torchinfo_s": best(info),
    }
    try:
        row["mem_tracker_fake_s"] = best(tracker, 1)
    except Exception as error:  # a peer may fail; the table says how
        row["mem_tracker_fake_s"] = f"{type(error).__name__}: {str(error)[:80]}"
    return row


def llama() -> dict[str, Any]:
    """In a process of its own: Llama-7B from its configuration, sequence 2048, bf16, AdamW."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    from transformers import LlamaConfig, LlamaForCausalLM

    def inputs(b: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, 32000, (b, 2048))
        return {"input_ids": ids, "labels": ids}

    start = time.perf_counter()
    e = estimate(
        Workload(
            model=lambda: LlamaForCausalLM(LlamaConfig()), inputs=inputs, precision="bf16",
            optimizer="adamw", name="llama-7b",
        ),
        gpu="A100 80GB",
    )  # fmt: skip
    seconds = time.perf_counter() - start
    start = time.perf_counter()
    answer = e.answer()
    return {
        "model": "llama-7b",
        "both_traces_s": seconds,
        "answer_s": time.perf_counter() - start,
        "peak_1_bytes": e.peak(1),
        "largest_batch": answer.batch,
        "events": len(e.timeline_at(2).events),
        "process_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "process_before_bytes": before * 1024,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--only", choices=[*MODELS, "llama"], help="one model")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.child:
        print(json.dumps(llama() if options.only == "llama" else measure(options.only)))
        return 0
    rows = []
    for name in [options.only] if options.only else [*MODELS, "llama"]:
        command = [sys.executable, __file__, "--child", "--only", name]
        command += ["--threads", str(options.threads)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(json.dumps(rows[-1], indent=1), flush=True)
    if options.out:
        options.out.write_text(
            json.dumps({"torch": torch.__version__, "rows": rows}, indent=1) + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
