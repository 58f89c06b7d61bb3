"""Convolution, batch normalization and recurrent networks as cuDNN runs them.

Sources: files under ``aten/src/ATen/native/cudnn`` and ``native/Convolution.cpp``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from .calls import CallContext, copy_bytes, empty, kernel
from .conv_workspaces import ConvWorkspaces, conv_workspaces
from .workspaces import accumulator_bytes

aten = torch.ops.aten


def _conv_format(x: Tensor, weight: Tensor) -> torch.memory_format:
    """cudnn_conv_suggest_memory_format (ConvUtils.h): channels_last if input or weight is."""
    if x.dtype is torch.float64 or x.dim() not in (4, 5):
        return torch.contiguous_format
    last = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
    if last in (suggest_memory_format(x), suggest_memory_format(weight)):
        return last
    return torch.contiguous_format


def _spread(values: Sequence[int], n: int) -> list[int]:
    return list(values) * n if len(values) == 1 else list(values)


def _conv_shape(
    x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], transposed: bool, output_padding: Sequence[int], groups: int,
) -> list[int]:  # fmt: skip
    """conv_output_size and conv_input_size (ConvUtils.h); may be 0 or less for wrong arguments."""
    n = x.dim() - 2
    stride, padding, dilation = (_spread(v, n) for v in (stride, padding, dilation))
    output_padding = _spread(output_padding, n)
    sizes = []
    for i in range(n):
        span = dilation[i] * (weight.shape[i + 2] - 1)
        if transposed:
            size = (x.shape[i + 2] - 1) * stride[i] - 2 * padding[i] + span + output_padding[i] + 1
        else:
            size = (x.shape[i + 2] + 2 * padding[i] - span - 1) // stride[i] + 1
        sizes.append(size)
    channels = weight.shape[1] * groups if transposed else weight.shape[0]
    return [x.shape[0], channels, *sizes]


@kernel(aten.convolution.default)
def _convolution(call: CallContext, func: Any, args: Any, kwargs: Any) -> Any:
    """cudnn/ConvShared.cpp, cudnn_convolution_forward: operands made contiguous, one output."""
    x, weight, _, stride, padding, dilation, transposed, output_padding, groups = args
    if x.dtype is not weight.dtype:  # the meta kernel does not look
        raise RuntimeError(
            f"input is {x.dtype} and weight is {weight.dtype}; they must be the same"
        )
    in_channels = weight.shape[0] if transposed else weight.shape[1] * groups
    shape = _conv_shape(x, weight, stride, padding, dilation, transposed, output_padding, groups)
    if x.dim() != weight.dim() or x.shape[1] != in_channels or min(shape[2:]) <= 0 or kwargs:
        return func(*args, **kwargs)  # let torch word the error
    layout = _conv_format(x, weight)
    call.scratch([copy_bytes(x, layout), copy_bytes(weight, layout)], "aten::contiguous")
    out = empty(shape, x, layout)
    call.born(out, "aten::convolution")
    sizes = _conv_workspaces(call, x, weight, shape, stride, padding, groups, transposed, layout)
    call.convolution(sizes.forward, "aten::convolution", sizes.required)
    return out


def _conv_workspaces(
    call: CallContext, x: Tensor, weight: Tensor, out_shape: Sequence[int], stride: Sequence[int],
    padding: Sequence[int], groups: int, transposed: bool, layout: torch.memory_format,
) -> ConvWorkspaces:  # fmt: skip
    plain = groups == 1 and not transposed and layout is torch.contiguous_format
    if "convolutions" in call.workspaces and not (plain and x.dim() < 5):
        call.note(
            "what cuDNN takes for grouped, transposed, 3-d and channels_last convolutions is not "
            "known; nothing was counted for it"
        )
    return conv_workspaces(
        x, weight, out_shape, stride=stride, padding=padding, capability=call.gpu.capability,
        plain=plain, matmul="convolutions" in call.workspaces,
    )  # fmt: skip


@kernel(aten.convolution_backward.default)
def _convolution_backward(call: CallContext, func: Any, args: Any, kwargs: Any) -> Any:
    """Convolution.cpp, convolution_backward: input, weight, then bias gradient."""
    grad, x, weight, bias_sizes, stride, padding, _, transposed, _, groups, mask = args
    layout = _conv_format(x, weight)
    copies = [copy_bytes(grad, layout), copy_bytes(x, layout), copy_bytes(weight, layout)]
    call.scratch(copies, "aten::contiguous")
    if mask[2]:
        dims = [d for d in range(grad.dim()) if d != 1]
        call.reduction(grad, dims, accumulator_bytes(grad.dtype), "aten::sum")
    sizes = _conv_workspaces(
        call, x, weight, grad.shape, stride, padding, groups, transposed, layout
    )
    grads: list[Tensor | None] = []
    of_x_and_weight = (x, sizes.input_gradient), (weight, sizes.weight_gradient)
    for wanted, (tensor, size) in zip(mask[:2], of_x_and_weight, strict=True):
        if not wanted:
            grads.append(None)
            continue
        made = empty(tensor.shape, grad, layout)
        grads.append(made)
        call.born(made, "aten::convolution_backward")
        call.convolution(size, "aten::convolution_backward", sizes.required)
    bias = torch.empty(bias_sizes, dtype=grad.dtype, device="meta") if mask[2] else None
    return (*grads, bias)


@kernel(aten.cudnn_batch_norm.default)
def _cudnn_batch_norm(call: CallContext, func: Any, args: Any, kwargs: Any) -> Any:
    """cudnn/BatchNorm.cpp: output, saved mean and inverse deviation, an empty reserve space."""
    x, weight, training = args[0], args[1], args[5]
    channels = x.shape[1] if training else 0
    return (
        empty(x.shape, x, suggest_memory_format(x)),
        torch.empty(channels, dtype=weight.dtype, device="meta"),
        torch.empty(channels, dtype=weight.dtype, device="meta"),
        torch.empty(0, dtype=torch.uint8, device="meta"),
    )


@kernel(aten.cudnn_batch_norm_backward.default)
def _cudnn_batch_norm_backward(call: CallContext, func: Any, args: Any, kwargs: Any) -> Any:
    """cudnn/BatchNorm.cpp: the gradient is made contiguous in the input's format."""
    x, grad, weight = args[0], args[1], args[2]
    layout = suggest_memory_format(x)
    call.scratch([copy_bytes(grad, layout)], "aten::contiguous")
    return (
        empty(x.shape, x, layout),
        torch.empty(weight.shape, dtype=weight.dtype, device="meta"),
        torch.empty(weight.shape, dtype=weight.dtype, device="meta"),
    )


