"""Composite operators that take another path on CUDA than on meta.

Each function runs above autograd, as PyTorch's own composite would, and calls the operators that
the composite calls when its tensors are on a CUDA device. Sources are named per function
(paths under ``aten/src/ATen/native``), read at torch 2.13 and 2.14.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .autocast import Autocast

aten = torch.ops.aten

# CUDNN_BN_MIN_EPSILON of cuDNN 8 and 9 (cudnn.h).
_CUDNN_BN_MIN_EPSILON = 0.0


def dropout(x: Tensor, p: float, train: bool) -> Tensor:
    """Dropout.cpp: CUDA fuses dropout and saves a bool mask; elsewhere the mask is a float."""
    if train and 0 < p < 1 and x.numel() > 0:
        return aten.native_dropout(x, p, train)[0]  # type: ignore[no-any-return]
    return aten.dropout(x, p, train)  # type: ignore[no-any-return]


def batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, var: Tensor | None,
    training: bool, momentum: float, eps: float, cudnn_enabled: bool,
) -> Tensor:  # fmt: skip
    """Normalization.cpp, _select_batch_norm_backend: cuDNN where it may, else the native kernel."""
    if x.numel() == 0:
        return aten.batch_norm(  # type: ignore[no-any-return]
            x, weight, bias, mean, var, training, momentum, eps, cudnn_enabled
        )
    if weight is not None and bias is not None and _cudnn_norm(x, weight, mean, var, training, eps):
        x = x.contiguous(memory_format=torch._prims_common.suggest_memory_format(x))
        return aten.cudnn_batch_norm(  # type: ignore[no-any-return]
            x, weight, bias, mean, var, training, momentum, eps
        )[0]
    return aten.native_batch_norm(  # type: ignore[no-any-return]
        x, weight, bias, mean, var, training, momentum, eps
    )[0]


def _cudnn_norm(
    x: Tensor, weight: Tensor, mean: Tensor | None, var: Tensor | None, training: bool, eps: float
) -> bool:
    if not torch.backends.cudnn.enabled or x.dim() < 3 or eps < _CUDNN_BN_MIN_EPSILON:
        return False
    if torch.bfloat16 in (x.dtype, weight.dtype) or x.dtype is torch.float64:
        return False
    if x.dtype is torch.float16 and weight.dtype is not torch.float32:
        return False
    if (mean is None) != (var is None) or (mean is None and not training):
        return False
    return x.shape[0] <= (880801 if training else 65535)


def softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """SoftMax.cpp: on CUDA fp16 -> fp32 is one kernel; elsewhere the input is converted first."""
    if x.dtype is torch.float16 and dtype is torch.float32:
        return aten._softmax(x, dim, True)  # type: ignore[no-any-return]
    return aten.softmax.int(x, dim, dtype)  # type: ignore[no-any-return]


def log_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """SoftMax.cpp, as :func:`softmax`."""
    if x.dtype is torch.float16 and dtype is torch.float32:
        return aten._log_softmax(x, dim, True)  # type: ignore[no-any-return]
    return aten.log_softmax.int(x, dim, dtype)  # type: ignore[no-any-return]


class _RMSNorm(torch.autograd.Function):
    """The autograd formula of ``_fused_rms_norm`` (derivatives.yaml), which has none on meta."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, shape: list[int], weight: Tensor | None, eps: float | None
    ) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            out, rstd = aten._fused_rms_norm(x, shape, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        ctx.shape = shape
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:
        x, weight, rstd = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[0], weight is not None and ctx.needs_input_grad[2]]
        grads = aten._fused_rms_norm_backward(grad, x, ctx.shape, rstd, weight, wanted)
        return grads[0], None, grads[1], None


