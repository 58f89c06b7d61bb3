"""Vision transformers, a diffusion U-Net, a detector and a GAN that need nothing but torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .convnets import ResNet, mlp


class SelfAttention(nn.Module):
    """Attention over (batch, tokens, width) by scaled_dot_product_attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v)
        return self.out(out.transpose(1, 2).reshape(batch, tokens, width))


class EncoderBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = SelfAttention(width, heads)
        self.mlp = mlp(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """Vision transformer for 224x224; width 768 with 12 heads and layers is ViT-B/16."""

    def __init__(self, width: int = 768, heads: int = 12, layers: int = 12) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, 197, width))
        self.blocks = nn.Sequential(*(EncoderBlock(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])


class WindowAttention(nn.Module):
    """Attention within windows of 7x7, shifted or not, written out as in Swin (Liu et al. 2021)."""

    def __init__(self, width: int, heads: int, side: int, shift: int) -> None:
        super().__init__()
        self.heads, self.side, self.shift, self.window = heads, side, shift, 7
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.bias = nn.Parameter(torch.zeros((2 * self.window - 1) ** 2, heads))
        at = torch.stack(torch.meshgrid(torch.arange(7), torch.arange(7), indexing="ij")).flatten(1)
        apart = at[:, :, None] - at[:, None] + self.window - 1
        self.register_buffer("index", (apart[0] * (2 * self.window - 1) + apart[1]).flatten())
        self.register_buffer("mask", self._mask() if shift else None)

    def _mask(self) -> Tensor:
        """-100 between tokens that the cyclic shift has brought into one window from afar."""
        cuts = (slice(0, -self.window), slice(-self.window, -self.shift), slice(-self.shift, None))
        region = torch.zeros(1, self.side, self.side, 1)
        for i, rows in enumerate(cuts):
            for j, columns in enumerate(cuts):
                region[:, rows, columns] = 3 * i + j
        tokens = self._windows(region).squeeze(-1)
        return torch.where(tokens.unsqueeze(1) == tokens.unsqueeze(2), 0.0, -100.0)

    def _windows(self, x: Tensor) -> Tensor:
        batch, side, _, width = x.shape
        x = x.view(batch, side // 7, 7, side // 7, 7, width).transpose(2, 3)
        return x.reshape(-1, 49, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, side, _, width = x.shape
        if self.shift:
            x = torch.roll(x, (-self.shift, -self.shift), (1, 2))
        windows = self._windows(x)
        q, k, v = self.qkv(windows).view(len(windows), 49, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
        scores = scores + self.bias[self.index].view(49, 49, -1).permute(2, 0, 1).unsqueeze(0)
        if self.mask is not None:
            count = self.mask.shape[0]
            scores = scores.view(batch, count, self.heads, 49, 49) + self.mask[None, :, None]
            scores = scores.view(-1, self.heads, 49, 49)
        out = (scores.softmax(-1) @ v).transpose(1, 2).reshape(len(windows), 49, width)
        out = self.out(out).view(batch, side // 7, side // 7, 7, 7, width).transpose(2, 3)
        out = out.reshape(batch, side, side, width)
        return torch.roll(out, (self.shift, self.shift), (1, 2)) if self.shift else out


class SwinBlock(nn.Module):
    def __init__(self, width: int, heads: int, side: int, shift: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = WindowAttention(width, heads, side, shift)
        self.mlp = mlp(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Swin(nn.Module):
    """Swin-T for 224x224, without stochastic depth."""

    def __init__(self, width: int = 96, depths: tuple[int, ...] = (2, 2, 6, 2)) -> None:
        super().__init__()
        self.patches, self.norm0 = nn.Conv2d(3, width, 4, 4), nn.LayerNorm(width)
        side, heads = 56, 3
        self.stages, self.merges = nn.ModuleList(), nn.ModuleList()
        for stage, depth in enumerate(depths):
            if stage:
                norm, reduce = nn.LayerNorm(4 * width), nn.Linear(4 * width, 2 * width, bias=False)
                self.merges.append(nn.Sequential(norm, reduce))
                width, heads, side = 2 * width, 2 * heads, side // 2
            shifts = [3 if i % 2 and side > 7 else 0 for i in range(depth)]
            self.stages.append(nn.Sequential(*(SwinBlock(width, heads, side, s) for s in shifts)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm0(self.patches(x).permute(0, 2, 3, 1))
        for stage, blocks in enumerate(self.stages):
            if stage:
                parts = [x[:, i::2, j::2] for j in (0, 1) for i in (0, 1)]
                x = self.merges[stage - 1](torch.cat(parts, -1))
            x = blocks(x)
        return self.head(self.norm(x).mean((1, 2)))


class TimedBlock(nn.Module):
    """Two normalised convolutions with the time added in between, as in DDPM."""

    def __init__(self, inputs: int, outputs: int, time: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(32, inputs), nn.GroupNorm(32, outputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.time = nn.Linear(time, outputs)
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        out = self.conv1(F.silu(self.norm1(x))) + self.time(time)[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(out)))


class DiffusionUNet(nn.Module):
    """Predicts the noise in 64x64 images; attention at 16x16 and in the middle."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.embed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, 512)
        )
        self.start = nn.Conv2d(3, width, 3, padding=1)
        widths = [width, width, 2 * width, 2 * width]
        self.down, self.pool = nn.ModuleList(), nn.ModuleList()
        for a, b in zip([width, *widths[:-1]], widths, strict=True):
            self.down.append(TimedBlock(a, b, 512))
            self.pool.append(nn.Conv2d(b, b, 3, 2, 1))
        self.attention = EncoderBlock(widths[-1], 4)
        self.middle = TimedBlock(widths[-1], widths[-1], 512)
        self.up = nn.ModuleList()
        for a, b in zip(reversed(widths), [*reversed(widths[:-1]), width], strict=True):
            self.up.append(TimedBlock(2 * a, b, 512))
        self.end = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x: Tensor, steps: Tensor) -> Tensor:
        angles = steps[:, None] * torch.arange(64, device=x.device) * 0.01
        time = self.embed(torch.cat([angles.sin(), angles.cos()], 1))
        x, kept = self.start(x), []
        for block, pool in zip(self.down, self.pool, strict=True):
            kept.append(block(x, time))
            x = pool(kept[-1])
        tokens = self.attention(x.flatten(2).transpose(1, 2))
        x = self.middle(tokens.transpose(1, 2).reshape(x.shape), time)
        for block in self.up:
            x = F.interpolate(x, scale_factor=2.0, mode="nearest")
            x = block(torch.cat([x, kept.pop()], 1), time)
        return self.end(F.silu(x))


class Detector(nn.Module):
    """RetinaNet's parts (Lin et al. 2017) with anchors that are matched beforehand.

    Takes images and, for each of 32 anchors per image, its number and its box; returns the loss.
    """

    def __init__(self, classes: int = 80, width: int = 256, anchors: int = 9) -> None:
        super().__init__()
        self.backbone = ResNet()
        self.lateral = nn.ModuleList(nn.Conv2d(c, width, 1) for c in (512, 1024, 2048))
        self.smooth = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(3))
        self.extra = nn.ModuleList(nn.Conv2d(c, width, 3, 2, 1) for c in (2048, width))
        self.classes = classes
        self.scores = self._head(width, anchors * classes)
        self.boxes = self._head(width, anchors * 4)

    @staticmethod
    def _head(width: int, outputs: int) -> nn.Sequential:
        layers: list[nn.Module] = []
        for _ in range(4):
            layers += [nn.Conv2d(width, width, 3, padding=1), nn.ReLU()]
        return nn.Sequential(*layers, nn.Conv2d(width, outputs, 3, padding=1))

    def pyramid(self, images: Tensor) -> list[Tensor]:
        """Feature maps at strides 8 to 128."""
        found = self.backbone.features(images)[1:]
        maps = [lateral(x) for lateral, x in zip(self.lateral, found, strict=True)]
        for level in (1, 0):
            above = F.interpolate(maps[level + 1], size=maps[level].shape[-2:], mode="nearest")
            maps[level] = maps[level] + above
        maps = [smooth(x) for smooth, x in zip(self.smooth, maps, strict=True)]
        maps.append(self.extra[0](found[-1]))
        maps.append(self.extra[1](F.relu(maps[-1])))
        return maps

    def _flat(self, head: nn.Module, maps: list[Tensor], last: int) -> Tensor:
        flat = [head(x).permute(0, 2, 3, 1).reshape(x.shape[0], -1, last) for x in maps]
        return torch.cat(flat, 1)

    def forward(self, images: Tensor, matched: Tensor, targets: Tensor) -> dict[str, Tensor]:
        maps = self.pyramid(images)
        scores = self._flat(self.scores, maps, self.classes)
        boxes = self._flat(self.boxes, maps, 4)
        wanted = torch.zeros_like(scores)
        wanted.scatter_(1, matched[:, :, None].expand(-1, -1, self.classes), 1.0)
        probability = scores.sigmoid()
        entropy = F.binary_cross_entropy_with_logits(scores, wanted, reduction="none")
        weight = (wanted * (1 - probability) + (1 - wanted) * probability) ** 2
        found = boxes.gather(1, matched[:, :, None].expand(-1, -1, 4))
        loss = (weight * entropy).sum() / matched.numel() + F.smooth_l1_loss(found, targets)
        return {"loss": loss}