@kernel(aten._cudnn_rnn.default)
def _cudnn_rnn(call: CallContext, func: Any, args: Any, kwargs: Any) -> Any:
    """cudnn/RNN.cpp: output, last states, and the reserve space that backward reads."""
    (x, _, _, _, _, cx, mode, hidden, proj, layers, batch_first, _, train, both, sizes,
     _) = args  # fmt: skip
    directions = 2 if both else 1
    width = (proj or hidden) * directions
    steps = len(sizes) or x.shape[1 if batch_first else 0]
    batch = sizes[0] if sizes else x.shape[0 if batch_first else 1]
    out_shape = [x.shape[0], width] if sizes else [*x.shape[:2], width]
    cell = [layers * directions, batch, hidden]
    reserve = 0
    if train:
        call.note(
            "what cuDNN keeps of a recurrent network for its backward pass is not published; "
            "counted is what that pass needs"
        )
        samples = x.shape[0] if sizes else steps * batch
        reserve = rnn_reserve_bytes(mode, layers, directions, samples, hidden, x.element_size())
    out = (
        torch.empty(out_shape, dtype=x.dtype, device="meta"),
        torch.empty([layers * directions, batch, proj or hidden], dtype=x.dtype, device="meta"),
        torch.empty(cell if cx is not None else 0, dtype=x.dtype, device="meta"),
        torch.empty(reserve, dtype=torch.uint8, device="meta"),
        torch.empty(0, dtype=x.dtype, device="meta"),
    )
    for i, tensor in enumerate(out):
        call.born(tensor, "aten::_cudnn_rnn", opaque=i == 3)
    return out


def rnn_reserve_bytes(
    mode: int, layers: int, directions: int, samples: int, hidden: int, itemsize: int
) -> int:
    """Bytes that cuDNN keeps per forward pass of an RNN for its backward pass.

    cuDNN documents no formula. Counted here is what the backward pass of the cell needs: the
    activated gates (4 for LSTM, 3 plus the hidden projection for GRU, 1 for plain RNN), the cell
    state, and each layer's output. Not confirmed by a measurement.
    """
    per_unit = {0: 2, 1: 2, 2: 6, 3: 5}[mode]
    return per_unit * layers * directions * samples * hidden * itemsize


@kernel(aten._cudnn_rnn_backward.default)
def _cudnn_rnn_backward(call: CallContext, func: Any, args: Any, kwargs: Any) -> Any:
    """cudnn/RNN.cpp: gradients of input and states, and of all weights as views of one buffer."""
    x, weights, hx, cx, mask = args[0], args[1], args[4], args[5], args[-1]
    grads: list[Tensor] = []
    if mask[3]:
        total = sum(w.numel() for w in weights)
        flat = torch.empty(total, dtype=x.dtype, device="meta")
        offset = 0
        for weight in weights:
            grads.append(flat[offset : offset + weight.numel()].view(weight.shape))
            offset += weight.numel()
    return (
        torch.empty(x.shape, dtype=x.dtype, device="meta"),
        torch.empty(hx.shape, dtype=x.dtype, device="meta"),
        torch.empty(cx.shape, dtype=x.dtype, device="meta") if cx is not None else None,
        grads,
    )
