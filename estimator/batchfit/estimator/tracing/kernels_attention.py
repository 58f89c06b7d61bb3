"""What the backward passes of fused attention allocate for themselves.

Shapes here are (N, H, L, D): N samples, H heads, L queries or S keys, D numbers per head.
"""

from __future__ import annotations

from typing import Any

import torch

from .calls import CallContext, copy_bytes, kernel

aten = torch.ops.aten

# flash_attn/flash_api.cpp, mha_bwd: round_multiple(seqlen_q, 128); head sizes up to 128 are rounded
# to 32, larger ones to 64.
_FLASH_ROWS = 128
# mem_eff_attention/kernel_backward.h: kBlockSizeI; columns of MatmulGradQ; GradQTempStorage's lock
# and counter. Confirmed by the recorded traces for D = 64 (tests/data/oracle/README.md, item 8).
_EFFICIENT_ROWS = 64
_EFFICIENT_COLUMNS = 64
_EFFICIENT_LOCK = 16


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


@kernel(
    aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_cudnn_attention_backward.default,
)
def _flash_backward(call: CallContext, func: Any, args: Any, kwargs: Any) -> Any:
    """flash_attn/flash_api.cpp, mha_bwd: softmax_d, dq_accum in fp32; dk and dv of every head.

    cuDNN's kernel sums dq in fp32 as well; its workspace is not published and taken to be the same.
    """
    query, key = args[1], args[2]
    n, heads, rows, width = query.shape
    rows = _up(rows, _FLASH_ROWS)
    width = _up(width, 32 if width <= 128 else 64)
    call.buffers([4 * n * heads * rows, 4 * n * heads * rows * width], func._schema.name)
    if key.shape[1] != heads:
        expanded = n * heads * key.shape[2] * query.shape[3] * query.element_size()
        call.buffers([expanded, expanded], func._schema.name)
    return func(*args, **kwargs)


@kernel(aten._scaled_dot_product_efficient_attention_backward.default)
def _efficient_backward(call: CallContext, func: Any, args: Any, kwargs: Any) -> Any:
    """cuda/attention_backward.cu, _efficient_attention_backward: delta and an fp32 gradient of q.

    Where the kernel does not compute delta itself (kKernelComputesDelta: half precision from
    capability 7.5 on), PyTorch multiplies the output with its gradient in fp32.
    """
    grad, query, out = args[0], args[1], args[5]
    n, heads, rows, width = query.shape
    call.scratch([copy_bytes(grad.transpose(1, 2))], "aten::contiguous")
    delta = 4 * n * heads * rows
    if query.element_size() != 2 or call.gpu.capability < (7, 5):
        product = 4 * out.numel()
        cast = 0 if out.dtype is torch.float32 else product
        call.passing([product, cast, cast, delta], func._schema.name)
    blocks = -(-rows // _EFFICIENT_ROWS)
    tile = 4 * _EFFICIENT_ROWS * _up(width, _EFFICIENT_COLUMNS) + _EFFICIENT_LOCK
    call.buffers([delta, n * heads * blocks * tile], func._schema.name)
    return func(*args, **kwargs)
