"""The switches of torch that a step may turn, and how to turn them back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["saved_flags"]

Undo = Callable[[], Any]


def saved_flags() -> list[Undo]:
    """How to put back the flags of cuDNN and matrix multiplication, autocast, grad mode, dtype."""
    cudnn: Any = torch.backends.cudnn
    matmul = torch.backends.cuda.matmul
    undo: list[Undo] = [
        _attribute(cudnn, "enabled"),
        _attribute(cudnn, "benchmark"),
        _attribute(cudnn, "deterministic"),
        functools.partial(
            torch.use_deterministic_algorithms,
            torch.are_deterministic_algorithms_enabled(),
            warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        functools.partial(torch.set_default_dtype, torch.get_default_dtype()),
        functools.partial(torch.set_grad_enabled, torch.is_grad_enabled()),
        functools.partial(
            torch.autograd.set_detect_anomaly,
            torch.is_anomaly_enabled(),
            torch.is_anomaly_check_nan_enabled(),
        ),
        functools.partial(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled()),
    ]
    undo += [
        _Precision((cudnn.conv, cudnn.rnn), _cudnn_tf32, _set_cudnn_tf32),
        _Precision(
            (matmul,), torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
        ),
    ]
    for name in (
        "allow_fp16_reduced_precision_reduction",
        "allow_bf16_reduced_precision_reduction",
    ):
        undo.append(_attribute(matmul, name))
    for name in ("flash", "mem_efficient", "math", "cudnn"):
        enabled = getattr(torch.backends.cuda, f"{name}_sdp_enabled")()
        undo.append(functools.partial(getattr(torch.backends.cuda, f"enable_{name}_sdp"), enabled))
    for device in ("cpu", "cuda"):
        undo.append(
            functools.partial(torch.set_autocast_enabled, device, torch.is_autocast_enabled(device))
        )
        undo.append(
            functools.partial(torch.set_autocast_dtype, device, torch.get_autocast_dtype(device))
        )
    return undo


def _attribute(owner: object, name: str) -> Undo:
    return functools.partial(setattr, owner, name, getattr(owner, name))


def _cudnn_tf32() -> bool:
    return bool(torch.backends.cudnn.allow_tf32)


def _set_cudnn_tf32(value: bool) -> None:
    torch.backends.cudnn.allow_tf32 = value


class _Precision:
    """The fp32 precision of one library: a newer switch for each operator, an older for all.

    torch refuses to read the older one once the newer ones disagree with it, so what was set with
    either is put back with the same one.
    """

    def __init__(
        self, operators: tuple[Any, ...], read: Callable[[], Any], write: Callable[[Any], None]
    ) -> None:
        self._operators, self._read, self._write = operators, read, write
        self._newer, self._older = self._read_newer(), self._read_older()

    def __call__(self) -> None:
        if (self._read_newer(), self._read_older()) == (self._newer, self._older):
            return
        if self._older is not None:
            self._write(self._older)
        for operator, value in zip(self._operators, self._newer, strict=True):
            if operator.fp32_precision != value:
                operator.fp32_precision = value

    def _read_newer(self) -> list[str]:
        return [operator.fp32_precision for operator in self._operators]

    def _read_older(self) -> Any:
        try:
            return self._read()
        except RuntimeError:
            return None
