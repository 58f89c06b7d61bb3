"""Packed sequences: their C++ code reads lengths from memory, which meta tensors do not have.

The functions follow ``aten/src/ATen/native/PackedSequence.cpp`` and read the lengths through the
values that a trace carries for small tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Protocol

from torch import Tensor


class HostValues(Protocol):
    """Reads and makes small integer tensors on the host."""

    def integers(self, tensor: Tensor) -> list[int]:
        """The values of a tensor; raises DataDependentError where they are not known."""
        ...

    def from_integers(self, values: Sequence[int]) -> Tensor:
        """A host tensor of dtype int64 with these values."""
        ...

    def assume(self, tensor: Tensor, value: bool) -> None:
        """Assume that every element of a boolean tensor is ``value``."""
        ...


def _steps(sizes: Sequence[int]) -> list[tuple[int, int, int]]:
    """Runs of equal batch sizes: (first step, end step, size)."""
    edges = [0, *(t for t in range(1, len(sizes)) if sizes[t] != sizes[t - 1]), len(sizes)]
    return [(start, end, sizes[start]) for start, end in pairwise(edges)]


def packed_kernels(host: Callable[[], HostValues]) -> dict[str, Callable[..., Any]]:
    """Operator name -> the function that runs in its place."""

    def pack_backward(
        grad: Tensor, input_size: Sequence[int], batch_sizes: Tensor, batch_first: bool
    ) -> Tensor:
        if batch_first:
            input_size = [input_size[1], input_size[0], *input_size[2:]]
        result = grad.new_zeros(input_size)
        offset = 0
        for start, end, size in _steps(host().integers(batch_sizes)):
            rows = (end - start) * size
            part = grad[offset : offset + rows].view(end - start, size, *grad.shape[1:])
            result[start:end, :size].copy_(part)
            offset += rows
        return result.transpose(0, 1) if batch_first else result

    def pad(
        data: Tensor, batch_sizes: Tensor, batch_first: bool, padding: Any, total_length: int = -1
    ) -> tuple[Tensor, Tensor]:
        sizes = host().integers(batch_sizes)
        steps = max(len(sizes), total_length)
        result = data.new_full([steps, sizes[0], *data.shape[1:]], padding)
        offset = 0
        for start, end, size in _steps(sizes):
            rows = (end - start) * size
            part = data[offset : offset + rows].view(end - start, size, *data.shape[1:])
            result[start:end, :size].copy_(part)
            offset += rows
        lengths = [sum(size > i for size in sizes) for i in range(sizes[0])]
        if batch_first:
            result = result.transpose(0, 1)
        return result, host().from_integers(lengths)

    return {"_pack_padded_sequence_backward": pack_backward, "_pad_packed_sequence": pad}
