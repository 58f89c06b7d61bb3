"""Buffers that kernels allocate for themselves and no operator shows.

Their sizes follow from shapes, strides and the GPU by formulas with steps and thresholds, so they
are no line in the batch. A rule keeps the formula; the timeline keeps the shape as a line in the
batch and asks the rule at each batch size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

#: Kinds of allocations that no operator shows; each can be left out of an estimate.
#: cublas: the workspace of each cuBLAS handle, which PyTorch counts since 2.0.
#: kernels: buffers of PyTorch's own kernels (reductions, embedding gradients, attention).
#: transposes: the operands of half-precision convolutions in NCHW, which cuDNN puts into NHWC.
#: convolutions: what cuDNN takes besides, where memory is no concern, since torch 2.0.
WORKSPACES = ("cublas", "kernels", "transposes", "convolutions")


class SizeRule(Protocol):
    """A size in bytes as a function of whole numbers that are affine in the batch."""

    def __call__(self, numbers: Sequence[int]) -> int:
        """Bytes for these numbers; 0 where the kernel allocates nothing."""
        ...


# ATen/native/cuda/Reduce.cuh (header shipped with torch): MAX_NUM_THREADS of mnt_wrapper, vt0 and
# input_vec_size of gpu_reduce_kernel, min/max_values_per_thread of setReduceConfig, warp size.
_MAX_THREADS = 512
_VECTOR = 4
_MIN_VALUES, _MAX_VALUES = 16, 256
_WARP = 32


@dataclass(frozen=True, slots=True)
class ReductionRule:
    """Staging buffer and semaphores of a reduction over CUDA thread blocks.

    setReduceConfig and ReduceConfig::global_memory_size in ATen/native/cuda/Reduce.cuh. Confirmed
    on public allocator traces and on the peak of a BERT-large step.

    Attributes:
        reduced: which dimensions are summed over.
        itemsize: bytes of an input element.
        accumulator: bytes of an accumulator (4 for half, bfloat16 and float; 16 with an index).
        sm_count, threads_per_sm: of the GPU.
        semaphores: give the size of the semaphores instead of the buffer.
    """

    reduced: tuple[bool, ...]
    itemsize: int
    accumulator: int
    sm_count: int
    threads_per_sm: int
    semaphores: bool = False

    def __call__(self, numbers: Sequence[int]) -> int:
        """Args: numbers: shape, then strides in elements, of the input."""
        n = len(self.reduced)
        inner, outer = self._dimensions(numbers[:n], numbers[n:])
        outputs = math.prod(size for size, _ in outer)
        inputs = math.prod(size for size, _ in inner)
        if outputs == 0 or inputs <= 1:
            return 0
        return self._size(inner, outer, inputs, outputs)

    def _dimensions(
        self, shape: Sequence[int], strides: Sequence[int]
    ) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """TensorIterator: reduced dimensions first, by stride, adjacent ones coalesced."""
        sides: list[list[tuple[int, int]]] = []
        for side in (True, False):
            dims = sorted(
                (stride, size)
                for size, stride, reduced in zip(shape, strides, self.reduced, strict=True)
                if reduced is side and size != 1
            )
            merged: list[tuple[int, int]] = []
            for stride, size in dims:
                if merged and merged[-1][0] * merged[-1][1] == stride:
                    merged[-1] = (merged[-1][0] * size, merged[-1][1])
                else:
                    merged.append((size, stride))
            sides.append(merged)
        return sides[0], sides[1]

    def _size(
        self, inner: list[tuple[int, int]], outer: list[tuple[int, int]], inputs: int, outputs: int
    ) -> int:
        fastest = not outer or inner[0][1] < outer[0][1]
        dim0, dim1 = (inputs, outputs) if fastest else (outputs, inputs)
        stride = inner[0][1] if fastest else outer[0][1]
        vector = 1
        if stride == 1:
            if fastest and dim0 >= 128 and len(inner) == 1:
                dim0 //= _VECTOR
            elif not fastest:
                vector = self._output_vector(inner, outer)
                dim0 //= vector
        width, height = _block(dim0, dim1, _MAX_THREADS // vector)
        step_input = width if fastest else 1
        step_output = 1 if fastest else width
        values = -(-inputs // step_input)
        across_warps = values >= min(height * 16, _MAX_VALUES)
        if across_warps:
            step_input *= height
            values = -(-inputs // step_input)
        else:
            step_output *= height
        grid = -(-(outputs // vector) // step_output)
        target = self.sm_count * (self.threads_per_sm // (width * height))
        if not across_warps or values < _MAX_VALUES or grid > target:
            return 0
        low, high = -(-values // _MAX_VALUES), -(-values // _MIN_VALUES)
        blocks = min(max(-(-target // grid), low), high)
        if blocks <= 1:
            return 0
        if self.semaphores:
            return 4 * grid
        size = self.accumulator * outputs * blocks
        return size if fastest else size * width * vector

    @staticmethod
    def _output_vector(inner: list[tuple[int, int]], outer: list[tuple[int, int]]) -> int:
        """get_output_vec_size: loads of 4, 2 or 1 neighbouring outputs."""
        vector = _VECTOR
        for number in (outer[0][0], *(s for _, s in inner), *(s for _, s in outer[1:])):
            while number % vector:
                vector //= 2
        return vector


def _last_power_of_two(n: int) -> int:
    return 1 << (max(n, 1).bit_length() - 1)


def _block(dim0: int, dim1: int, threads: int) -> tuple[int, int]:
    """ReduceConfig::set_block_dimension."""
    x = _last_power_of_two(dim0) if dim0 < threads else threads
    y = _last_power_of_two(dim1) if dim1 < threads else threads
    width = min(x, _WARP)
    height = min(y, threads // width)
    return min(x, threads // height), height


def reduction_numbers(tensor: Tensor) -> tuple[int, ...]:
    """What :class:`ReductionRule` is asked with: shape, then strides."""
    return (*tensor.shape, *tensor.stride())


def reduced_dimensions(tensor: Tensor, dims: Any) -> tuple[bool, ...]:
    """Which dimensions a reduction is over: None or an empty list means all."""
    if dims is None or dims == []:
        return (True,) * tensor.dim()
    listed = dims if isinstance(dims, (list, tuple)) else (dims,)
    chosen = {int(d) % max(tensor.dim(), 1) for d in listed}
    return tuple(i in chosen for i in range(tensor.dim()))


def accumulator_bytes(dtype: torch.dtype) -> int:
    """sizeof(acc_type): float for half precision, else the type itself."""
    if dtype in (torch.float16, torch.bfloat16):
        return 4
    return dtype.itemsize
