"""Jobs that the calibration tests run for real on the CPU."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from batchfit.estimator import Workload


class Block(nn.Module):
    def __init__(self, width: int, checkpointed: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.checkpointed = checkpointed

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        n, t, d = x.shape
        q, k, v = (
            y.view(n, t, 4, d // 4).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(n, t, d))
        return x + self.mlp(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.checkpointed:
            return checkpoint(self.inner, x, use_reentrant=False)
        return self.inner(x)


class GPT(nn.Module):
    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 32)
        self.blocks = nn.Sequential(*(Block(32, checkpointed) for _ in range(2)))
        self.head = nn.Linear(32, 100, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embed(x)))


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(16, 32, num_layers=2, batch_first=True)
        self.head = nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(x)[0])


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.one = nn.Conv2d(16, 16, 3, padding=1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(16), nn.BatchNorm2d(16)])
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norms[0](self.stem(x)))
        x = F.relu(self.norms[1](self.one(x)) + x)
        return self.head(x.mean((2, 3)))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.middle = nn.Conv2d(8, 8, 3, padding=1)
        self.up = nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.out = nn.Conv2d(11, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.down(x))
        y = self.up(F.relu(self.middle(y)))
        return self.out(torch.cat([x, y], 1))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(8 * 7 * 7, 10),
    )  # fmt: skip


def images(b: int) -> torch.Tensor:
    return torch.randn(b, 3, 16, 16)


def tokens(b: int) -> torch.Tensor:
    return torch.randint(0, 100, (b, 12))


def rows(b: int) -> torch.Tensor:
    return torch.randn(b, 64)


def sequences(b: int) -> torch.Tensor:
    return torch.randn(b, 12, 16)


def gan(device: torch.device) -> Callable[[int], None]:
    """A custom loop: two models, two optimizers."""
    make = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 64)).to(device)
    judge = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 1)).to(device)
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-3) for m in (make, judge)]

    def step(batch: int) -> None:
        real = torch.randn(batch, 64, device=device)
        fake = make(torch.randn(batch, 16, device=device))
        loss = F.softplus(-judge(real)).mean() + F.softplus(judge(fake.detach())).mean()
        optimizers[1].zero_grad()
        loss.backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        F.softplus(-judge(fake)).mean().backward()
        optimizers[0].step()

    return step


def work(model: Any, inputs: Any, loss: str = "cross_entropy", **options: Any) -> Workload:
    return Workload(model=model, inputs=inputs, loss=loss, **{"optimizer": "adamw", **options})


JOBS: dict[str, Workload] = {
    "mlp": work(mlp, rows),
    "cnn": work(cnn, images, optimizer="sgd"),
    "residual": work(Residual, images),
    "unet": work(UNet, images, "mean", optimizer="sgd"),
    "gpt": work(GPT, tokens),
    "gpt amp bf16": work(GPT, tokens, precision="amp-bf16"),
    "gpt bf16": work(GPT, tokens, precision="bf16", clip_grad_norm=1.0),
    "checkpointed": work(lambda: GPT(checkpointed=True), tokens),
    "lstm": work(Tagger, sequences, "sum", optimizer="sgd"),
    "accumulating": work(
        lambda: nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True),
        lambda b: torch.randn(b, 12, 32), "mse", accumulate=2, ema=True,
    ),
    "evaluated": work(mlp, rows, evaluate=True, set_to_none=False, optimizer="adagrad"),
    "custom loop": Workload.from_step(gan, name="gan"),
}  # fmt: skip

# Every probe begins with a garbage collection, which looks at all objects that exist: most of the
# time of these tests, were not torch's own put aside here.
gc.collect()
gc.freeze()
