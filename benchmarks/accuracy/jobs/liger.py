"""Liger-Kernel's benchmark scripts (benchmark/scripts of September 2024, provider "huggingface").

What stays: inputs and modules for the whole measurement; gradients accumulate over ten calls, with
``retain_graph`` in most scripts, and the median peak of the ten counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from batchfit.estimator import Workload

from .base import Job, Step

GPU = "A100 80GB"
TRANSFORMERS = "transformers-4.41"  # LlamaMLP and rope of the scripts' time
Tensor = torch.Tensor
Config = dict[str, Any]


def repeated(make: Callable[[torch.device], Callable[[], object]], name: str) -> Workload:
    """A script's ``full``, ``fwd`` or ``backward``, called again and again."""

    def build(device: torch.device) -> Step:
        function = make(device)

        def step(batch: int) -> None:
            function()

        return step

    return Workload.from_step(build, name=name)


def cross_entropy(x: int, c: Config, mode: str) -> Workload:
    rows = c["B"] * c["T"]

    def make(device: torch.device) -> Callable[[], object]:
        criterion = nn.CrossEntropyLoss()
        logits = torch.randn(rows, x, requires_grad=True, device=device)
        target = torch.randint(x, (rows, 1), device=device).squeeze(1)

        def full() -> None:
            y = criterion(logits, target)
            y.backward()

        return full

    return repeated(make, "cross-entropy")


def embedding(x: int, c: Config, mode: str) -> Workload:
    """A second embedding of the same size is there: Liger's. The wrapper of torch.compile shares
    the first one's weight.
    """

    def make(device: torch.device) -> Callable[[], object]:
        layer = nn.Embedding(x, c["D"]).to(device)
        other = nn.Embedding(x, c["D"]).to(device)
        ids = torch.randint(0, x, (c["B"], c["T"]), device=device)

        def full() -> nn.Module:
            output = layer(ids)
            output.backward(torch.randn_like(output))
            return other

        return full

    return repeated(make, "embedding")


def fused_linear_cross_entropy(x: int, c: Config, mode: str) -> Workload:
    """Liger's own module, with a head of the same size, is there, too."""

    def make(device: torch.device) -> Callable[[], object]:
        head, other = (
            nn.Linear(c["H"], c["V"], bias=False, dtype=torch.bfloat16).to(device) for _ in range(2)
        )
        criterion = nn.CrossEntropyLoss(ignore_index=-100, reduction="mean")
        hidden = torch.randn(x, c["H"], requires_grad=True, dtype=torch.bfloat16, device=device)
        target = torch.randint(c["V"], (x, 1), dtype=torch.long, device=device).squeeze(1)

        def forward() -> Tensor:
            logits = head(hidden)
            loss: Tensor = criterion(logits, target)
            return loss

        def full() -> nn.Module:
            y = forward()
            y.backward()
            return other

        return full

    return repeated(make, "linear and cross-entropy")


def llama_mlp(x: int, c: Config, mode: str) -> Workload:
    """geglu and swiglu: transformers' LlamaMLP."""

    def make(device: torch.device) -> Callable[[], object]:
        from transformers.models.llama.configuration_llama import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaMLP

        config = LlamaConfig(
            hidden_size=c["hidden_size"], intermediate_size=c["intermediate_size"],
            hidden_act=c["hidden_act"],
        )  # fmt: skip
        shape = (c.get("bsz") or c["B"], x, c["hidden_size"])
        inputs = torch.randn(*shape, device=device, dtype=torch.bfloat16, requires_grad=True)
        layer = LlamaMLP(config=config).to(device).to(torch.bfloat16)

        def forward() -> Tensor:
            y: Tensor = layer(inputs)
            return y

        def full() -> None:
            y = forward()
            y.backward(torch.randn_like(y), retain_graph=True)

        if mode == "forward":
            # The script measured "full" before, in the same process: the cuBLAS workspace of the
            # autograd thread is there.
            warm = nn.Linear(8, 8, dtype=torch.bfloat16, device=device)
            warm(torch.randn(8, 8, dtype=torch.bfloat16, device=device)).sum().backward()
            return forward
        if mode == "backward":
            upstream = torch.randn_like(inputs)
            kept = forward()
            return lambda: kept.backward(upstream, retain_graph=True)
        return full

    return repeated(make, "LlamaMLP")


