"""lit-gpt's finetune/lora.py (commit 8641822, October 2023): LoRA of rank 8 on queries and values.

Its GPT is written out here from its published structure: rotary tables in half precision, one
projection for q, k and v whose LoRA part goes through a grouped convolution and is padded with
zeros, logits in chunks of 128 positions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from batchfit.estimator import Estimate, Phase, Workload

from .base import Job, Parts, Step

CHUNK = 128  # positions per chunk of the head and of the loss
RANK, ALPHA, DROPOUT = 8, 16, 0.05
JOBS: dict[str, Job] = {}


@dataclass(frozen=True)
class Config:
    """lit_gpt/config.py, as far as the three models differ."""

    vocabulary: int
    layers: int = 16
    heads: int = 32
    width: int = 4096
    block_size: int = 4096
    rotary: float = 0.25
    parallel: bool = True
    shared_norm: bool = False
    bias: bool = True
    head_bias: bool = False
    llama: bool = False  # RMSNorm and the gated MLP
    inner: int = 16384
    gelu: str = "none"

    @property
    def head_size(self) -> int:
        return self.width // self.heads


PHI = Config(
    51200, layers=24, width=2048, block_size=2048, rotary=0.5, shared_norm=True, head_bias=True,
    inner=8192, gelu="tanh",
)  # fmt: skip
STABLELM = Config(50688)  # 50254 tokens padded to a multiple of 512
LLAMA_7B = Config(32000, layers=32, rotary=1.0, parallel=False, bias=False, llama=True, inner=11008)


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        norm_x = torch.mean(x * x, dim=-1, keepdim=True)
        x_normed = x * torch.rsqrt(norm_x + 1e-5)
        return self.weight * x_normed


class LoRAQKV(nn.Module):
    """q, k and v in one projection; LoRA on q and v."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.linear = nn.Linear(c.width, 3 * c.width, bias=c.bias)
        self.lora_A = nn.Parameter(torch.zeros(2 * RANK, c.width))
        self.lora_B = nn.Parameter(torch.zeros(2 * c.width, RANK))
        self.dropout = nn.Dropout(DROPOUT)
        self.indices = [*range(c.width), *range(2 * c.width, 3 * c.width)]

    def padded(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        result = x.new_zeros((*x.shape[:-1], self.linear.out_features))
        result = result.view(-1, self.linear.out_features)
        result = result.index_copy(
            1, torch.tensor(self.indices, device=result.device), x.reshape(-1, len(self.indices))
        )
        return result.view((*x.shape[:-1], self.linear.out_features)).transpose(0, 1)

    def forward(self, x: Tensor) -> Tensor:
        pretrained: Tensor = self.linear(x)
        after_a = F.linear(self.dropout(x), self.lora_A)
        after_b = F.conv1d(after_a.transpose(-2, -1), self.lora_B.unsqueeze(-1), groups=2)
        lora = self.padded(after_b.transpose(-2, -1)) * (ALPHA / RANK)
        return pretrained + lora


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.size(-1) // 2
    x1 = x[..., :half]
    x2 = x[..., half:]
    rotated = torch.cat((-x2, x1), dim=-1)
    roped = (x * cos) + (rotated * sin)
    return roped.type_as(x)


class Attention(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.attn = LoRAQKV(c)
        self.proj = nn.Linear(c.width, c.width, bias=c.bias)
        self.c = c
        self.elements = int(c.rotary * c.head_size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = x.size()
        heads, size, n = self.c.heads, self.c.head_size, self.elements
        qkv = self.attn(x)
        qkv = qkv.view(batch, length, heads, 3, size)
        qkv = qkv.permute(0, 2, 3, 1, 4)
        q, k, v = qkv.split((1, 1, 1), dim=2)
        k = k.expand(batch, heads, 1, length, size)
        v = v.expand(batch, heads, 1, length, size)
        q = q.reshape(batch, -1, length, size)
        k = k.reshape(batch, -1, length, size)
        v = v.reshape(batch, -1, length, size)
        q_roped = rotate(q[..., :n], cos, sin)
        k_roped = rotate(k[..., :n], cos, sin)
        q = torch.cat((q_roped, q[..., n:]), dim=-1)
        k = torch.cat((k_roped, k[..., n:]), dim=-1)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.0, is_causal=True).transpose(1, 2)
        y = y.reshape(batch, length, width)
        result: Tensor = self.proj(y)
        return result


class MLP(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.fc_1 = nn.Linear(c.width, c.inner, bias=c.bias)
        self.fc_2 = nn.Linear(c.width, c.inner, bias=c.bias) if c.llama else None
        self.proj = nn.Linear(c.inner, c.width, bias=c.bias)
        self.gelu = c.gelu

    def forward(self, x: Tensor) -> Tensor:
        if self.fc_2 is not None:
            x_1 = self.fc_1(x)
            x_2 = self.fc_2(x)
            x = F.silu(x_1) * x_2
        else:
            x = self.fc_1(x)
            x = F.gelu(x, approximate=self.gelu)
        result: Tensor = self.proj(x)
        return result


class Block(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        make = RMSNorm if c.llama else nn.LayerNorm
        self.norm_1 = make(c.width)
        self.attn = Attention(c)
        self.norm_2 = None if c.shared_norm else make(c.width)
        self.mlp = MLP(c)
        self.parallel = c.parallel

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        n_1 = self.norm_1(x)
        h = self.attn(n_1, cos, sin)
        if self.parallel:
            n_2 = n_1 if self.norm_2 is None else self.norm_2(x)
            x = x + h + self.mlp(n_2)
        else:
            assert self.norm_2 is not None
            x = x + h
            x = x + self.mlp(self.norm_2(x))
        return x


class GPT(nn.Module):
    def __init__(self, c: Config, length: int) -> None:
        super().__init__()
        self.lm_head = nn.Linear(c.width, c.vocabulary, bias=c.head_bias)
        self.wte = nn.Embedding(c.vocabulary, c.width)
        self.h = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.ln_f = (RMSNorm if c.llama else nn.LayerNorm)(c.width)
        shape = length, int(c.rotary * c.head_size)
        self.register_buffer("cos", torch.zeros(shape, dtype=torch.float16), persistent=False)
        self.register_buffer("sin", torch.zeros(shape, dtype=torch.float16), persistent=False)
        for name, parameter in self.named_parameters():
            parameter.requires_grad = "lora_" in name

    def forward(self, ids: Tensor) -> list[Tensor]:
        cos, sin = self.cos[: ids.size(1)], self.sin[: ids.size(1)]
        x = self.wte(ids)
        for block in self.h:
            x = block(x, cos, sin)
        x = self.ln_f(x)
        return [self.lm_head(x_i) for x_i in x.split(CHUNK, dim=1)]


def make(c: Config, length: int) -> GPT:
    """All weights in bf16, as ``--precision bf16-true`` makes them; the tables stay fp16."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        return GPT(c, length)
    finally:
        torch.set_default_dtype(before)


def chunked_cross_entropy(logits: list[Tensor], targets: Tensor) -> Tensor:
    logit_chunks = [chunk.reshape(-1, chunk.size(-1)) for chunk in logits]
    target_chunks = [chunk.reshape(-1) for chunk in targets.split(logits[0].size(1), dim=1)]
    losses = [
        F.cross_entropy(chunk, target, ignore_index=-1, reduction="none")
        for chunk, target in zip(logit_chunks, target_chunks, strict=True)
    ]
    return torch.cat(losses).mean()


def lora(c: Config, length: int) -> Workload:
    """A batch of 128 in micro-batches; the first one holds the longest sample and is the peak.

    The optimizer steps only after 128 / micro-batch iterations, on shorter samples.
    """

    def build(device: torch.device) -> Step:
        model = make(c, length).to(device)
        optimizer = torch.optim.AdamW(
            [p for p in model.parameters() if p.requires_grad], lr=3e-4, weight_decay=0.01
        )
        held: dict[str, Any] = {}

        def step(batch: int) -> None:
            held["ids"] = torch.randint(0, c.vocabulary, (batch, length)).to(device)
            held["targets"] = torch.randint(0, c.vocabulary, (batch, length)).to(device)
            # Fabric gives outputs back in the default dtype (HalfPrecision.convert_output).
            logits = [chunk.to(torch.float32) for chunk in model(held["ids"])]
            logits[-1] = logits[-1][..., :-1, :]
            held["logits"] = logits
            held["loss"] = chunked_cross_entropy(logits, held["targets"][..., 1:])
            (held["loss"] / (128 // batch)).backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    return Workload.from_step(build, name="lit-gpt, LoRA")


def peak_of_first_backward(e: Estimate, batch: int) -> int:
    """The peak up to the first optimizer step: later micro-batches are shorter."""
    curve = e.timeline(batch)
    end = next(p for p, phase, _ in curve.marks if phase is Phase.OPTIMIZER)
    return int(curve.allocated[:end].max())


for _row, _config, _length, _batches in (
    ("phi-1_5", PHI, 1044, (1, 4)),
    ("stablelm-base-alpha-3b", STABLELM, 1034, (1, 2, 4)),
    ("llama-2-7b", LLAMA_7B, 1304, (1,)),
):
    for _batch in _batches:
        JOBS[f"litgpt_res_{_row}_mb{_batch}"] = Job(
            lambda c=_config, n=_length: lora(c, n), _batch, "A100 40GB", peak_of_first_backward,
            parts=lambda c=_config, n=_length: Parts(
                lambda: make(c, n), lambda b: (torch.randint(0, 1000, (b, n)),),
                optimizer="adam", dtype=torch.bfloat16,
            ),
        )  # fmt: skip
LLAMA_13B = replace(LLAMA_7B, layers=40, heads=40, width=5120, inner=13824)
LARGEST = {
    f"litgpt_llama2_{_name}_lora_40g": Job(lambda c=_config: lora(c, 1304), 0, "A100 40GB")
    for _name, _config in (("7b", LLAMA_7B), ("13b", LLAMA_13B))
}
