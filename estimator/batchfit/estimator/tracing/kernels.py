"""Kernels whose allocations on CUDA differ from those of the meta kernel, and the cuBLAS workspace.

Each kernel here returns the outputs (empty meta tensors with CUDA's memory format) and tells the
call context of buffers that live only while it runs. Sources: files under
``aten/src/ATen/native/cudnn`` and ``native/cuda``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from batchfit.estimator.errors import WorkloadError
from batchfit.estimator.gpus import GPU
from batchfit.estimator.units import KIB

from .workspaces import (
    ReductionRule,
    SizeRule,
    accumulator_bytes,
    reduced_dimensions,
    reduction_numbers,
)

if TYPE_CHECKING:
    from batchfit.estimator.cuda_rules.packed import HostValues

    from .ledger import Ledger

aten = torch.ops.aten
Kernel = Callable[["CallContext", Any, tuple[Any, ...], dict[str, Any]], Any]
KERNELS: dict[Any, Kernel] = {}

# cuBLAS workspace (CUDABlas / CublasHandlePool.cpp, parseChosenWorkspaceSize): the default
# :4096:2:16:8 and, on Hopper and later, :4096:8. Confirmed as 8,519,680 and 33,554,432 bytes on
# public allocator traces (tests/data/oracle/README.md, item 1).
_WORKSPACE_DEFAULT = ":4096:2:16:8"
_WORKSPACE_HOPPER = ":4096:8"

_CUBLAS = {
    "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::mv", "aten::addmv",
    "aten::dot", "aten::vdot", "aten::addbmm", "aten::addmm_", "aten::baddbmm_",
    "aten::_addmm_activation", "aten::linalg_solve_triangular", "aten::triangular_solve",
    "aten::_int_mm", "aten::_scaled_mm", "aten::_grouped_mm", "aten::linear",
}  # fmt: skip


def uses_cublas(func: Any) -> bool:
    """Whether the operator takes a cuBLAS handle (and thereby its workspace)."""
    return func._schema.name in _CUBLAS


def cublas_workspace_bytes(capability: tuple[int, int], config: str | None = None) -> int:
    """Bytes of one cuBLAS workspace.

    Args:
        capability: of the GPU; (9, 0) and later have the larger default.
        config: ``CUBLAS_WORKSPACE_CONFIG``, a list of ``:KIB:COUNT``; None takes the environment.

    Raises:
        WorkloadError: the setting cannot be read.

    >>> cublas_workspace_bytes((8, 0), ""), cublas_workspace_bytes((9, 0), "")
    (8519680, 33554432)
    """
    if config is None:
        config = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")
    config = config or (_WORKSPACE_HOPPER if capability >= (9, 0) else _WORKSPACE_DEFAULT)
    numbers = [n for n in config.split(":") if n]
    if len(numbers) % 2 or not all(n.isdigit() for n in numbers):
        raise WorkloadError(
            f"CUBLAS_WORKSPACE_CONFIG is {config!r}; it must be pairs of KiB and count, as :4096:8"
        )
    pairs = zip(numbers[::2], numbers[1::2], strict=True)
    return sum(int(size) * KIB * int(count) for size, count in pairs)


class CallContext:
    """What kernels may ask and tell: scratch buffers, the workspaces of libraries.

    Args:
        gpu: decides what kernels allocate.
        workspaces: record what libraries allocate for themselves.
    """

    def __init__(self, gpu: GPU, *, workspaces: bool = True) -> None:
        self.gpu = gpu
        self.workspaces = workspaces
        self._ledger: Ledger | None = None
        self._cublas_threads: set[bool] = set()
        self._pending: list[int] = []
        self._queued: list[tuple[SizeRule, tuple[int, ...], str]] = []

    def attach(self, ledger: Ledger, host: HostValues) -> None:
        """The ledger that is told, and who reads host tensors."""
        self._ledger = ledger
        self.host = host
        self._cublas_threads.clear()

    def scratch(self, sizes: Sequence[int], operator: str) -> None:
        """Buffers that live until the running operator has returned its outputs."""
        assert self._ledger is not None
        self._pending += [self._ledger.transient(size, operator) for size in sizes if size]

    def reduction(self, tensor: Tensor, dims: Any, accumulator: int, operator: str) -> None:
        """The running operator reduces a tensor: its kernel may stage partial results."""
        if not self.workspaces or not tensor.numel():
            return
        reduced = reduced_dimensions(tensor, dims)
        numbers = reduction_numbers(tensor)
        for semaphores in (False, True):
            rule = ReductionRule(
                reduced, tensor.element_size(), accumulator, self.gpu.sm_count,
                self.gpu.threads_per_sm, semaphores,
            )  # fmt: skip
            self._queued.append((rule, numbers, operator))

    def finish(self) -> None:
        """The running operator has its outputs: what it allocates after them comes and goes."""
        assert self._ledger is not None
        for rule, numbers, operator in self._queued:
            self._pending.append(self._ledger.transient_by_rule(rule, numbers, operator))
        self._queued.clear()
        while self._pending:
            self._ledger.release(self._pending.pop())

    def gemm(self) -> None:
        """A matrix product runs: the first one on each thread allocates a cuBLAS workspace.

        The autograd engine runs CUDA nodes on a thread of its own, so training has two.
        """
        from .ledger import Category, Phase

        if not self.workspaces:
            return
        assert self._ledger is not None
        engine_thread = self._ledger.phase is Phase.BACKWARD
        if engine_thread not in self._cublas_threads:
            self._cublas_threads.add(engine_thread)
            size = cublas_workspace_bytes(self.gpu.capability)
            self._ledger.transient(size, "cublasCreate", Category.WORKSPACE)


def _kernel(*overloads: Any) -> Callable[[Kernel], Kernel]:
    def register(kernel: Kernel) -> Kernel:
        for overload in overloads:
            if overload in KERNELS:
                raise ValueError(f"{overload} has a kernel already")
            KERNELS[overload] = kernel
        return kernel

    return register


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _empty(shape: Sequence[int], like: Tensor, memory_format: torch.memory_format) -> Tensor:
    return torch.empty(shape, dtype=like.dtype, device="meta", memory_format=memory_format)


def _conv_format(x: Tensor, weight: Tensor) -> torch.memory_format:
    """cudnn_conv_suggest_memory_format (ConvUtils.h): channels_last if input or weight is."""
    if x.dtype is torch.float64 or x.dim() not in (4, 5):
        return torch.contiguous_format
    last = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
    if last in (suggest_memory_format(x), suggest_memory_format(weight)):
        return last
    return torch.contiguous_format


def _copy_bytes(tensor: Tensor, memory_format: torch.memory_format) -> int:
    """Bytes of ``tensor.contiguous(memory_format)``: 0 where it is so already."""
    return 0 if tensor.is_contiguous(memory_format=memory_format) else _nbytes(tensor)


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


@_kernel(aten.convolution.default)
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
    call.scratch([_copy_bytes(x, layout), _copy_bytes(weight, layout)], "aten::contiguous")
    return _empty(shape, x, layout)


@_kernel(aten.convolution_backward.default)
def _convolution_backward(call: CallContext, func: Any, args: Any, kwargs: Any) -> Any:
    """Convolution.cpp, convolution_backward: input, weight, then bias gradient."""
    grad, x, weight, bias_sizes, *_, mask = args
    layout = _conv_format(x, weight)
    copies = [_copy_bytes(grad, layout), _copy_bytes(x, layout), _copy_bytes(weight, layout)]
    call.scratch(copies, "aten::contiguous")
    if mask[2]:
        dims = [d for d in range(grad.dim()) if d != 1]
        call.reduction(grad, dims, accumulator_bytes(grad.dtype), "aten::sum")
    return (
        _empty(x.shape, grad, layout) if mask[0] else None,
        _empty(weight.shape, grad, layout) if mask[1] else None,
        torch.empty(bias_sizes, dtype=grad.dtype, device="meta") if mask[2] else None,
    )


@_kernel(aten.cudnn_batch_norm.default)
def _cudnn_batch_norm(call: CallContext, func: Any, args: Any, kwargs: Any) -> Any:
    """cudnn/BatchNorm.cpp: output, saved mean and inverse deviation, an empty reserve space."""
    x, weight, training = args[0], args[1], args[5]
    channels = x.shape[1] if training else 0
    return (
        _empty(x.shape, x, suggest_memory_format(x)),
        torch.empty(channels, dtype=weight.dtype, device="meta"),
        torch.empty(channels, dtype=weight.dtype, device="meta"),
        torch.empty(0, dtype=torch.uint8, device="meta"),
    )


@_kernel(aten.cudnn_batch_norm_backward.default)
def _cudnn_batch_norm_backward(call: CallContext, func: Any, args: Any, kwargs: Any) -> Any:
    """cudnn/BatchNorm.cpp: the gradient is made contiguous in the input's format."""
    x, grad, weight = args[0], args[1], args[2]
    layout = suggest_memory_format(x)
    call.scratch([_copy_bytes(grad, layout)], "aten::contiguous")
    return (
        _empty(x.shape, x, layout),
        torch.empty(weight.shape, dtype=weight.dtype, device="meta"),
        torch.empty(weight.shape, dtype=weight.dtype, device="meta"),
    )


