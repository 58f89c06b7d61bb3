"""Matrix products, reductions, losses and optimizers: what their CUDA kernels allocate.

Sources: files under ``aten/src/ATen/native`` and ``native/cuda``, named per kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .calls import CallContext, Kernel, empty, kernel, nbytes
from .workspaces import accumulator_bytes

aten = torch.ops.aten


@kernel(aten._grouped_mm.default)
def _grouped_mm(call: CallContext, func: Any, args: Any, kwargs: Any) -> Any:
    """GroupedBlas.cpp: the meta kernel takes bf16 only, CUDA falls back for other dtypes.

    Rows of the output are aligned to 16 bytes (create_grouped_gemm_output_tensor).
    """
    a, b = args[0], args[1]
    offsets = args[2] if len(args) > 2 else kwargs.get("offs")
    dtype = kwargs.get("out_dtype") or a.dtype
    if a.dim() == 2 and b.dim() == 2:
        shape = [offsets.shape[0], a.shape[0], b.shape[1]]
    elif a.dim() == 2 or b.dim() == 2:
        shape = [a.shape[-2], b.shape[-1]]
    else:
        shape = [a.shape[0], a.shape[1], b.shape[-1]]
    alignment = 16 // dtype.itemsize
    row = -(-shape[-1] // alignment) * alignment
    strides = [shape[-2] * row, row, 1][-len(shape) :]
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


def _reduces(accumulator: int | None = None, dims_at: int | None = 1) -> Kernel:
    """A reduction: the meta kernel's outputs, and the buffers of gpu_reduce_kernel."""

    def run(call: CallContext, func: Any, args: Any, kwargs: Any) -> Any:
        dims = None
        if dims_at is not None:
            dims = args[dims_at] if len(args) > dims_at else kwargs.get("dim")
        size = accumulator or accumulator_bytes(kwargs.get("dtype") or args[0].dtype)
        call.reduction(args[0], dims, size, func._schema.name)
        return func(*args, **kwargs)

    return run


# Accumulators (arg_t of the functors in ReduceOps, ReduceMomentKernel.cu and others): value and
# index for arg reductions; WelfordData<float, int32> for variances.
kernel(aten.sum.default, aten.mean.default, aten.prod.default)(_reduces(dims_at=None))
kernel(aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default)(_reduces())
kernel(aten.prod.dim_int)(_reduces())
kernel(aten.any.default, aten.all.default, aten.max.default, aten.min.default)(
    _reduces(dims_at=None)
)
kernel(aten.any.dim, aten.all.dim)(_reduces())
kernel(aten.max.dim, aten.min.dim, aten.argmax.default, aten.argmin.default)(_reduces(16))
kernel(aten.linalg_vector_norm.default)(_reduces(dims_at=2))
kernel(aten.var.correction, aten.std.correction, aten.var_mean.correction)(_reduces(16))


def _clone_bytes(matrix: Tensor, rows: int, columns: int) -> int:
    """Bytes of the copy that cuBLAS needs of a matrix without a unit stride (an expanded gradient).

    prepare_matrix_for_cublas and prepare_batch_matrix_for_cublas (Blas.cpp): no copy where one of
    the two dimensions has stride 1 and the other strides over all of it.
    """
    (m, n), (s, t) = (matrix.shape[rows], matrix.shape[columns]), (
        matrix.stride(rows), matrix.stride(columns),
    )  # fmt: skip
    if (s == 1 and t >= max(1, m)) or (t == 1 and s >= max(1, n)):
        return 0
    return 0 if matrix.is_contiguous() else nbytes(matrix)


def _gemm(first: int) -> Kernel:
    def run(call: CallContext, func: Any, args: Any, kwargs: Any) -> Any:
        operands = args[first], args[first + 1]
        if operands[0].dtype is not operands[1].dtype:  # meta kernels do not look
            raise RuntimeError(
                f"expected both matrices to have the same dtype, found {operands[0].dtype} and "
                f"{operands[1].dtype}"
            )
        copies = [_clone_bytes(m, m.dim() - 2, m.dim() - 1) for m in operands]
        call.scratch(copies, "aten::clone")
        return func(*args, **kwargs)

    return run


