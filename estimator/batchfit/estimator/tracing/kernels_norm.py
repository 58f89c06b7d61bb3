"""Softmax, normalization, pooling and resizing: the copies and buffers of their CUDA kernels.

Sources: files under ``aten/src/ATen/native/cuda``, named per kernel. The operators' outputs are
those of torch's meta kernels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from .calls import CallContext, Kernel, copy_bytes, kernel

aten = torch.ops.aten


def _copies(*positions: int, like: int | None = None) -> Kernel:
    """The kernel works on contiguous copies of these arguments, for as long as it runs.

    Args:
        positions: of the arguments.
        like: the argument whose memory format the copies have; None: plainly contiguous.
    """

    def run(call: CallContext, func: Any, args: Any, kwargs: Any) -> Any:
        layout = torch.contiguous_format if like is None else suggest_memory_format(args[like])
        sizes = [copy_bytes(args[i], layout) for i in positions if i < len(args)]
        call.scratch(sizes, "aten::contiguous")
        return func(*args, **kwargs)

    return run


# SoftMax.cu: host_softmax takes input_.contiguous(), host_softmax_backward both of its tensors.
kernel(aten._softmax.default, aten._log_softmax.default)(_copies(0))
kernel(aten._softmax_backward_data.default, aten._log_softmax_backward_data.default)(_copies(0, 1))
# layer_norm_kernel.cu: layer_norm_cuda and layer_norm_backward_cuda, expect_contiguous.
kernel(aten.native_layer_norm.default)(_copies(0))
kernel(aten.native_layer_norm_backward.default)(_copies(0, 1))
# layer_norm_kernel.cu: _fused_rms_norm_backward_cuda, as for layer_norm.
kernel(aten._fused_rms_norm_backward.default)(_copies(0, 1))
# ReplicationPadding.cu, ReflectionPad.cu: input.contiguous().
kernel(aten.replication_pad2d.default, aten.replication_pad1d.default)(_copies(0))
kernel(aten.reflection_pad2d.default, aten.reflection_pad1d.default)(_copies(0))


@kernel(aten._fused_rms_norm.default)
def _fused_rms_norm(call: CallContext, func: Any, args: Any, kwargs: Any) -> Any:
    """layer_norm_kernel.cu, _fused_rms_norm_cuda: the output and one fp32 number per row."""
    x, shape = args[0], args[1]
    call.scratch([copy_bytes(x)], "aten::contiguous")
    outer = x.shape[: x.dim() - len(shape)]
    dtype = torch.float64 if x.dtype is torch.float64 else torch.float32
    return (
        torch.empty(x.shape, dtype=x.dtype, device="meta"),
        torch.empty([*outer, *[1] * len(shape)], dtype=dtype, device="meta"),
    )


def _statistics(count: int) -> Kernel:
    """Group normalization keeps some numbers of accumulate type per sample and channel."""

    def run(call: CallContext, func: Any, args: Any, kwargs: Any) -> Any:
        x = args[1] if func is aten.native_group_norm_backward.default else args[0]
        copies = [copy_bytes(t) for t in args[:2] if isinstance(t, Tensor) and t.dim() > 1]
        call.scratch(copies, func._schema.name)
        item = 8 if x.dtype is torch.float64 else 4
        call.buffers([x.shape[0] * x.shape[1] * item] * count, func._schema.name)
        return func(*args, **kwargs)

    return run


# group_norm_kernel.cu: a and b of GroupNormKernelImpl; ds, db and c1 of the backward pass.
kernel(aten.native_group_norm.default)(_statistics(2))
kernel(aten.native_group_norm_backward.default)(_statistics(3))


# DilatedMaxPool2d.cu, AveragePool2d.cu: memory_format = input.suggest_memory_format().
kernel(aten.max_pool2d_with_indices.default, aten.avg_pool2d.default)(_copies(0, like=0))
kernel(aten.max_pool2d_with_indices_backward.default)(_copies(0, 1, like=1))
kernel(aten.avg_pool2d_backward.default)(_copies(0, 1, like=1))
# AdaptiveAveragePooling.cu: the gradient in the input's format.
kernel(aten._adaptive_avg_pool2d_backward.default)(_copies(0, like=1))
# UpSampleBilinear2d.cu and its kin: input and gradient in their own format.
kernel(
    aten.upsample_bilinear2d.default, aten.upsample_nearest2d.default,
    aten.upsample_bicubic2d.default, aten._upsample_bilinear2d_aa.default,
    aten.upsample_bilinear2d_backward.default, aten.upsample_nearest2d_backward.default,
    aten.upsample_bicubic2d_backward.default, aten._upsample_bilinear2d_aa_backward.default,
)(_copies(0, like=0))  # fmt: skip
