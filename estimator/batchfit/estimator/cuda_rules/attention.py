"""Which kernel ``scaled_dot_product_attention`` runs on CUDA, and what it does around it.

The choice decides memory more than anything else in a transformer: the math kernel keeps the
attention matrix, the fused ones do not. The rules are those of
``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`` (select_sdp_backend, can_use_*) and of
``transformers/attention.cpp`` (padding, masks), read at torch 2.13 and 2.14.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

Backend = Literal["flash", "efficient", "cudnn", "math"]
BACKENDS: tuple[Backend, ...] = ("flash", "efficient", "cudnn", "math")

_HALF = (torch.float16, torch.bfloat16)
_SINCE_2_14 = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 14)
aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class AttentionRules:
    """The choice of kernel for one GPU.

    Attributes:
        capability: CUDA compute capability; (8, 0) for an A100.
        forced: a kernel to take whenever its own constraints allow it, whatever CUDA would pick.
    """

    capability: tuple[int, int]
    forced: Backend | None = None

    @property
    def prefer_cudnn(self) -> bool:
        """Hopper and data-centre Blackwell try cuDNN first (check_prefer_cudnn_attention)."""
        return self.capability[0] in (9, 10)

    def choose(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, causal: bool,
        gqa: bool,
    ) -> Backend:  # fmt: skip
        """The first kernel in CUDA's order of priority whose constraints hold."""
        q, k, v = _batched(q, k, v)
        order: list[Backend] = ["flash", "efficient", "math"]
        if self.prefer_cudnn:
            order.insert(0, "cudnn")
        if self.forced is not None:
            order.insert(0, self.forced)
        allowed: dict[Backend, Callable[[], bool]] = {
            "flash": lambda: self._can_flash(q, k, v, mask, dropout, causal, gqa),
            "efficient": lambda: self._can_efficient(q, k, v, mask, gqa),
            "cudnn": lambda: self._can_cudnn(q, k, v, mask, dropout, gqa),
            "math": lambda: True,
        }
        for backend in order:
            if _enabled(backend) and allowed[backend]():
                return backend
        raise RuntimeError(
            "no available kernel: those that torch.nn.attention.sdpa_kernel allows do not "
            f"take {q.dtype} tensors of head dimension {q.shape[-1]} on this GPU"
        )

    def _can_flash(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, causal: bool,
        gqa: bool,
    ) -> bool:  # fmt: skip
        head_dim = q.shape[-1]
        if not (self.capability >= (8, 0) and q.dim() == k.dim() == v.dim() == 4 and mask is None):
            return False
        if not (head_dim == k.shape[-1] == v.shape[-1] and head_dim <= 256):
            return False
        if q.dtype not in _HALF or (causal and q.shape[-2] != k.shape[-2]):
            return False
        # The backward kernel lacks the shared memory for wide heads on consumer cards.
        narrow = (8, 6) <= self.capability <= (8, 9) or (12, 0) <= self.capability <= (12, 1)
        if narrow and _requires_grad(q, k, v):
            fits = head_dim <= 192 or (dropout == 0.0 and head_dim > 224)
            if not fits:
                return False
        return _same_heads(q, k, v, gqa) and _dense(q, k, v)

    def _can_efficient(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, gqa: bool
    ) -> bool:
        if mask is not None and mask.stride(-1) != 1:
            return False
        if not (q.dim() == k.dim() == v.dim() == 4 and self.capability >= (5, 0)):
            return False
        half = q.dtype in _HALF
        tensor_cores = self.capability[0] >= 8 or (self.capability[0] >= 7 and half)
        alignment = 4 if self.capability[0] >= 8 else 1
        if tensor_cores:
            alignment = max(alignment, 8 if half else 4)
        if q.shape[-1] != k.shape[-1] or q.shape[-1] % alignment or v.shape[-1] % alignment:
            return False
        dtypes = [torch.float16, torch.float32]
        if self.capability[0] >= 8:
            dtypes.append(torch.bfloat16)
        return q.dtype in dtypes and _same_heads(q, k, v, gqa) and _dense(q, k, v)

    def _can_cudnn(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, gqa: bool
    ) -> bool:
        if not (self.capability >= (8, 0) and q.dim() == k.dim() == v.dim() == 4):
            return False
        if q.dtype not in _HALF or (dropout * 16.0) % 1.0:
            return False
        if mask is not None and mask.requires_grad:
            return False
        d_qk, d_v = q.shape[-1], v.shape[-1]
        if d_qk > 128 or d_v > 128 or d_qk % 8 or d_v % 8 or k.shape[-2] == 1:
            return False
        return _same_heads(q, k, v, gqa) and _dense(q, k, v)

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, dropout: float = 0.0,
        causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        """``scaled_dot_product_attention`` as attention.cpp runs it on CUDA.

        Shapes: q (N, H, L, E), k (N, H_kv, S, E), v (N, H_kv, S, E_v) -> (N, H, L, E_v); from torch
        2.14 on N may be missing (normalize_unbatched_input).
        """
        batched = _batched(q, k, v)
        if batched[0] is not q:
            return self.run(
                *batched, mask, dropout, causal, scale=scale, enable_gqa=enable_gqa
            ).squeeze(0)
        backend = self.choose(q, k, v, mask, dropout, causal, enable_gqa)
        if backend == "math":
            if mask is not None and mask.dtype is torch.bool:
                mask = _additive(mask, q.dtype)
            result = aten._scaled_dot_product_attention_math(
                q, k, v, mask, dropout, causal, scale=scale, enable_gqa=enable_gqa
            )
            return _tensor(result[0])
        if backend == "flash":
            return _flash(q, k, v, dropout, causal, scale)
        needs_grad = _requires_grad(q, k, v)
        if mask is not None:
            mask = _aligned(_additive(mask, q.dtype), q, k)
        if backend == "cudnn":
            result = aten._scaled_dot_product_cudnn_attention(
                q, k, v, mask, needs_grad, dropout, causal, False, scale=scale
            )
        else:
            result = aten._scaled_dot_product_efficient_attention(
                q, k, v, mask, needs_grad, dropout, causal, scale=scale
            )
        return _tensor(result[0])


