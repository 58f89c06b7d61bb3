"""Convolutional models of usual shapes that need nothing but torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Bottleneck(nn.Module):
    """The residual block of ResNet-50 (He et al. 2015), stride in the 3x3 as in torchvision."""

    def __init__(self, inputs: int, width: int, stride: int = 1) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class ResNet(nn.Module):
    """ResNet of bottleneck blocks; (3, 4, 6, 3) is torchvision's resnet50, parameter for parameter.

    Args:
        depths: blocks in each of the four stages.
        classes: outputs.
        checkpointing: recompute each stage in the backward pass.
    """

    def __init__(
        self, depths: Sequence[int] = (3, 4, 6, 3), classes: int = 1000, checkpointing: bool = False
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        inputs = 64
        for stage, (width, depth) in enumerate(zip((64, 128, 256, 512), depths, strict=True), 1):
            blocks = []
            for block in range(depth):
                blocks.append(Bottleneck(inputs, width, 2 if stage > 1 and block == 0 else 1))
                inputs = 4 * width
            self.add_module(f"layer{stage}", nn.Sequential(*blocks))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(inputs, classes)
        self.checkpointing = checkpointing

    def features(self, x: Tensor) -> list[Tensor]:
        """The outputs of the four stages."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        found = []
        for stage in range(1, 5):
            layer = self.get_submodule(f"layer{stage}")
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointing else layer(x)
            found.append(x)
        return found

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.flatten(self.avgpool(self.features(x)[-1]), 1))


def mlp(width: int) -> nn.Sequential:
    """The two linear layers of a block, four times as wide in between."""
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class ConvNeXtBlock(nn.Module):
    """Depthwise 7x7, LayerNorm and an MLP over channels in the last dimension (Liu et al. 2022)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.mlp = mlp(width)
        self.scale = nn.Parameter(torch.full((width,), 1e-6))

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + (self.scale * self.mlp(out)).permute(0, 3, 1, 2)


class ChannelNorm(nn.LayerNorm):
    """LayerNorm over the channels of an image."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def convnext(
    depths: Sequence[int] = (3, 3, 9, 3), widths: Sequence[int] = (96, 192, 384, 768)
) -> nn.Module:
    """ConvNeXt-T by default, without stochastic depth."""
    layers: list[nn.Module] = [nn.Conv2d(3, widths[0], 4, 4), ChannelNorm(widths[0], eps=1e-6)]
    for stage, (depth, width) in enumerate(zip(depths, widths, strict=True)):
        if stage:
            before = widths[stage - 1]
            layers += [ChannelNorm(before, eps=1e-6), nn.Conv2d(before, width, 2, 2)]
        layers += [ConvNeXtBlock(width) for _ in range(depth)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(widths[-1], eps=1e-6)]
    return nn.Sequential(*layers, *head, nn.Linear(widths[-1], 1000))


class SqueezeExcite(nn.Module):
    def __init__(self, width: int, squeezed: int) -> None:
        super().__init__()
        self.reduce = nn.Conv2d(width, squeezed, 1)
        self.expand = nn.Conv2d(squeezed, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        weights = F.silu(self.reduce(F.adaptive_avg_pool2d(x, 1)))
        return x * torch.sigmoid(self.expand(weights))


class MBConv(nn.Module):
    """Inverted bottleneck with squeeze and excitation (EfficientNet, Tan and Le 2019)."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        width = inputs * expansion
        layers: list[nn.Module] = []
        if expansion > 1:
            layers += [
                nn.Conv2d(inputs, width, 1, bias=False),
                nn.BatchNorm2d(width),
                nn.SiLU(True),
            ]
        depthwise = nn.Conv2d(width, width, kernel, stride, kernel // 2, groups=width, bias=False)
        layers += [
            depthwise, nn.BatchNorm2d(width), nn.SiLU(True), SqueezeExcite(width, inputs // 4),
            nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs),
        ]  # fmt: skip
        self.layers = nn.Sequential(*layers)
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return x + out if self.residual else out


# EfficientNet-B0, table 1 of the paper: (expansion, outputs, blocks, stride of the first, kernel)
_B0 = (
    (1, 16, 1, 1, 3), (6, 24, 2, 2, 3), (6, 40, 2, 2, 5), (6, 80, 3, 2, 3),
    (6, 112, 3, 1, 5), (6, 192, 4, 2, 5), (6, 320, 1, 1, 3),
)  # fmt: skip


def efficientnet_b0() -> nn.Module:
    """EfficientNet-B0 without stochastic depth."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.SiLU(True)
    ]  # fmt: skip
    inputs = 32
    for expansion, outputs, blocks, stride, kernel in _B0:
        for block in range(blocks):
            layers.append(MBConv(inputs, outputs, kernel, 1 if block else stride, expansion))
            inputs = outputs
    layers += [nn.Conv2d(inputs, 1280, 1, bias=False), nn.BatchNorm2d(1280), nn.SiLU(True)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(1280, 1000)]
    return nn.Sequential(*layers, *head)


def _twice(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(True),
        nn.Conv2d(outputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(True),
    )  # fmt: skip


class UNet(nn.Module):
    """The U-Net of segmentation tutorials: double convolutions, transposed ones on the way up."""

    def __init__(self, classes: int = 2, width: int = 64) -> None:
        super().__init__()
        widths = [width << level for level in range(5)]
        self.down = nn.ModuleList(
            _twice(a, b) for a, b in zip([3, *widths[:-1]], widths, strict=True)
        )
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, 2) for w in reversed(widths[:-1]))
        self.merge = nn.ModuleList(_twice(2 * w, w) for w in reversed(widths[:-1]))
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for level, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if level else x)
            kept.append(x)
        kept.pop()
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([kept.pop(), up(x)], 1))
        return self.head(x)


class Residual3d(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv3d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm3d(outputs)
        self.conv2 = nn.Conv3d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm3d(outputs)
        self.skip = nn.Conv3d(inputs, outputs, 1, stride, bias=False) if stride > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)), inplace=True)))
        return F.relu(out + (x if self.skip is None else self.skip(x)), inplace=True)


def video_resnet() -> nn.Module:
    """An R3D-18 for clips of 3x16x112x112."""
    layers: list[nn.Module] = [
        nn.Conv3d(3, 64, (3, 7, 7), (1, 2, 2), (1, 3, 3), bias=False), nn.BatchNorm3d(64),
        nn.ReLU(True),
    ]  # fmt: skip
    for inputs, outputs, stride in ((64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)):
        layers += [Residual3d(inputs, outputs, stride), Residual3d(outputs, outputs, 1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(512, 400))


class SpeechEncoder(nn.Module):
    """Strided 1-d convolutions over raw sound, as in wav2vec 2.0, then a transformer."""

    def __init__(self, width: int = 512, layers: int = 6, labels: int = 32) -> None:
        super().__init__()
        blocks: list[nn.Module] = []
        inputs = 1
        for kernel, stride in ((10, 5), (3, 2), (3, 2), (3, 2), (3, 2), (2, 2), (2, 2)):
            norm = nn.GroupNorm(32, width)
            blocks += [nn.Conv1d(inputs, width, kernel, stride), norm, nn.GELU()]
            inputs = width
        self.convolutions = nn.Sequential(*blocks)
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers)
        self.head = nn.Linear(width, labels)

    def forward(self, sound: Tensor) -> Tensor:
        x = self.convolutions(sound.unsqueeze(1)).transpose(1, 2)
        return self.head(self.encoder(x)).mean(1)
