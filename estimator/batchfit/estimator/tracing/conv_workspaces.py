"""What cuDNN takes for a convolution beyond its operands.

cuDNN publishes no formula: its heuristics name engines in order of expected speed, and each engine
asks for what it wants. PyTorch (cudnn/Conv_v8.cpp, ``try_plans``) allocates that for the first
engine, and where the allocation fails it goes on to the next: short of memory, a convolution runs
with a smaller workspace. So most sizes here are what cuDNN takes where memory is no concern, and
the least is 0.

Read off a recorded step of ResNet-50 at batch 1 (tests/data/oracle/steps/trace-035: fp32 with TF32,
NCHW, cuDNN 8.9), in which 152 of 159 convolution calls take one of two forms:

- **1x1, stride 1**: a matrix product through cuBLASLt with a workspace of 128 MiB (134,217,728 B in
  51 calls); the weight gradient takes the weight's bytes besides, which its tensor-core kernel
  stages (135,266,304; 134,742,016; 134,479,872 B).
- **else, on tensor cores**: their kernels read NHWC, so operands in NCHW are transposed into the
  workspace: input and weight, and also the output unless the kernel writes NCHW itself (forward, 4
  channels aligned, more than one tap), plus 16 bytes (950,288 B for 64 channels at 56x56).

A T4 has no TF32. There the first form holds in the backward pass alone: then the two measured peaks
of ResNet-50 at batch 32 (measured_peaks.csv) are met to +0.06 and +0.27 %, and 177 is the largest
batch, as measured; with it in the forward pass too it would be -0.36 and -0.17 %, and 171.

In **half precision** there is no engine to fall back to that is not for tensor cores, or none that
cuDNN finds: the transposed operands are needed. Without them the training brackets of timm (AMP in
NCHW, torch 1.12) let batches fit that failed, by up to 0.9 GiB, and in no case the reverse; with
them half of these misses are right and no row that was right is lost. Before torch 2.0 (version 7
of cuDNN's interface) that goes for 1x1 convolutions, too.

Not known, and not counted: grouped and transposed convolutions, 3-d ones, and operands that are
channels_last already.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from batchfit.estimator.units import MIB

# cublasLt's workspace as cuDNN's matrix-product engine asks for it (trace-035).
_MATMUL_WORKSPACE = 128 * MIB
# Alignment of the transposed operands (trace-035: every size is 16 above the operands).
_ALIGNMENT = 16
# Tensor-core kernels load 16 bytes at once: so many elements of the channels must divide them.
_LOAD_BYTES = 16


@dataclass(frozen=True, slots=True)
class ConvWorkspaces:
    """Bytes of workspace of each of the three computations; 0 where none is known.

    Attributes:
        required: cuDNN finds no engine that does without.
    """

    forward: int = 0
    input_gradient: int = 0
    weight_gradient: int = 0
    required: bool = False


def conv_workspaces(
    x: Tensor, weight: Tensor, out_shape: Sequence[int], *, stride: Sequence[int],
    padding: Sequence[int], capability: tuple[int, int], plain: bool, matmul: bool = True,
) -> ConvWorkspaces:  # fmt: skip
    """What cuDNN takes for a convolution, with memory to spare.

    Args:
        x: input, (N, C, L) or (N, C, H, W).
        weight: (K, C, R) or (K, C, R, S).
        out_shape: of the output.
        stride, padding: one number per spatial dimension.
        capability: of the GPU; decides whether tensor cores take the dtype.
        plain: one group, not transposed, and operands in NCHW.
        matmul: 1x1 convolutions are matrix products (torch 2.0 and later).
    """
    if not plain or x.dim() not in (3, 4) or x.dtype not in _TENSOR_CORES or x.numel() == 0:
        return ConvWorkspaces()
    on_tensor_cores = _on_tensor_cores(x.dtype, capability)
    item = x.element_size()
    weight_bytes = weight.numel() * item
    taps = math.prod(weight.shape[2:])
    if matmul and taps == 1 and set(stride) == {1} and not any(padding):
        if not on_tensor_cores:
            return ConvWorkspaces(0, _MATMUL_WORKSPACE, _MATMUL_WORKSPACE)
        return ConvWorkspaces(
            _MATMUL_WORKSPACE, _MATMUL_WORKSPACE, _MATMUL_WORKSPACE + weight_bytes
        )
    if not on_tensor_cores:
        return ConvWorkspaces()
    operands = x.numel() * item + weight_bytes + _ALIGNMENT
    every = operands + math.prod(out_shape) * item
    writes_nchw = taps > 1 and x.shape[1] % (_LOAD_BYTES // item) == 0
    return ConvWorkspaces(operands if writes_nchw else every, every, every, required=item == 2)


# dtype -> the first compute capability whose tensor cores take it; fp32 as TF32 (CUDA C++
# Programming Guide, "Compute Capabilities", arithmetic of tensor cores).
_TENSOR_CORES = {
    torch.float16: (7, 0),
    torch.bfloat16: (8, 0),
    torch.float32: (8, 0),
}


def _on_tensor_cores(dtype: torch.dtype, capability: tuple[int, int]) -> bool:
    if dtype is torch.float32 and not torch.backends.cudnn.allow_tf32:
        return False
    return capability >= _TENSOR_CORES[dtype]