def _tensor(value: Any) -> Tensor:
    assert isinstance(value, Tensor)
    return value


def _enabled(backend: Backend) -> bool:
    """The switches of ``torch.nn.attention.sdpa_kernel``, which user code may have turned."""
    flags: Any = torch.backends.cuda
    return bool(
        {
            "flash": flags.flash_sdp_enabled,
            "efficient": flags.mem_efficient_sdp_enabled,
            "cudnn": flags.cudnn_sdp_enabled,
            "math": flags.math_sdp_enabled,
        }[backend]()
    )


def _requires_grad(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def _same_heads(q: Tensor, k: Tensor, v: Tensor, gqa: bool) -> bool:
    if not (q.shape[0] == k.shape[0] == v.shape[0] and k.shape[1] == v.shape[1]):
        return False
    if gqa:
        return q.shape[1] % k.shape[1] == 0
    # One key head for all is broadcast by the kernels (supports_mqa, torch 2.14).
    return q.shape[1] == k.shape[1] or (k.shape[1] == 1 and _SINCE_2_14)


def _dense(*tensors: Tensor) -> bool:
    """check_nonzero_sequence_lengths_dense and check_last_dim_stride_equals_1_dense."""
    return all(t.shape[-2] > 0 and (t.stride(-1) == 1 or t.shape[-1] == 1) for t in tensors)


def _batched(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One sample without its dimension becomes a batch of one, as torch does from 2.14 on."""
    if _SINCE_2_14 and q.dim() == k.dim() == v.dim() == 3:
        return q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
    return q, k, v


def _flash(
    q: Tensor, k: Tensor, v: Tensor, dropout: float, causal: bool, scale: float | None
) -> Tensor:
    """Flash needs head dims that are a multiple of 8: pad_last_dim<8>, and cut afterwards."""
    head_dim = q.shape[-1]
    missing = -head_dim % 8
    if missing:
        scale = head_dim**-0.5 if scale is None else scale
        q, k, v = (aten.constant_pad_nd(t, [0, missing]) for t in (q, k, v))
    result = aten._scaled_dot_product_flash_attention(q, k, v, dropout, causal, False, scale=scale)
    out = _tensor(result[0])
    return out[..., :head_dim] if missing else out


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """convert_boolean_attn_mask: a bool mask becomes zeros and minus infinity."""
    if mask.dtype is not torch.bool:
        return mask
    new = aten.zeros_like(mask, dtype=dtype)
    aten.masked_fill_(new, aten.logical_not(mask), float("-inf"))
    return _tensor(new)


def _aligned(mask: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """preprocess_mask: pad the bias until every stride is a multiple of 8, then expand."""
    aligned = mask.stride(-1) == 1 and all(s % 8 == 0 for s in mask.stride()[:-1])
    if not aligned:
        width = mask.shape[-1]
        mask = aten.constant_pad_nd(mask, [0, 8 - width % 8])[..., :width]
    return mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
