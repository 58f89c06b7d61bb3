"""Language and sequence models, and a few others without convolutions, that need only torch."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class CausalAttention(nn.Module):
    """GPT-2's attention, by the fused function or written out."""

    def __init__(self, width: int, heads: int, length: int, eager: bool, dropout: float) -> None:
        super().__init__()
        self.heads, self.eager, self.dropout = heads, eager, dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.after = nn.Dropout(dropout)
        if eager:
            self.register_buffer("mask", torch.ones(length, length, dtype=torch.bool).tril())

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = (
            part.view(batch, tokens, self.heads, -1).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=2)
        )
        if self.eager:
            scores = q @ k.transpose(-2, -1) / math.sqrt(k.shape[-1])
            scores = scores.masked_fill(~self.mask[:tokens, :tokens], float("-inf"))
            out = F.dropout(scores.softmax(-1), self.dropout, self.training) @ v
        else:
            chance = self.dropout if self.training else 0.0
            out = F.scaled_dot_product_attention(q, k, v, dropout_p=chance, is_causal=True)
        out = out.transpose(1, 2).reshape(batch, tokens, width)
        return self.after(self.out(out))


class GPTBlock(nn.Module):
    def __init__(self, width: int, heads: int, length: int, eager: bool, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = CausalAttention(width, heads, length, eager, dropout)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width),
            nn.Dropout(dropout),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """GPT-2 small by default: 124 million parameters, the head tied to the embedding.

    Args:
        layers, width, heads, length, vocabulary: as the names say.
        eager: attention written out, which keeps the matrix of scores.
        dropout: 0.1 in GPT-2.
        checkpointing: recompute each block in the backward pass.
    """

    def __init__(
        self, layers: int = 12, width: int = 768, heads: int = 12, length: int = 1024,
        vocabulary: int = 50257, eager: bool = False, dropout: float = 0.1,
        checkpointing: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(
            GPTBlock(width, heads, length, eager, dropout) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        self.checkpointing = checkpointing

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        return self.head(self.norm(x))


class MaskedEncoder(nn.Module):
    """BERT-base's shape out of torch's own encoder layers, with a padding mask and a class head."""

    def __init__(self, vocabulary: int = 30522, width: int = 768, layers: int = 12) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width, padding_idx=0)
        self.positions = nn.Embedding(512, width)
        self.norm = nn.LayerNorm(width)
        layer = nn.TransformerEncoderLayer(
            width, 12, 4 * width, activation="gelu", batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.pooler, self.head = nn.Linear(width, width), nn.Linear(width, 2)

    def forward(self, ids: Tensor, padding: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.norm(self.tokens(ids) + self.positions(places))
        x = self.encoder(x, src_key_padding_mask=padding)
        return self.head(torch.tanh(self.pooler(x[:, 0])))


class RMSNorm(nn.Module):
    """Normalisation in fp32 as Llama's code writes it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight * wide.to(x.dtype)


class LoraLinear(nn.Module):
    """A frozen linear layer and a trained product of two thin ones (Hu et al. 2021)."""

    def __init__(self, inputs: int, outputs: int, rank: int = 16) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs, bias=False)
        self.down = nn.Linear(inputs, rank, bias=False)
        self.up = nn.Linear(rank, outputs, bias=False)
        self.dropout = nn.Dropout(0.05)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(self.dropout(x))) * 2.0


class LlamaBlock(nn.Module):
    """Grouped queries, rotary positions, SwiGLU; LoRA on queries and values."""

    def __init__(self, width: int, heads: int, groups: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.q = LoraLinear(width, width)
        self.k = nn.Linear(width, groups * self.size, bias=False)
        self.v = LoraLinear(width, groups * self.size)
        self.o = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    @staticmethod
    def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        one, two = x.chunk(2, -1)
        return x * cos + torch.cat([-two, one], -1) * sin

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        y = self.norm1(x)
        q = self.q(y).view(batch, tokens, self.heads, self.size).transpose(1, 2)
        k = self.k(y).view(batch, tokens, self.groups, self.size).transpose(1, 2)
        v = self.v(y).view(batch, tokens, self.groups, self.size).transpose(1, 2)
        q, k = self._rotate(q, cos, sin), self._rotate(k, cos, sin)
        k, v = (t.repeat_interleave(self.heads // self.groups, 1) for t in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(out.transpose(1, 2).reshape(batch, tokens, width))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class LlamaLora(nn.Module):
    """A slice of Llama whose base is frozen; only the LoRA matrices are trained."""

    def __init__(self, layers: int = 6, width: int = 2048, vocabulary: int = 32000) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(LlamaBlock(width, 16, 4, 5632) for _ in range(layers))
        self.norm = RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.requires_grad_(False)
        for module in self.modules():
            if isinstance(module, LoraLinear):
                module.down.requires_grad_(True)
                module.up.requires_grad_(True)
        size = width // 16
        rates = 10000.0 ** (-torch.arange(0, size, 2) / size)
        self.register_buffer("rates", rates, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        angles = torch.arange(ids.shape[1], device=ids.device)[:, None] * self.rates.float()
        angles = torch.cat([angles, angles], -1)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


class Recurrent(nn.Module):
    """A word-level language model with an LSTM or GRU (PyTorch's example)."""

    def __init__(
        self, kind: str, vocabulary: int = 33278, width: int = 650, layers: int = 2
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        cell = {"lstm": nn.LSTM, "gru": nn.GRU}[kind]
        self.cells = cell(width, width, layers, batch_first=True, dropout=0.2)
        self.dropout, self.head = nn.Dropout(0.2), nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        out, _ = self.cells(self.dropout(self.tokens(ids)))
        return self.head(self.dropout(out))


class Translator(nn.Module):
    """torch's own encoder and decoder with a causal mask."""

    def __init__(self, vocabulary: int = 32000, width: int = 512) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.transformer = nn.Transformer(width, 8, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        length = target.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=target.device)
        out = self.transformer(
            self.tokens(source), self.tokens(target), tgt_mask=mask, tgt_is_causal=True
        )
        return self.head(out)


class BigVocabulary(nn.Module):
    """Two blocks and a vocabulary of 128,256 words: the loss is the peak."""

    def __init__(self, vocabulary: int = 128256, width: int = 1024) -> None:
        super().__init__()
        self.body = GPT(2, width, 16, 512, 256, dropout=0.0)
        self.body.tokens, self.body.head = nn.Embedding(vocabulary, width), nn.Identity()
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(ids))


class Recommender(nn.Module):
    """DLRM's shape (Naumov et al. 2019): bags of categories, dense features, their products."""

    def __init__(self, tables: int = 16, rows: int = 100_000, width: int = 64) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        self.bottom = nn.Sequential(
            nn.Linear(13, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, width)
        )
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(
            nn.Linear(pairs + width, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(),
            nn.Linear(512, 1),
        )  # fmt: skip
        self.register_buffer("pairs", torch.triu_indices(tables + 1, tables + 1, 1))

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        low = self.bottom(dense)
        bags = [table(ids[:, i]) for i, table in enumerate(self.tables)]
        x = torch.stack([low, *bags], 1)
        products = torch.bmm(x, x.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([low, products], 1)).squeeze(1)


class GraphNet(nn.Module):
    """Message passing over one fixed graph: gathers along edges, index_add at their ends."""

    def __init__(self, nodes: int = 2048, edges: int = 16384, width: int = 128) -> None:
        super().__init__()
        self.start = nn.Linear(32, width)
        self.layers = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(4))
        self.head = nn.Linear(width, 8)
        self.register_buffer("ends", torch.arange(2 * edges).view(2, -1) * 7919 % nodes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x)
        for layer in self.layers:
            messages = F.relu(layer(torch.cat([x[:, self.ends[0]], x[:, self.ends[1]]], -1)))
            x = x + torch.zeros_like(x).index_add(1, self.ends[1], messages)
        return self.head(x.mean(1))
