"""Twelve training jobs for cuda_calibrate.py, of torch alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from batchfit.estimator import Workload


class Bottleneck(nn.Module):
    """A residual block of ResNet-50."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        width = outside // 4
        self.body = nn.Sequential(
            nn.Conv2d(inside, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width),
            nn.ReLU(inplace=True), nn.Conv2d(width, outside, 1, bias=False),
            nn.BatchNorm2d(outside),
        )  # fmt: skip
        self.short: nn.Module = nn.Identity()
        if stride > 1 or inside != outside:
            self.short = nn.Sequential(
                nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside)
            )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.short(x))


def resnet(blocks: tuple[int, ...] = (3, 4, 6, 3)) -> nn.Module:
    """ResNet-50's shape."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]  # fmt: skip
    inside = 64
    for stage, count in enumerate(blocks):
        outside = 256 * 2**stage
        for i in range(count):
            layers.append(Bottleneck(inside, outside, 2 if stage and not i else 1))
            inside = outside
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, 1000))


class UNet(nn.Module):
    """Four levels, two convolutions each."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        sizes = [3, *(width * 2**i for i in range(4))]
        self.down = nn.ModuleList(self._two(a, b) for a, b in pairwise(sizes))
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in pairwise(sizes[1:]))
        self.join = nn.ModuleList(self._two(2 * a, a) for a in sizes[1:-1])
        self.head = nn.Conv2d(width, 21, 1)

    @staticmethod
    def _two(inside: int, outside: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(inside, outside, 3, 1, 1), nn.BatchNorm2d(outside), nn.ReLU(inplace=True),
            nn.Conv2d(outside, outside, 3, 1, 1), nn.BatchNorm2d(outside), nn.ReLU(inplace=True),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for i, block in enumerate(self.down):
            x = block(x if not i else F.max_pool2d(x, 2))
            kept.append(x)
        kept.pop()
        for up, join in zip(reversed(self.up), reversed(self.join), strict=True):
            x = join(torch.cat([up(x), kept.pop()], 1))
        return self.head(x)


class Block(nn.Module):
    """A transformer block, with fused or written-out attention."""

    def __init__(self, width: int, heads: int, eager: bool) -> None:
        super().__init__()
        self.heads, self.eager = heads, eager
        self.one, self.two = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        n, t, d = x.shape
        parts = self.qkv(self.one(x)).chunk(3, -1)
        q, k, v = (p.view(n, t, self.heads, -1).transpose(1, 2) for p in parts)
        if self.eager:
            y = F.softmax(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5, -1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(n, t, d))
        return x + self.mlp(self.two(x))


class GPT(nn.Module):
    """GPT-2's shape."""

    def __init__(
        self, width: int = 768, depth: int = 12, eager: bool = False, checkpointed: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.checkpointed = checkpointed
        self.tokens, self.places = nn.Embedding(50257, width), nn.Embedding(1024, width)
        self.blocks = nn.ModuleList(Block(width, width // 64, eager) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 50257, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(self.norm(x))


class ViT(nn.Module):
    """ViT-B/16's shape."""

    def __init__(self, width: int = 768, depth: int = 12) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        layer = nn.TransformerEncoderLayer(
            width, width // 64, 4 * width, activation="gelu", batch_first=True, norm_first=True
        )
        self.body = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, 1000)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.patches(x).flatten(2).transpose(1, 2)).mean(1))


class Tagger(nn.Module):
    """An embedding, an LSTM of three layers, and a head over the vocabulary."""

    def __init__(self, width: int = 1024) -> None:
        super().__init__()
        self.embed = nn.Embedding(10000, width)
        self.rnn = nn.LSTM(width, width, 3, batch_first=True, dropout=0.2)
        self.head = nn.Linear(width, 10000)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.rnn(self.embed(ids))[0])


def mlp(width: int = 4096) -> nn.Module:
    """Four wide layers."""
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 1000))


def images(size: int) -> Callable[[int], Tensor]:
    """Random images."""
    return lambda b: torch.randn(b, 3, size, size)


def tokens(length: int, vocabulary: int) -> Callable[[int], Tensor]:
    """Random ids."""
    return lambda b: torch.randint(0, vocabulary, (b, length))


def _job(name: str, model: Callable[[], nn.Module], inputs: object, **options: object) -> Workload:
    return Workload(name=name, model=model, inputs=inputs, loss="cross_entropy", **options)  # type: ignore[arg-type]


TEXT = tokens(512, 50257)
JOBS = {
    work.name: work
    for work in (
        _job("resnet50 fp32", resnet, images(224), optimizer="sgd"),
        _job("gpt2 bf16 amp", GPT, TEXT, precision="amp-bf16"),
        _job("unet fp16 amp", UNet, images(256), precision="amp-fp16"),
        _job("vit-b16 bf16 amp", ViT, images(224), precision="amp-bf16"),
        _job(
            "resnet50 channels_last amp",
            resnet,
            images(224),
            precision="amp-fp16",
            memory_format="channels_last",
            optimizer="sgd",
        ),
        _job("gpt2 checkpointed", partial(GPT, checkpointed=True), TEXT, precision="amp-bf16"),
        _job("lstm fp32", Tagger, tokens(128, 10000), optimizer="adamw"),
        _job("gpt2 eager fp32", partial(GPT, eager=True), TEXT),
        _job("gpt2 bf16 accumulating", GPT, TEXT, precision="bf16", accumulate=2),
        _job("unet fp32", UNet, images(256), optimizer="sgd"),
        _job("mlp fp32", mlp, lambda b: torch.randn(b, 4096)),
        _job("vit-b16 fp32 ema", ViT, images(224), ema=True, clip_grad_norm=1.0),
    )
}