@_kernel(aten._cudnn_rnn.default)
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
        samples = x.shape[0] if sizes else steps * batch
        reserve = rnn_reserve_bytes(mode, layers, directions, samples, hidden, x.element_size())
    return (
        torch.empty(out_shape, dtype=x.dtype, device="meta"),
        torch.empty([layers * directions, batch, proj or hidden], dtype=x.dtype, device="meta"),
        torch.empty(cell if cx is not None else 0, dtype=x.dtype, device="meta"),
        torch.empty(reserve, dtype=torch.uint8, device="meta"),
        torch.empty(0, dtype=x.dtype, device="meta"),
    )


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


@_kernel(aten._cudnn_rnn_backward.default)
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


@_kernel(aten._grouped_mm.default)
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

    def kernel(call: CallContext, func: Any, args: Any, kwargs: Any) -> Any:
        dims = None
        if dims_at is not None:
            dims = args[dims_at] if len(args) > dims_at else kwargs.get("dim")
        size = accumulator or accumulator_bytes(kwargs.get("dtype") or args[0].dtype)
        call.reduction(args[0], dims, size, func._schema.name)
        return func(*args, **kwargs)

    return kernel


# Accumulators (arg_t of the functors in ReduceOps, ReduceMomentKernel.cu and others): value and
# index for arg reductions; WelfordData<float, int32> for variances.
_kernel(aten.sum.default, aten.mean.default, aten.prod.default)(_reduces(dims_at=None))
_kernel(aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default)(_reduces())
_kernel(aten.prod.dim_int)(_reduces())
_kernel(aten.any.default, aten.all.default, aten.max.default, aten.min.default)(
    _reduces(dims_at=None)
)
_kernel(aten.any.dim, aten.all.dim)(_reduces())
_kernel(aten.max.dim, aten.min.dim, aten.argmax.default, aten.argmin.default)(_reduces(16))
_kernel(aten.linalg_vector_norm.default)(_reduces(dims_at=2))
_kernel(aten.var.correction, aten.std.correction, aten.var_mean.correction)(_reduces(16))


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
    return 0 if matrix.is_contiguous() else _nbytes(matrix)