kernel(aten.mm.default, aten.bmm.default)(_gemm(0))
kernel(aten.addmm.default, aten.baddbmm.default)(_gemm(1))


def _in_place(call: CallContext, func: Any, args: Any, kwargs: Any) -> None:
    """A fused optimizer without a meta kernel: everything in place, nothing allocated."""


kernel(aten._fused_sgd_.default, aten._fused_sgd_.tensor_lr)(_in_place)
kernel(aten._fused_adagrad_.default, aten._fused_adagrad_.tensor_lr)(_in_place)


@kernel(aten._ctc_loss.default, aten._ctc_loss.Tensor)
def _ctc_loss(call: CallContext, func: Any, args: Any, kwargs: Any) -> Any:
    """LossCTC.cu, ctc_loss_gpu_template: a loss per sample, log_alpha for every step and symbol."""
    log_probs, _, input_lengths, target_lengths = args[:4]
    steps, symbols = (
        max(call.host.integers(v) if isinstance(v, Tensor) else v)
        for v in (input_lengths, target_lengths)
    )
    samples = log_probs.shape[1]
    return (
        torch.empty(samples, dtype=log_probs.dtype, device="meta"),
        torch.empty([samples, steps, 2 * symbols + 1], dtype=log_probs.dtype, device="meta"),
    )


@kernel(aten._ctc_loss_backward.default, aten._ctc_loss_backward.Tensor)
def _ctc_loss_backward(call: CallContext, func: Any, args: Any, kwargs: Any) -> Any:
    """LossCTC.cu, ctc_loss_backward_gpu_template: log_beta like log_alpha, then the gradient."""
    log_probs, log_alpha = args[1], args[6]
    call.scratch([nbytes(log_alpha)], "aten::_ctc_loss_backward")
    return empty(log_probs.shape, log_probs, torch.contiguous_format)


def _loss_with_scratch(copies: int) -> Kernel:
    """Losses that compute every element before they reduce (Loss.cpp): so many hidden copies."""

    def run(call: CallContext, func: Any, args: Any, kwargs: Any) -> Any:
        reduction = args[2] if len(args) > 2 else kwargs.get("reduction", 1)
        if func._schema.name.endswith("with_logits"):
            reduction = args[4] if len(args) > 4 else kwargs.get("reduction", 1)
        if reduction:
            call.scratch([nbytes(args[0])] * copies, func._schema.name)
        return func(*args, **kwargs)

    return run


kernel(aten.mse_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default)(
    _loss_with_scratch(1)
)
kernel(aten.binary_cross_entropy_with_logits.default)(_loss_with_scratch(2))


@kernel(aten.logsumexp.default)
def _logsumexp(call: CallContext, func: Any, args: Any, kwargs: Any) -> Any:
    """ReduceOps.cpp, logsumexp_out_impl: exp(self - max) has the size of the input."""
    call.scratch([nbytes(args[0])], "aten::logsumexp")
    return func(*args, **kwargs)


@kernel(aten._pack_padded_sequence.default)
def _pack_padded_sequence(call: CallContext, func: Any, args: Any, kwargs: Any) -> Any:
    """PackedSequence.cpp: the valid steps, concatenated, and the batch size of each step."""
    x, lengths = args[:2]
    counts = call.host.integers(lengths)
    if sorted(counts, reverse=True) != counts or min(counts) < 1:
        raise RuntimeError("lengths of a packed sequence must be positive and in decreasing order")
    sizes = [sum(count > step for count in counts) for step in range(counts[0])]
    rest = x.shape[2:]
    data = torch.empty([sum(sizes), *rest], dtype=x.dtype, device="meta")
    return data, call.host.from_integers(sizes)
