"""What ``torch.autocast("cuda")`` does to operators, replayed on meta tensors.

The real AutocastCUDA kernels cast only tensors that live on a CUDA device, so on meta tensors they
do nothing. The same policies are applied here instead. The lists are those of
``ATen/autocast_mode.h`` (macros AT_FORALL_LOWER_PRECISION_FP, AT_FORALL_FP32,
AT_FORALL_FP32_SET_OPT_DTYPE, AT_FORALL_PROMOTE) and ``autocast_mode.cpp``; a test compares them
with the header that the installed torch ships and with the dispatcher's own registrations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Cast every eligible argument to the autocast dtype.
LOWER_PRECISION = """
_convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d
conv_transpose2d.input conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv
linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell
_thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
_scaled_dot_product_flash_attention scaled_dot_product_attention
cudnn_convolution cudnn_convolution_transpose
""".split()

# Cast every eligible argument to fp32.
FP32 = """
acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar
pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm
frobenius_norm.dim nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss
cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss
huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss
triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm
logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d
_upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d
upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d
_upsample_bicubic2d_aa linalg_matrix_sqrth
""".split()

# Leave the arguments alone and ask the kernel for an fp32 result (no copy of the input is made).
FP32_SET_OPT_DTYPE = """
prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
linalg_matrix_norm.str_ord sum sum.dim_IntList
""".split()

# norm has a dtype argument only in another overload: AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE.
FP32_APPEND_DTYPE = ["norm.Scalar", "norm.ScalarOpt_dim"]

# Cast to the widest floating dtype among the arguments.
PROMOTE = """
addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add
""".split()

# Registered for AutocastCUDA, but not by one of the policies above: an error, and the RNN that
# casts its flattened weights (see cuda_rules.recurrent).
OTHER = ["binary_cross_entropy", "_cudnn_rnn"]


def overload(name: str) -> Any:
    """The operator overload ``aten::name``, or None where this torch has none of that name."""
    base, _, variant = name.partition(".")
    packet = getattr(torch.ops.aten, base, None)
    return getattr(packet, variant or "default", None) if packet is not None else None


class Autocast:
    """Casting by autocast's policies, with its cache of weight casts.

    Attributes:
        on_cached_cast: called with each copy of a weight that enters the cache.

    The cache holds the lower-precision copies of fp32 leaf parameters until the outermost autocast
    context ends (``clear_autocast_cache``), as ``cached_cast`` in autocast_mode.cpp does.
    """

    def __init__(self) -> None:
        self._cache: dict[int, tuple[Tensor, Tensor]] = {}
        self.on_cached_cast: Callable[[Tensor], None] | None = None

    @staticmethod
    def enabled() -> bool:
        """Whether user code is inside ``torch.autocast("cuda")``."""
        return torch.is_autocast_enabled("cuda")

    @staticmethod
    def dtype() -> torch.dtype:
        """The lower-precision dtype of the active context."""
        return torch.get_autocast_dtype("cuda")

    def clear(self) -> None:
        """Drop the cached weight casts."""
        self._cache.clear()

    def cast(self, value: Any, dtype: torch.dtype) -> Any:
        """``cached_cast``: cast eligible tensors, look into lists, leave the rest alone."""
        if isinstance(value, Tensor):
            return self._cast_tensor(value, dtype)
        if isinstance(value, (list, tuple)):
            return type(value)(self.cast(item, dtype) for item in value)
        return value

    def _cast_tensor(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        if not _eligible(tensor) or tensor.dtype is dtype:
            return tensor
        cacheable = (
            dtype is self.dtype()
            and tensor.dtype is torch.float32
            and tensor.requires_grad
            and tensor.is_leaf
            and not tensor._is_view()
            and torch.is_autocast_cache_enabled()
        )
        if not cacheable:
            return tensor.to(dtype)
        found = self._cache.get(id(tensor))
        if found is None:
            found = self._cache[id(tensor)] = (tensor, tensor.to(dtype))
            if self.on_cached_cast is not None:
                self.on_cached_cast(found[1])
        return found[1]


def _eligible(value: Any) -> bool:
    return (
        isinstance(value, Tensor) and value.is_floating_point() and value.dtype is not torch.float64
    )


def _tensors(values: Any) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found.extend(_tensors(value))
    return found


def lower_precision(autocast: Autocast, op: Any) -> Callable[..., Any]:
    """Policy ``lower_precision_fp``."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if autocast.enabled():
            dtype = autocast.dtype()
            args = tuple(autocast.cast(arg, dtype) for arg in args)
        return op(*args, **kwargs)

    return kernel


def fp32(autocast: Autocast, op: Any) -> Callable[..., Any]:
    """Policy ``fp32``."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if autocast.enabled():
            args = tuple(autocast.cast(arg, torch.float32) for arg in args)
        return op(*args, **kwargs)

    return kernel


def promote(autocast: Autocast, op: Any) -> Callable[..., Any]:
    """Policy ``promote``: fp32 as soon as one argument is fp32."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if autocast.enabled():
            floats = [t for t in _tensors(args) if _eligible(t)]
            if any(t.dtype is torch.float32 for t in floats):
                args = tuple(autocast.cast(arg, torch.float32) for arg in args)
        return op(*args, **kwargs)

    return kernel


def fp32_set_opt_dtype(autocast: Autocast, op: Any) -> Callable[..., Any]:
    """Policy ``fp32_set_opt_dtype``: only where the first argument is floating, dtype unset."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if (
            autocast.enabled()
            and _eligible(_first_tensor(args))
            and not _has_dtype(op, args, kwargs)
        ):
            kwargs = dict(kwargs, dtype=torch.float32)
            names = [a.name for a in op._schema.arguments if not a.kwarg_only]
            if "dtype" in names[: len(args)]:  # passed by position as None
                args = args[: names.index("dtype")] + args[names.index("dtype") + 1 :]
        return op(*args, **kwargs)

    return kernel


def _first_tensor(args: Any) -> Any:
    return args[0] if args else None


def _has_dtype(op: Any, args: Any, kwargs: Any) -> bool:
    if kwargs.get("dtype") is not None:
        return True
    return any(isinstance(arg, torch.dtype) for arg in args)


def append_dtype(autocast: Autocast, op: Any) -> Callable[..., Any]:
    """``norm``: an fp32 result is asked for through the overload that takes a dtype."""
    with_dtype = {
        "aten::norm.Scalar": torch.ops.aten.norm.ScalarOpt_dtype,
        "aten::norm.ScalarOpt_dim": torch.ops.aten.norm.ScalarOpt_dim_dtype,
    }[f"{op._schema.name}.{op._schema.overload_name}"]

    def kernel(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not autocast.enabled() or not _eligible(self):
            return op(self, *args, **kwargs)
        if with_dtype is torch.ops.aten.norm.ScalarOpt_dtype:
            return with_dtype(self, args[0] if args else 2, dtype=torch.float32)
        p, dim, keepdim = (*args, *(False,) * (3 - len(args)))[:3]
        return with_dtype(self, p, dim, kwargs.get("keepdim", keepdim), dtype=torch.float32)

    return kernel


def kernels(autocast: Autocast) -> dict[str, Callable[..., Any]]:
    """Every operator that autocast touches, with the kernel that applies its policy."""
    policies = (
        (LOWER_PRECISION, lower_precision),
        (FP32, fp32),
        (FP32_SET_OPT_DTYPE, fp32_set_opt_dtype),
        (FP32_APPEND_DTYPE, append_dtype),
        (PROMOTE, promote),
    )
    return {
        name: policy(autocast, op)
        for names, policy in policies
        for name in names
        if (op := overload(name)) is not None
    }
