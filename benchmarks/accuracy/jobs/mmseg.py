"""mmsegmentation 0.x: UNet-S5-D16 with an FCN, PSP or DeepLabV3 head and an FCN auxiliary head.

Written out from the published configurations (configs/unet). Its synchronised batch norm saves what
a plain one saves. DDP of torch 1.5 copies gradients into flat buckets, which stay.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from batchfit.estimator import Workload

from .base import Job, Parts, Step

CLASSES, IGNORED = 2, 255
JOBS: dict[str, Job] = {}


def conv(inputs: int, outputs: int, kernel: int = 3, dilation: int = 1) -> nn.Sequential:
    """mmcv's ConvModule: convolution without bias, norm, ReLU in place."""
    padding = dilation * (kernel // 2)
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, padding=padding, dilation=dilation, bias=False),
        nn.BatchNorm2d(outputs), nn.ReLU(inplace=True),
    )  # fmt: skip


def resized(x: Tensor, size: Any) -> Tensor:
    return F.interpolate(x, size=size, mode="bilinear", align_corners=False)


class UpBlock(nn.Module):
    """Interpolate, convolve, join with the encoder's features, convolve twice."""

    def __init__(self, inputs: int, skip: int) -> None:
        super().__init__()
        self.conv_block = nn.Sequential(conv(2 * skip, skip), conv(skip, skip))
        self.upsample = nn.Sequential(
            nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False),
            conv(inputs, skip, 1),
        )  # fmt: skip

    def forward(self, skip: Tensor, x: Tensor) -> Tensor:
        x = self.upsample(x)
        out = torch.cat([skip, x], dim=1)
        out = self.conv_block(out)
        return out


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        widths = [64 * 2**i for i in range(5)]
        self.encoder = nn.ModuleList()
        self.decoder = nn.ModuleList()
        inputs = 3
        for i, width in enumerate(widths):
            block: list[nn.Module] = [nn.MaxPool2d(kernel_size=2)] if i else []
            block += [conv(inputs, width), conv(width, width)]
            self.encoder.append(nn.Sequential(*block))
            if i:
                self.decoder.append(UpBlock(width, widths[i - 1]))
            inputs = width

    def forward(self, x: Tensor) -> list[Tensor]:
        encoded = []
        for block in self.encoder:
            x = block(x)
            encoded.append(x)
        decoded = [x]
        for i in reversed(range(len(self.decoder))):
            x = self.decoder[i](encoded[i], x)
            decoded.append(x)
        return decoded


class Head(nn.Module):
    """Features, dropout, one convolution to the classes."""

    def __init__(self, features: nn.Module, width: int) -> None:
        super().__init__()
        self.features = features
        self.dropout = nn.Dropout2d(0.1)
        self.conv_seg = nn.Conv2d(width, CLASSES, kernel_size=1)

    def forward(self, x: Tensor) -> Tensor:
        features = self.features(x)
        result: Tensor = self.conv_seg(self.dropout(features))
        return result


class Pyramid(nn.Module):
    """PSP: pooled to 1, 2, 3 and 6, convolved, scaled back, joined."""

    def __init__(self) -> None:
        super().__init__()
        self.pools = nn.ModuleList(
            nn.Sequential(nn.AdaptiveAvgPool2d(scale), conv(64, 16, 1)) for scale in (1, 2, 3, 6)
        )
        self.bottleneck = conv(64 + 4 * 16, 16)

    def forward(self, x: Tensor) -> Tensor:
        outs = []
        for pool in self.pools:
            out = pool(x)
            outs.append(resized(out, x.size()[2:]))
        result: Tensor = self.bottleneck(torch.cat([x, *outs], dim=1))
        return result


class Atrous(nn.Module):
    """DeepLabV3: a pooled branch and convolutions of dilation 1, 12, 24 and 36, joined."""

    def __init__(self) -> None:
        super().__init__()
        self.image_pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), conv(64, 16, 1))
        self.branches = nn.ModuleList(conv(64, 16, 1 if d == 1 else 3, d) for d in (1, 12, 24, 36))
        self.bottleneck = conv(5 * 16, 16)

    def forward(self, x: Tensor) -> Tensor:
        outs = [resized(self.image_pool(x), x.size()[2:])]
        outs.extend(branch(x) for branch in self.branches)
        result: Tensor = self.bottleneck(torch.cat(outs, dim=1))
        return result


HEADS: dict[str, Any] = {
    "fcn": lambda: Head(conv(64, 64), 64), "psp": lambda: Head(Pyramid(), 16),
    "dlv3": lambda: Head(Atrous(), 16),
}  # fmt: skip


class Segmentor(nn.Module):
    def __init__(self, head: str) -> None:
        super().__init__()
        self.backbone = UNet()
        self.decode_head = HEADS[head]()
        self.auxiliary_head = Head(conv(128, 64), 64)

    def forward(self, x: Tensor, label: Tensor | None = None) -> Tensor:
        features = self.backbone(x)
        if label is None:
            result: Tensor = self.decode_head(features[4])
            return result
        losses = {}
        for name, head, index, weight in (
            ("decode", self.decode_head, 4, 1.0), ("aux", self.auxiliary_head, 3, 0.4),
        ):  # fmt: skip
            losses[name] = self.loss(head(features[index]), label, weight, losses)
        total: Tensor = losses["decode"] + losses["aux"]
        return total

    def loss(self, logits: Tensor, label: Tensor, weight: float, kept: dict[str, Tensor]) -> Tensor:
        logits = resized(logits, label.shape[2:])
        label = label.squeeze(1)
        loss = F.cross_entropy(logits, label, reduction="none", ignore_index=IGNORED).mean()
        _, predicted = logits.topk(1, dim=1)
        predicted = predicted.transpose(0, 1)
        correct = predicted.eq(label.unsqueeze(0).expand_as(predicted))
        kept[f"accuracy{len(kept)}"] = correct[:1].reshape(-1).float().sum(0, keepdim=True)
        return weight * loss


def training(head: str, size: int) -> Workload:
    """mmcv's iteration: zero_grad (zeros, torch 1.5), backward, SGD with momentum."""

    def build(device: torch.device) -> Step:
        model = Segmentor(head).to(device)
        bucket = torch.zeros(sum(p.numel() for p in model.parameters()), device=device)
        optimizer = torch.optim.SGD(
            model.parameters(), lr=0.01, momentum=0.9, weight_decay=0.0005, foreach=False
        )
        held: dict[str, Any] = {"bucket": bucket}

        def step(batch: int) -> None:
            image = torch.empty(batch, 3, size, size).to(device)
            label = torch.randint(0, CLASSES, (batch, 1, size, size)).to(device)
            held["loss"] = model(image, label)
            optimizer.zero_grad(set_to_none=False)
            held["loss"].backward()
            optimizer.step()

        return step

    return Workload.from_step(build, name=f"UNet, {head}")


for _head, _size in (
    ("fcn", 64), ("fcn", 128), ("fcn", 256), ("psp", 128), ("dlv3", 64), ("dlv3", 256),
):  # fmt: skip
    JOBS[f"mmseg_unet_{_head}_{_size}"] = Job(
        lambda h=_head, s=_size: training(h, s), 4, "V100 32GB", before_2=True,
        parts=lambda h=_head, s=_size: Parts(
            lambda: Segmentor(h), lambda b: (torch.empty(b, 3, s, s),), optimizer="momentum"
        ),
    )  # fmt: skip
