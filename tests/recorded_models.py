"""The models of the recorded steps (tests/data/oracle/steps), rebuilt from their descriptions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn


class Linear(nn.Module):
    """einops' "... in, out in -> ... out", without a bias."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, device="cuda"))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("...i,oi->...o", x, self.weight)


class Embedding(nn.Module):
    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocabulary, width, device="cuda"))

    def forward(self, ids: Tensor) -> Tensor:
        return self.weight[ids]


class Norm(nn.Module):
    """RMSNorm in fp32, in one of two spellings."""

    def __init__(self, width: int, rsqrt: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, device="cuda"))
        self.rsqrt = rsqrt

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        if self.rsqrt:
            rms = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
            x = x * rms
            return (self.weight * x).to(dtype)
        rms = torch.sqrt((x**2).mean(-1, keepdim=True) + 1e-5)
        result = x / rms * self.weight
        return result.to(dtype)


class SwiGLU(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.w1 = Linear(width, inner)
        self.w2 = Linear(inner, width)
        self.w3 = Linear(width, inner)

    def forward(self, x: Tensor) -> Tensor:
        a = self.w1(x)
        return self.w2(a * torch.sigmoid(a) * self.w3(x))


def heads(x: Tensor, count: int) -> Tensor:
    """(N, T, H * D) -> (N, H, T, D), as einops' rearrange does it."""
    return x.view(*x.shape[:-1], count, -1).transpose(1, 2)


def joined(x: Tensor) -> Tensor:
    """(N, H, T, D) -> (N, T, H * D)."""
    return x.transpose(1, 2).flatten(-2)


class XAttention(nn.Module):
    """Of trace 23, 44, 62 and 63; the tables of RoPE are on the CPU and sent at every call."""

    def __init__(self, width: int, count: int, context: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (Linear(width, width) for _ in range(4))
        self.count = count
        self.cos = torch.zeros(context, width // count // 2)
        self.sin = torch.zeros(context, width // count // 2)

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        cos, sin = self.cos[positions].to(x.device), self.sin[positions].to(x.device)
        even, odd = x[..., 0::2], x[..., 1::2]
        first = even * cos - odd * sin
        second = even * sin + odd * cos
        return torch.cat([first, second], dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        q = heads(self.q(x), self.count)
        k = heads(self.k(x), self.count)
        v = heads(self.v(x), self.count)
        positions = torch.arange(length)
        q = self.rotate(q, positions)
        k = self.rotate(k, positions)
        mask = torch.tril(torch.ones(length, length)).to(x.device)
        return self.o(joined(x_attention(q, k, v, mask)))


def x_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    raw = torch.einsum("...qd,...kd->...qk", q, k)
    scores = raw / torch.sqrt(torch.tensor(q.shape[-1], device=q.device))
    scores.masked_fill_(~mask.bool(), float("-inf"))
    return torch.einsum("...qk,...kd->...qd", x_softmax(scores), v)


def x_softmax(x: Tensor) -> Tensor:
    top = x.max(dim=-1, keepdim=True).values
    return torch.exp(x - top) / torch.sum(torch.exp(x - top), dim=-1, keepdim=True)


class Attention(nn.Module):
    """Of trace 58 (CS336, assignment 2)."""

    def __init__(self, width: int, count: int, tables: nn.Module) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (Linear(width, width) for _ in range(4))
        self.count = count
        self.tables = tables

    def rotate(self, x: Tensor) -> Tensor:
        cos, sin = self.tables.cache
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.concat([cos * even - sin * odd, sin * even + cos * odd], dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (heads(layer(x), self.count) for layer in (self.q, self.k, self.v))
        q = self.rotate(q)
        k = self.rotate(k)
        iota = torch.arange(x.shape[1], device=x.device)
        mask = iota[:, None] >= iota[None, :]
        return self.o(joined(attention(q, k, v, mask)))


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = torch.einsum("...qd,...kd->...qk", q, k) / math.sqrt(k.shape[-1])
    scores = torch.where(mask, scores, float("-inf"))
    return torch.einsum("...qk,...kd->...qd", softmax(scores), v)


def softmax(x: Tensor) -> Tensor:
    rescaled = x - torch.max(x, dim=-1, keepdim=True)[0]
    grown = torch.exp(rescaled)
    return grown / torch.sum(grown, dim=-1, keepdim=True)


class Tables(nn.Module):
    def __init__(self, context: int, width: int) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(2, context, width // 2, device="cuda"))


class Block(nn.Module):
    def __init__(
        self, width: int, inner: int, attention: Callable[[], nn.Module], rsqrt: bool
    ) -> None:
        super().__init__()
        self.norm1 = Norm(width, rsqrt)
        self.norm2 = Norm(width, rsqrt)
        self.attention = attention()
        self.ffn = SwiGLU(width, inner)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.ffn(self.norm2(x))


class LanguageModel(nn.Module):
    def __init__(
        self, width: int, inner: int, layers: int, attention: Callable[[], nn.Module], rsqrt: bool
    ) -> None:
        super().__init__()
        self.embedding = Embedding(10000, width)
        blocks = (Block(width, inner, attention, rsqrt) for _ in range(layers))
        self.blocks = nn.Sequential(*blocks)
        self.norm = Norm(width, rsqrt)
        self.head = Linear(width, 10000)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embedding(ids))))


def x_model(context: int) -> LanguageModel:
    return LanguageModel(512, 1344, 4, lambda: XAttention(512, 16, context), rsqrt=False)


def last(x: Tensor) -> Tensor:
    """``x[:, -1, :]``, as torch 2.6 ran it: it kept the two slices that change nothing."""
    whole = torch.ops.aten.slice.Tensor
    return whole(whole(x, 0).select(1, -1), 1)


def x_loss(logits: Tensor, labels: Tensor) -> Tensor:
    top = logits.max(dim=-1, keepdim=True).values
    logp = logits - top - torch.log(torch.sum(torch.exp(logits - top), dim=-1, keepdim=True))
    hot = torch.zeros_like(logits).scatter_(1, labels.unsqueeze(1), 1.0)
    return -torch.sum(hot * logp) / logits.shape[0]


class XAdam(torch.optim.Optimizer):
    """Out of place, per parameter; the averages are made in the constructor."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        for p in self.parameters():
            self.state[p]["m"] = torch.zeros_like(p)
            self.state[p]["v"] = torch.zeros_like(p)

    def parameters(self) -> Iterator[nn.Parameter]:
        for group in self.param_groups:
            yield from group["params"]

    def step(self, closure: Any = None) -> None:
        for p in self.parameters():
            m = self.state[p]["m"]
            new_m = 0.9 * m + 0.1 * p.grad.data
            v = self.state[p]["v"]
            new_v = 0.99 * v + 0.01 * p.grad.data**2
            p.data = p.data - 1e-3 * (new_m / (torch.sqrt(new_v) + 1e-8))
            p.data = p.data - 1e-3 * 0.01 * p.data
            self.state[p]["m"] = new_m
            self.state[p]["v"] = new_v


class CS336Adam(XAdam):
    """``zeros_like`` is evaluated at every step, needed or not."""

    def __init__(self, params: Any) -> None:
        torch.optim.Optimizer.__init__(self, params, {})

    def step(self, closure: Any = None) -> None:
        for p in self.parameters():
            state = self.state[p]
            grad = p.grad.data
            p.data -= 1e-3 * 0.01 * p.data
            prev_m = state.get("m", torch.zeros_like(grad))
            prev_v = state.get("v", torch.zeros_like(grad))
            m = 0.9 * prev_m + 0.1 * grad
            v = 0.99 * prev_v + 0.01 * torch.square(grad)
            p.data -= 1e-3 * m / (torch.sqrt(v) + 1e-8)
            state["m"] = m
            state["v"] = v


def log_softmax(x: Tensor) -> Tensor:
    top = torch.max(x, dim=-1, keepdim=True)[0]
    x = x - top
    return x - torch.log(torch.sum(torch.exp(x), dim=-1, keepdim=True))


def cs336_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return torch.gather(-log_softmax(logits), -1, targets.unsqueeze(-1)).mean()
