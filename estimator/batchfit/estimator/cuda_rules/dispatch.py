"""Put CUDA's operator choices in front of autograd, for the length of a trace.

Python kernels are registered on a dispatch key that nothing else uses (AutocastHPU: it sits above
autograd, below the Python API) and the key is switched on in thread-local state. So they see the
operators that C++ composites call as well. On exit the kernels are taken out of the dispatcher
and the thread-local state is as before: outside a trace torch behaves as if batchfit were not
there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from batchfit.estimator.errors import TraceError

from . import autocast as autocast_rules
from . import composites
from .attention import AttentionRules
from .autocast import Autocast
from .packed import HostValues, packed_kernels

_KEY = "AutocastHPU"

# Seconds to wait for the trace of another thread.
_WAIT = 600


def _without_key(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Run a kernel with the key off (no recursion) and the Python function modes off.

    Function modes are off already when user code called the operator, but not when the autograd
    engine or C++ did; the rules must see plain meta tensors in both cases.
    """
    key_set = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _KEY))

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(key_set), torch._C.DisableTorchFunction():
            return kernel(*args, **kwargs)

    return run


class _Active:
    """The rules of the running trace.

    torch keeps registered functions alive for good, so they must not hold a trace: they look here,
    and the place is emptied when the trace ends. One trace runs at a time (see :func:`cuda_rules`).
    """

    thread: int | None = None
    attention: AttentionRules | None = None
    host: HostValues | None = None


_ACTIVE = _Active()
_AUTOCAST = Autocast()
_LOCK = threading.Lock()


def _host() -> HostValues:
    assert _ACTIVE.host is not None
    return _ACTIVE.host


def _sdpa(autocast: Autocast) -> Callable[..., Tensor]:
    def kernel(
        q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, dropout: float = 0.0,
        causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        if autocast.enabled():
            dtype = autocast.dtype()
            q, k, v, mask = (autocast.cast(t, dtype) for t in (q, k, v, mask))
        assert _ACTIVE.attention is not None
        return _ACTIVE.attention.run(
            q, k, v, mask, dropout, causal, scale=scale, enable_gqa=enable_gqa
        )

    return kernel


def _softmax(autocast: Autocast, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def kernel(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        if dtype is None and autocast.enabled() and x.is_floating_point():
            dtype = torch.float64 if x.dtype is torch.float64 else torch.float32
        return function(x, dim, dtype)

    return kernel


def _rms_norm(autocast: Autocast) -> Callable[..., Tensor]:
    """Autocast runs it in fp32 (autocast_mode.h, AT_FORALL_FP32)."""

    def kernel(
        x: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None
    ) -> Tensor:
        if autocast.enabled():
            x = autocast.cast(x, torch.float32)
            weight = autocast.cast(weight, torch.float32)
        return composites.rms_norm(x, shape, weight, eps)

    return kernel


def _finite_checks() -> dict[str, Callable[..., Any]]:
    """isnan, isinf, isfinite: a training run whose values stay finite is what is estimated."""

    def watch(op: Any, value: bool) -> Callable[..., Any]:
        def kernel(x: Tensor) -> Any:
            result = op(x)
            _host().assume(result, value)
            return result

        return kernel

    aten = torch.ops.aten
    return {
        "isnan": watch(aten.isnan.default, False),
        "isinf": watch(aten.isinf.default, False),
        "isfinite": watch(aten.isfinite.default, True),
    }


def _refuse_bce(*args: Any, **kwargs: Any) -> Any:
    """autocast_mode.cpp, binary_cross_entropy_banned."""
    if _AUTOCAST.enabled():
        raise RuntimeError(
            "binary_cross_entropy is unsafe to autocast; use binary_cross_entropy_with_logits"
        )
    return torch.ops.aten.binary_cross_entropy.default(*args, **kwargs)


@cache
def _table() -> dict[str, Callable[..., Any]]:
    """Operator name -> kernel; the same functions serve every trace."""
    table = autocast_rules.kernels(_AUTOCAST)
    table |= composites.kernels(_AUTOCAST, lambda tensor: _host().integers(tensor))
    table |= packed_kernels(_host)
    table |= _finite_checks()
    table["binary_cross_entropy"] = _refuse_bce
    table["scaled_dot_product_attention"] = _sdpa(_AUTOCAST)
    table["softmax.int"] = _softmax(_AUTOCAST, composites.softmax)
    table["rms_norm"] = _rms_norm(_AUTOCAST)
    table["log_softmax.int"] = _softmax(_AUTOCAST, composites.log_softmax)
    return {name: _without_key(kernel) for name, kernel in table.items()}


@contextmanager
def cuda_rules(
    attention: AttentionRules,
    on_cached_cast: Callable[[Tensor], None],
    host: HostValues,
) -> Iterator[Autocast]:
    """Within the block, operators of this thread run as CUDA would run them.

    Args:
        attention: the choice of attention kernel for the GPU.
        on_cached_cast: told of each weight copy that enters autocast's cache.
        host: reads lengths, and is told what to assume of isnan, isinf, isfinite.

    Yields:
        the casts and their cache.

    Raises:
        TraceError: another trace is running; a dispatcher has one table for all threads.
    """
    nested = _ACTIVE.thread == threading.get_ident()
    if nested or not _LOCK.acquire(timeout=_WAIT):
        raise TraceError(
            "another trace is running in this thread, or has run in another thread for more than "
            f"{_WAIT} s; traces run one at a time, so make estimates one after the other"
        )
    make: Any = torch.library.Library  # not typed in torch
    fallback, library = make("_", "IMPL"), make("aten", "IMPL")
    try:
        _ACTIVE.thread = threading.get_ident()
        _ACTIVE.attention, _ACTIVE.host = attention, host
        _AUTOCAST.on_cached_cast = on_cached_cast
        fallback.fallback(torch.library.fallthrough_kernel, _KEY)
        for name, kernel in _table().items():
            library.impl(name, kernel, _KEY)
        include = torch._C._dispatch_tls_local_include_set()
        exclude = torch._C._dispatch_tls_local_exclude_set()
        key_set = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _KEY))
        with torch._C._ForceDispatchKeyGuard(include | key_set, exclude - key_set):
            yield _AUTOCAST
    finally:
        _AUTOCAST.clear()
        _AUTOCAST.on_cached_cast = None
        _ACTIVE.attention = _ACTIVE.host = _ACTIVE.thread = None
        library._destroy()
        fallback._destroy()
        _LOCK.release()