def _gemm(first: int) -> Kernel:
    def kernel(call: CallContext, func: Any, args: Any, kwargs: Any) -> Any:
        operands = args[first], args[first + 1]
        if operands[0].dtype is not operands[1].dtype:  # meta kernels do not look
            raise RuntimeError(
                f"expected both matrices to have the same dtype, found {operands[0].dtype} and "
                f"{operands[1].dtype}"
            )
        copies = [_clone_bytes(m, m.dim() - 2, m.dim() - 1) for m in operands]
        call.scratch(copies, "aten::clone")
        return func(*args, **kwargs)

    return kernel


_kernel(aten.mm.default, aten.bmm.default)(_gemm(0))
_kernel(aten.addmm.default, aten.baddbmm.default)(_gemm(1))


def _in_place(call: CallContext, func: Any, args: Any, kwargs: Any) -> None:
    """A fused optimizer without a meta kernel: everything in place, nothing allocated."""


_kernel(aten._fused_sgd_.default, aten._fused_sgd_.tensor_lr)(_in_place)
_kernel(aten._fused_adagrad_.default, aten._fused_adagrad_.tensor_lr)(_in_place)


@_kernel(aten._ctc_loss_backward.default, aten._ctc_loss_backward.Tensor)
def _ctc_loss_backward(call: CallContext, func: Any, args: Any, kwargs: Any) -> Any:
    """LossCTC.cu, ctc_loss_backward_gpu_template: log_beta like log_alpha, then the gradient."""
    log_probs, log_alpha = args[1], args[6]
    call.scratch([_nbytes(log_alpha)], "aten::_ctc_loss_backward")
    return _empty(log_probs.shape, log_probs, torch.contiguous_format)


def _loss_with_scratch(copies: int) -> Kernel:
    """Losses that compute every element before they reduce (Loss.cpp, BinaryOps): hidden copies."""

    def kernel(call: CallContext, func: Any, args: Any, kwargs: Any) -> Any:
        reduction = args[2] if len(args) > 2 else kwargs.get("reduction", 1)
        if func._schema.name.endswith("with_logits"):
            reduction = args[4] if len(args) > 4 else kwargs.get("reduction", 1)
        if reduction:
            call.scratch([_nbytes(args[0])] * copies, func._schema.name)
        return func(*args, **kwargs)

    return kernel


_kernel(aten.mse_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default)(
    _loss_with_scratch(1)
)
_kernel(aten.binary_cross_entropy_with_logits.default)(_loss_with_scratch(3))


@_kernel(aten.logsumexp.default)
def _logsumexp(call: CallContext, func: Any, args: Any, kwargs: Any) -> Any:
    """ReduceOps.cpp, logsumexp_out_impl: exp(self - max) has the size of the input."""
    call.scratch([_nbytes(args[0])], "aten::logsumexp")
    return func(*args, **kwargs)


@_kernel(aten._pack_padded_sequence.default)
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
