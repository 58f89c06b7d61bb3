"""Gradients of lookups: what sorting the indices takes.

Sources: files under ``aten/src/ATen/native/cuda``, named per kernel, and cub's radix sort.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .calls import CallContext, copy_bytes, kernel, nbytes

aten = torch.ops.aten

# Embedding.cu, embedding_dense_backward_cuda: up to so many indices one kernel does without a sort.
_UNSORTED = 3072
# EmbeddingBackwardKernel.cu, NROWS_PER_THREAD: rows of the gradient that one thread sums.
_ROWS_PER_THREAD = 10


@dataclass(frozen=True, slots=True)
class EmbeddingGradientRule:
    """One of the buffers of ``embedding_backward_cuda_kernel`` (EmbeddingBackwardKernel.cu).

    Confirmed to the byte by the embedding rows of op_memory_a100.csv.

    Attributes:
        embeddings: rows of the table.
        width: bytes per unit: of an index, or of a row of partial sums in accumulate type.
        what: "indices": sorted indices, where each came from, and where its segment of equal ones
            begins; "segments": how many parts of up to 10 rows each segment has, and a running sum
            of it; "partials": one unit per part.
        always: sort also few indices, as for ``scale_grad_by_freq``.
    """

    embeddings: int
    width: int
    what: str
    always: bool = False

    def __call__(self, numbers: Sequence[int]) -> int:
        """Args: numbers: how many indices, as the shape of the tensor that holds them."""
        n = math.prod(numbers)
        if n <= _UNSORTED and not self.always:
            return 0
        segments = min(n, self.embeddings)
        units = {
            "indices": 3 * n,
            "segments": 2 * segments,
            "partials": n // _ROWS_PER_THREAD + segments,
        }
        return units[self.what] * self.width


@kernel(aten.embedding_dense_backward.default)
def _embedding_backward(call: CallContext, func: Any, args: Any, kwargs: Any) -> Any:
    """Embedding.cu, embedding_dense_backward_cuda: sort, then sum in parts of ten rows."""
    grad, indices, embeddings, _, by_frequency = args
    call.scratch([copy_bytes(grad), copy_bytes(indices)], "aten::contiguous")
    width = grad.shape[-1] * (8 if grad.dtype is torch.float64 else 4)
    index = indices.element_size()
    for what, size in (
        ("indices", index), ("segments", index), ("partials", index), ("partials", width),
    ):  # fmt: skip
        rule = EmbeddingGradientRule(embeddings, size, what, by_frequency)
        call.by_rule(rule, tuple(indices.shape), func._schema.name)
    return func(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class RadixSortRule:
    """Temporary storage of cub::DeviceRadixSort::SortPairs for 64-bit keys and values.

    Up to 2048 pairs a single tile sorts them and takes 1 byte. Above, the pairs are held once more,
    with a histogram of 256 digits per pass, and per tile a look-back entry for each digit. Read off
    public traces (1 B up to N = 2048; 72,191 B at N = 4096 and two passes; item 4 of
    tests/data/oracle/README.md); the size of a tile lies between 2048 and 4095 pairs, and is taken
    to be the smaller.

    Attributes:
        passes: of 8 bits each, as many as the largest key needs.
    """

    passes: int

    def __call__(self, numbers: Sequence[int]) -> int:
        """Args: numbers: how many pairs, as the shape of the tensor that holds the keys."""
        n = math.prod(numbers)
        if n == 0:
            return 0
        if n <= 2048:
            return 1
        parts = 8 * n, 8 * n, self.passes * 256 * 8, -(-n // 2048) * 256 * 4, 8 * self.passes
        return sum(-(-part // 256) * 256 for part in parts) + 255


def index_put_accumulate(call: CallContext, args: Any) -> None:
    """Indexing.cu, index_put_with_sort_kernel: the indices as one number each, sorted.

    Args:
        call: is told of the buffers, which live until the operator has returned.
        args: of ``index_put`` with ``accumulate=True``.
    """
    target, indices, values = args[0], args[1], args[2]
    given = [index for index in indices if isinstance(index, Tensor)]
    if not given or any(index.dtype in (torch.bool, torch.uint8) for index in given):
        return  # masks become indices whose number only data can tell
    shape = tuple(torch.broadcast_shapes(*(i.shape for i in given)))  # type: ignore[no-untyped-call]
    call.scratch([copy_bytes(values)], "aten::contiguous")
    size = 8 * math.prod(shape)
    slices = [n for n, index in zip(target.shape, indices, strict=False) if index is not None]
    passes = -(-max(math.prod(slices) - 1, 1).bit_length() // 8)
    call.buffers([size] * 4, "aten::_index_put_impl_")  # linear, sorted, original, range
    call.by_rule(RadixSortRule(passes), shape, "aten::_index_put_impl_")


@kernel(aten._foreach_norm.Scalar)
def _foreach_norm(call: CallContext, func: Any, args: Any, kwargs: Any) -> Any:
    """ForeachReduceOp.cu: a partial result per tensor and chunk of 65,536 elements."""
    tensors = args[0]
    chunks = max((-(-t.numel() // 65536) for t in tensors), default=0)
    call.buffers([4 * len(tensors) * chunks], func._schema.name)
    return func(*args, **kwargs)


@kernel(aten._fft_c2r.default)
def _fft_c2r(call: CallContext, func: Any, args: Any, kwargs: Any) -> Any:
    """SpectralOps.cpp, _fft_c2r_cufft: cuFFT overwrites its input, so it gets a copy."""
    call.scratch([nbytes(args[0])], "aten::clone")
    return func(*args, **kwargs)
