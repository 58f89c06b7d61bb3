"""Published packages, called as their documentation shows."""

from __future__ import annotations

import contextlib
import gc
import io
import re
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from benchmarks.accuracy.jobs.base import Job, Parts

from .base import CannotAnswer, Peer, on_meta, parts_of, real_if_small, sample_shape

MIB = 2**20
DTYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


def torchinfo(job: Job, batch: int) -> int:
    """ "Estimated Total Size" of ``torchinfo.summary`` at this batch, on meta.

    Token ids come with a mask: without one, some models look for padding in the ids.
    """
    import torchinfo as package

    parts = parts_of(job)
    given = parts.inputs(batch)
    inputs: Any
    if isinstance(given, dict):
        inputs = {k: v.to("meta") for k, v in given.items()}
        if "input_ids" in inputs:
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    else:
        inputs = [v.to("meta") for v in given]
    found = package.summary(
        on_meta(parts), input_data=inputs, device="meta", mode="train", verbose=0
    )
    return int(found.total_input + found.total_output_bytes + found.total_param_bytes)


def torchsummary(job: Job, batch: int) -> int:
    """ "Estimated Total Size (MB)" of ``torchsummary.summary``: what forum answers divide up."""
    from torchsummary import summary

    parts = parts_of(job)
    inputs = parts.inputs(2)
    tensors = list(inputs.values()) if isinstance(inputs, dict) else list(inputs)
    if not all(t.is_floating_point() for t in tensors):
        raise CannotAnswer("makes its input from random floats; the job takes token ids")
    if any(p.dtype != torch.float32 for p in on_meta(parts).parameters()):
        raise CannotAnswer("only for fp32 models")
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        summary(parts.model(), [tuple(t.shape[1:]) for t in tensors], batch, "cpu")
    found = re.search(r"Estimated Total Size \(MB\): ([\d.]+)", text.getvalue())
    assert found is not None, text.getvalue()[-200:]
    return round(float(found[1]) * MIB)


def _optimizer(parts: Parts) -> str:
    return {"momentum": "sgd"}.get(parts.optimizer, parts.optimizer)


def kitsune(job: Job, batch: int) -> int:
    """``kitsune.predict.predict_memory``. Its sum is a line in the batch: asked at 2 and 4, so that
    no large batch is run on the CPU.
    """
    from kitsune.predict import predict_memory

    parts = parts_of(job)
    model, shape = real_if_small(parts), sample_shape(parts)
    two, four = (
        predict_memory(
            model, input_shape=shape, batch_size=b, dtype=parts.dtype,
            optimizer="sgd_momentum" if parts.optimizer == "momentum" else parts.optimizer,
            training=True,
        ).total_bytes
        for b in (2, 4)
    )  # fmt: skip
    return round(float(two + (four - two) * (batch - 2) / 2))


def vram_check(job: Job, batch: int) -> int:
    """``vram_check.analyze``; frozen parameters are added, as its report shows them."""
    from vram_check import analyze

    parts = parts_of(job)
    shape = sample_shape(parts)
    report = analyze(
        on_meta(parts), batch_size=batch, dtype=DTYPES[parts.autocast or parts.dtype],
        optimizer=_optimizer(parts), training=True, seq_len=shape[0] if len(shape) == 1 else 128,
    )  # fmt: skip
    frozen = report["frozen"]["frozen_bytes"] if report["frozen"] else 0
    return int(report["estimate"].total_bytes + frozen)


@contextlib.contextmanager
def autocast_on_cpu() -> Iterator[None]:
    """The job asks for CUDA's autocast, which is off where there is no GPU."""
    real = torch.autocast

    def on_cpu(device_type: str, *arguments: Any, **options: Any) -> Any:
        return real("cpu", *arguments, **options)

    with mock.patch("torch.autocast", on_cpu):
        yield


@contextlib.contextmanager
def moved_by_hand() -> Iterator[None]:
    """``Module.to`` without swapping tensors, which PyTorch refuses for fake ones: a move to the
    CPU leaves everything in place, a cast makes new parameters, tied ones once.
    """

    def cast(value: Any, dtype: torch.dtype, made: dict[int, Any]) -> Any:
        if value is None or not value.is_floating_point():
            return value
        if id(value) not in made:
            new = value.detach().to(dtype)
            is_parameter = isinstance(value, torch.nn.Parameter)
            made[id(value)] = torch.nn.Parameter(new, value.requires_grad) if is_parameter else new
        return made[id(value)]

    def to(self: torch.nn.Module, *arguments: Any, **options: Any) -> torch.nn.Module:
        dtypes = [a for a in (*arguments, *options.values()) if isinstance(a, torch.dtype)]
        made: dict[int, Any] = {}
        for module in self.modules() if dtypes else ():
            for store in (module._parameters, module._buffers):
                store.update({k: cast(v, dtypes[0], made) for k, v in store.items()})
        return self

    with mock.patch("torch.nn.Module.to", to):
        yield


def mem_tracker(job: Job, batch: int) -> int:
    """``torch.distributed._tools.mem_tracker`` around two steps on fake tensors of the CPU: fake
    CUDA tensors have no backward pass without a GPU.

    What exists before the first step is told to the tracker, as its documentation asks.
    """
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    tracker = MemTracker()
    with FakeTensorMode(allow_non_fake_inputs=True), autocast_on_cpu(), moved_by_hand():
        step = job.workload().start(torch.device("cpu"))
        gc.collect()
        made = [o for o in gc.get_objects() if isinstance(o, (torch.nn.Module, FakeTensor))]
        modules = [m for m in made if isinstance(m, torch.nn.Module)]
        modules = [m for m in modules if next(m.parameters(), None) is not None]
        inner = {id(child) for m in modules for child in m.modules() if child is not m}
        owned = {id(p) for m in modules for p in (*m.parameters(), *m.buffers())}
        tensors = [t for t in made if isinstance(t, torch.Tensor) and id(t) not in owned]
        tracker.track_external(*(m for m in modules if id(m) not in inner), *tensors)
        del made, modules, tensors  # or they would keep alive what the step drops
        with tracker:
            step(batch)
            tracker.reset_mod_stats()  # it refuses a second iteration without
            step(batch)
    peaks = tracker.get_tracker_snapshot("peak")
    return int(sum(sizes["Total"] for sizes in peaks.values()))


PACKAGES = (
    Peer("MemTracker", "torch.distributed._tools.mem_tracker on fake tensors", mem_tracker),
    Peer("torchinfo", "torchinfo 1.8.0, Estimated Total Size", torchinfo),
    Peer("torchsummary", "torchsummary 1.5.1, weights + batch x outputs", torchsummary),
    Peer("torch-kitsune", "torch-kitsune 0.7.0, predict_memory", kitsune),
    Peer("vram-check", "vram-check 0.1.1, analyze", vram_check),
)  # fmt: skip
