"""Notebooks and issues: ResNet-50, a transformer stack, an MLP, one linear layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from batchfit.estimator import Workload

from .base import Job, Parts, Step, once

JOBS: dict[str, Job] = {}


class Checkpointed(nn.Module):
    """A block whose activations are recomputed."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = checkpoint(self.block, x, use_reentrant=False)
        return result


def resnet50(checkpointed: bool = False, classes: int = 1000) -> nn.Module:
    """torchvision's, each of its 16 blocks checkpointed if asked."""
    import torchvision

    model: nn.Module = torchvision.models.resnet50(weights=None, num_classes=classes)
    if checkpointed:
        for layer in (model.layer1, model.layer2, model.layer3, model.layer4):
            for i, block in enumerate(layer):
                layer[i] = Checkpointed(block)
    return model


def images(size: int) -> Any:
    return lambda batch: (torch.empty(batch, 3, size, size),)


def resnet50_t4(checkpointed: bool) -> Workload:
    """A course notebook: forward, CrossEntropyLoss, backward, gradients set to None."""

    def build(device: torch.device) -> Step:
        model = resnet50(checkpointed).to(device)
        criterion = nn.CrossEntropyLoss()
        held: dict[str, Any] = {}

        def step(batch: int) -> None:
            if not held:
                held["x"] = torch.randn(batch, 3, 224, 224, device=device)
                held["y"] = torch.randint(0, 1000, (batch,), device=device)
            held["out"] = model(held["x"])
            held["loss"] = criterion(held["out"], held["y"])
            held["loss"].backward()
            model.zero_grad(set_to_none=True)

        return step

    return Workload.from_step(build, name="ResNet-50, forward and backward")


def resnet50_t4_once(checkpointed: bool) -> Workload:
    """The same notebook's search: one forward and backward of a fresh model per trial."""

    def trial(device: torch.device, batch: int) -> None:
        model = resnet50(checkpointed).to(device)
        x = torch.randn(batch, 3, 224, 224, device=device)
        y = torch.randint(0, 1000, (batch,), device=device)
        output = model(x)
        nn.CrossEntropyLoss()(output, y).backward()

    return once(trial, "resnet50, 16 blocks checkpointed" if checkpointed else "resnet50")


for _checkpointed, _row in ((False, "none"), (True, "per_block")):
    JOBS[f"nb_resnet50_t4_{_row}"] = Job(
        lambda c=_checkpointed: resnet50_t4(c), 32, "T4",
        parts=lambda c=_checkpointed: Parts(
            lambda: resnet50(c), images(224), checkpointing=c
        ),
    )  # fmt: skip


def mlp() -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(2):
        layers += [nn.Linear(4096, 4096), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(4096, 4096))


def amp_recipe() -> Workload:
    """pytorch/tutorials recipes_source/recipes/amp_recipe.py, the fp32 run."""

    def build(device: torch.device) -> Step:
        net = mlp().to(device)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.001)
        data = [torch.randn(512, 4096, device=device) for _ in range(50)]
        targets = [torch.randn(512, 4096, device=device) for _ in range(50)]
        loss_fn = nn.MSELoss().to(device)
        held: dict[str, Any] = {}
        pairs = iter(zip(data, targets, strict=True))

        def step(batch: int) -> None:
            x, y = next(pairs)
            held["out"] = net(x)
            held["loss"] = loss_fn(held["out"], y)
            held["loss"].backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

        return step

    return Workload.from_step(build, name="AMP recipe MLP")


JOBS["amp_recipe_fp32"] = Job(
    amp_recipe, 512, "T4", before_2=True,
    parts=lambda: Parts(mlp, lambda b: (torch.empty(b, 4096),), optimizer="sgd"),
)  # fmt: skip


def linear_forward() -> Workload:
    def build(device: torch.device) -> Step:
        layer = nn.Linear(1024, 1024, bias=False).to(device)
        x = torch.randn(1, 512, 1024, device=device)

        def step(batch: int) -> None:
            layer(x)

        return step

    return Workload.from_step(build, name="nn.Linear forward")


for _version, _old in (("1.11", True), ("2.0", False)):
    JOBS[f"pt104604_linear_{_version}"] = Job(
        linear_forward, 1, "V100 16GB", before_2=_old,
        parts=lambda: Parts(
            lambda: nn.Linear(1024, 1024, bias=False), lambda b: (torch.empty(b, 512, 1024),)
        ),
    )  # fmt: skip


class Block(nn.Module):
    """Attention that returns its weights and a ReLU MLP, each behind a norm and a residual."""

    def __init__(self, width: int = 512, heads: int = 4) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm1(x)
        x = x + self.attention(normed, normed, normed, need_weights=True)[0]
        result: torch.Tensor = x + self.mlp(self.norm2(x))
        return result


def stack() -> nn.Module:
    return nn.Sequential(*(Block() for _ in range(12))).to(torch.bfloat16)


def transformer_stack() -> Workload:
    """A course notebook: the first of four equal models; the order of norm and residual, and the
    loss, are not in the data and assumed (norm first, mean of the output).
    """

    def build(device: torch.device) -> Step:
        models = [stack().to(device) for _ in range(4)]
        optimizer = torch.optim.AdamW(models[0].parameters())
        held: dict[str, Any] = {}

        def step(batch: int) -> None:
            held.setdefault("x", torch.randn(batch, 4096, 512, device=device, dtype=torch.bfloat16))
            held["loss"] = models[0](held["x"]).mean()
            held["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    return Workload.from_step(build, name="12 transformer blocks")


JOBS["nb_tfblock_a100_noncheckpoint"] = Job(
    transformer_stack, 1, "A100 40GB",
    parts=lambda: Parts(
        stack, lambda b: (torch.empty(b, 4096, 512, dtype=torch.bfloat16),), optimizer="adam",
        dtype=torch.bfloat16,
    ),
)  # fmt: skip
