"""Put CUDA's operator choices in front of autograd, for the length of a trace.

Python kernels are registered on a dispatch key that nothing else uses (AutocastHPU: it sits above
autograd, below the Python API) and the key is switched on in thread-local state. So they see the
operators that C++ composites call as well. On exit the kernels are taken out of the dispatcher
and the thread-local state is as before: outside a trace torch behaves as if batchfit were not
there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from . import autocast as autocast_rules
from . import composites
from .attention import AttentionRules
from .autocast import Autocast

_KEY = "AutocastHPU"


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


def _sdpa(autocast: Autocast, attention: AttentionRules) -> Callable[..., Tensor]:
    def kernel(
        q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, dropout: float = 0.0,
        causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        if autocast.enabled():
            dtype = autocast.dtype()
            q, k, v, mask = (autocast.cast(t, dtype) for t in (q, k, v, mask))
        return attention.run(q, k, v, mask, dropout, causal, scale=scale, enable_gqa=enable_gqa)

    return kernel


def _softmax(autocast: Autocast, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def kernel(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        if dtype is None and autocast.enabled() and x.is_floating_point():
            dtype = torch.float64 if x.dtype is torch.float64 else torch.float32
        return function(x, dim, dtype)

    return kernel


def _finite_checks(on_check: Callable[[Tensor, bool], None]) -> dict[str, Callable[..., Any]]:
    """isnan, isinf, isfinite: a training run whose values stay finite is what is estimated."""

    def watch(op: Any, value: bool) -> Callable[..., Any]:
        def kernel(x: Tensor) -> Any:
            result = op(x)
            on_check(result, value)
            return result

        return kernel

    aten = torch.ops.aten
    return {
        "isnan": watch(aten.isnan.default, False),
        "isinf": watch(aten.isinf.default, False),
        "isfinite": watch(aten.isfinite.default, True),
    }


def _table(
    autocast: Autocast, attention: AttentionRules, on_check: Callable[[Tensor, bool], None]
) -> dict[str, Callable[..., Any]]:
    table = autocast_rules.kernels(autocast)
    table |= composites.kernels(autocast)
    table |= _finite_checks(on_check)
    table["scaled_dot_product_attention"] = _sdpa(autocast, attention)
    table["softmax.int"] = _softmax(autocast, composites.softmax)
    table["log_softmax.int"] = _softmax(autocast, composites.log_softmax)
    return table


@contextmanager
def cuda_rules(
    attention: AttentionRules,
    autocast: Autocast,
    on_finite_check: Callable[[Tensor, bool], None],
) -> Iterator[None]:
    """Within the block, operators of this thread run as CUDA would run them.

    Args:
        attention: the choice of attention kernel for the GPU.
        autocast: the casts and their cache.
        on_finite_check: told of each result of isnan, isinf, isfinite and the value to assume.
    """
    make: Any = torch.library.Library  # not typed in torch
    fallback, library = make("_", "IMPL"), make("aten", "IMPL")
    try:
        fallback.fallback(torch.library.fallthrough_kernel, _KEY)
        for name, kernel in _table(autocast, attention, on_finite_check).items():
            library.impl(name, _without_key(kernel), _KEY)
        include = torch._C._dispatch_tls_local_include_set()
        exclude = torch._C._dispatch_tls_local_exclude_set()
        key_set = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _KEY))
        with torch._C._ForceDispatchKeyGuard(include | key_set, exclude - key_set):
            yield
    finally:
        autocast.clear()
        library._destroy()
        fallback._destroy()