class LlamaRMSNorm(nn.Module):
    """As written in the script: fp32 inside."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        dtype = hidden.dtype
        hidden = hidden.to(torch.float32)
        variance = hidden.pow(2).mean(-1, keepdim=True)
        hidden = hidden * torch.rsqrt(variance + self.eps)
        return self.weight * hidden.to(dtype)


def norm(layer: Callable[[int, float], nn.Module]) -> Callable[[int, Config, str], Workload]:
    """layer_norm and rms_norm: the norm measured, and Liger's with as many parameters."""

    def build(x: int, c: Config, mode: str) -> Workload:
        dtype = torch.bfloat16 if "bfloat16" in c["dtype"] else torch.float32

        def make(device: torch.device) -> Callable[[], object]:
            other, module = (layer(x, c["eps"]).to(device) for _ in range(2))
            inputs = torch.randn((c["M"], x), dtype=dtype, device=device)
            upstream = torch.randn_like(inputs)
            inputs.requires_grad_(True)

            def full() -> nn.Module:
                y = module(inputs)
                y.backward(upstream, retain_graph=True)
                return other

            return full

        return repeated(make, "norm")

    return build


def rope(x: int, c: Config, mode: str) -> Workload:
    """Rotary embedding of transformers; gradients by autograd.grad, which are dropped."""
    hidden, length = c.get("hidden_size", x), c.get("seq_len", x)
    width = hidden // c["num_q_heads"]

    def make(device: torch.device) -> Callable[[], object]:
        from transformers.models.llama.modeling_llama import (
            LlamaRotaryEmbedding,
            apply_rotary_pos_emb,
        )

        embedding = LlamaRotaryEmbedding(width, device=device)
        q, k = (
            torch.randn(
                (1, length, heads, width), device=device, requires_grad=True, dtype=torch.bfloat16
            ).transpose(1, 2)
            for heads in (c["num_q_heads"], c["num_kv_heads"])
        )
        dq, dk = torch.randn_like(q), torch.randn_like(k)
        positions = torch.arange(length, device=device, dtype=torch.long).unsqueeze(0)
        cos, sin = embedding(k, positions)

        def full() -> None:
            out = apply_rotary_pos_emb(q, k, cos, sin, positions)
            torch.autograd.grad(out, (q, k), (dq, dk), allow_unused=True, retain_graph=True)

        return full

    return repeated(make, "rope")


KERNELS: dict[str, tuple[Callable[[int, Config, str], Workload], str]] = {
    "cross_entropy": (cross_entropy, ""),
    "embedding": (embedding, ""),
    "fused_linear_cross_entropy": (fused_linear_cross_entropy, ""),
    "geglu": (llama_mlp, TRANSFORMERS),
    "swiglu": (llama_mlp, TRANSFORMERS),
    "layer_norm": (norm(lambda n, eps: nn.LayerNorm(n, eps=eps)), ""),
    "rms_norm": (norm(LlamaRMSNorm), ""),
    "rope": (rope, TRANSFORMERS),
}


def job(kernel: str, x: int, config: Config, mode: str) -> Job:
    """The job of a row of op_memory_a100.csv."""
    build, environment = KERNELS[kernel]
    return Job(lambda: build(x, config, mode), 1, GPU, environment=environment)


# The same scripts' rows in measured_peaks.csv.
_BF16 = {"dtype": "torch.bfloat16", "eps": 1e-6}
JOBS = {
    "liger_ce_v4096": job("cross_entropy", 4096, {"B": 8, "T": 2048}, "full"),
    "liger_layernorm_n4096": job(
        "layer_norm", 4096, {"M": 4096, "dtype": "torch.float32", "eps": 1e-6}, "full"
    ),
    "liger_rmsnorm_h4096": job("rms_norm", 4096, {"M": 2048, **_BF16}, "full"),
    "liger_swiglu_t4096": job(
        "swiglu", 4096,
        {"B": 4, "hidden_size": 4096, "intermediate_size": 11008, "hidden_act": "silu"}, "full",
    ),
    "liger_geglu_t2048": job(
        "geglu", 2048,
        {"bsz": 8, "hidden_size": 4096, "intermediate_size": 11008,
         "hidden_act": "gelu_pytorch_tanh"}, "full",
    ),
    "liger_rope_h2048": job(
        "rope", 2048, {"seq_len": 2048, "num_q_heads": 32, "num_kv_heads": 8}, "full"
    ),
}  # fmt: skip