def rms_norm(
    x: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """layer_norm.cpp, rms_norm: one kernel, which saves one number per row; elsewhere composite."""
    last = torch._prims_common.suggest_memory_format(x) is not torch.contiguous_format
    if last or (weight is not None and weight.dtype is not x.dtype):
        return aten.rms_norm(x, shape, weight, eps)  # type: ignore[no-any-return]
    return _RMSNorm.apply(x, list(shape), weight, eps)  # type: ignore[no-any-return]


class Recurrent:
    """``lstm``, ``gru`` and ``rnn_*`` through cuDNN (cudnn/RNN.cpp, RNN.cpp)."""

    # cudnnRNNMode_t
    RELU, TANH, LSTM, GRU = 0, 1, 2, 3

    def __init__(self, autocast: Autocast, integers: Callable[[Tensor], list[int]]) -> None:
        self._autocast = autocast
        self._integers = integers

    def _run(
        self, x: Tensor, hx: Tensor, cx: Tensor | None, params: Sequence[Tensor], mode: int,
        has_biases: bool, layers: int, dropout: float, train: bool, bidirectional: bool,
        batch_first: bool, batch_sizes: Sequence[int],
    ) -> tuple[Tensor, ...]:  # fmt: skip
        hidden = cx.shape[2] if cx is not None else hx.shape[2]
        proj = hx.shape[2] if hx.shape[2] != hidden else 0
        per_layer = (4 if has_biases else 2) + (1 if proj else 0)
        if self._autocast.enabled():
            # autocast_mode.cpp, _cudnn_rnn_cast_reflatten: input, states and one flat weight copy.
            dtype = self._autocast.dtype()
            x, hx = self._autocast.cast(x, dtype), self._autocast.cast(hx, dtype)
            cx = self._autocast.cast(cx, dtype)
            params = [p.to(dtype) for p in params]
        out = aten._cudnn_rnn(
            x, list(params), per_layer, None, hx, cx, mode, hidden, proj, layers, batch_first,
            dropout, train, bidirectional, list(batch_sizes), None,
        )  # fmt: skip
        return (out[0], out[1]) if cx is None else (out[0], out[1], out[2])

    def lstm(
        self, x: Tensor, hx: Sequence[Tensor], params: Sequence[Tensor], has_biases: bool,
        layers: int, dropout: float, train: bool, bidirectional: bool, batch_first: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """``aten::lstm.input``: x (N, L, I) or (L, N, I)."""
        return self._run(x, hx[0], hx[1], params, self.LSTM, has_biases, layers, dropout, train,
                         bidirectional, batch_first, ())  # fmt: skip

    def lstm_packed(
        self, x: Tensor, batch_sizes: Tensor, hx: Sequence[Tensor], params: Sequence[Tensor],
        has_biases: bool, layers: int, dropout: float, train: bool, bidirectional: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """``aten::lstm.data``: a packed sequence."""
        return self._run(x, hx[0], hx[1], params, self.LSTM, has_biases, layers, dropout, train,
                         bidirectional, False, self._integers(batch_sizes))  # fmt: skip

    def single(self, mode: int) -> Callable[..., tuple[Tensor, ...]]:
        """``aten::gru.input``, ``rnn_tanh.input``, ``rnn_relu.input``."""

        def run(
            x: Tensor, hx: Tensor, params: Sequence[Tensor], has_biases: bool, layers: int,
            dropout: float, train: bool, bidirectional: bool, batch_first: bool,
        ) -> tuple[Tensor, ...]:  # fmt: skip
            return self._run(x, hx, None, params, mode, has_biases, layers, dropout, train,
                             bidirectional, batch_first, ())  # fmt: skip

        return run

    def single_packed(self, mode: int) -> Callable[..., tuple[Tensor, ...]]:
        """``aten::gru.data`` and its kin."""

        def run(
            x: Tensor, batch_sizes: Tensor, hx: Tensor, params: Sequence[Tensor], has_biases: bool,
            layers: int, dropout: float, train: bool, bidirectional: bool,
        ) -> tuple[Tensor, ...]:  # fmt: skip
            return self._run(x, hx, None, params, mode, has_biases, layers, dropout, train,
                             bidirectional, False, self._integers(batch_sizes))  # fmt: skip

        return run


def kernels(
    autocast: Autocast, integers: Callable[[Tensor], list[int]]
) -> dict[str, Callable[..., Any]]:
    """Operator name -> the function that runs in its place.

    Args:
        autocast: the casts.
        integers: reads the values of a host tensor.
    """
    rnn = Recurrent(autocast, integers)
    table: dict[str, Callable[..., Any]] = {
        "dropout": dropout,
        "batch_norm": batch_norm,
        "lstm.input": rnn.lstm,
        "lstm.data": rnn.lstm_packed,
    }
    for name, mode in (("gru", rnn.GRU), ("rnn_tanh", rnn.TANH), ("rnn_relu", rnn.RELU)):
        table[f"{name}.input"] = rnn.single(mode)
        table[f"{name}.data"] = rnn.single_packed(mode)
    return table
