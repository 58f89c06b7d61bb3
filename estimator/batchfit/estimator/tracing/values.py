"""Real values of small tensors beside their meta twins.

Some code looks at data: ``mask.all()``, ``steps.item()``, boolean indexing. Where a small tensor's
value follows from the program alone (constants, arange, comparisons of known tensors, random
integers from a private generator), it is computed on the CPU alongside. Values are kept per
storage, so views and in-place changes through views stay right without bookkeeping per tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .plain import PlainTorch

# Largest tensor whose value is carried, in elements. Integers and booleans steer control flow (an
# attention mask of 1024 x 4096); floats do as scalars and tables (schedules, additive masks).
_LIMIT_EXACT = 2**22
_LIMIT_FLOAT = 2**20

# Random floats are drawn for a handful of numbers only (stochastic depth, a seed): a value computed
# from random weights would decide a branch by chance, and without a word.
_FEW = 16

aten = torch.ops.aten

#: The value of a result that could not be computed (an in-place operator may well give None).
UNKNOWN = object()

# Operators without tensor inputs whose result is random. Values are drawn from a private generator.
_RANDOM = {
    aten.randint.default, aten.randint.low, aten.randperm.default, aten.rand.default,
    aten.randn.default,
}  # fmt: skip
_RANDOM_IN_PLACE = ("aten::random_", "aten::uniform_", "aten::normal_", "aten::bernoulli_")
_RANDOM_NAMES = (
    "rand", "normal", "bernoulli", "uniform", "exponential", "geometric", "cauchy", "log_normal",
    "multinomial", "dropout", "poisson", "random", "empty", "binomial",
)  # fmt: skip


def _limit(tensor: Tensor) -> int:
    return (
        _LIMIT_FLOAT if tensor.dtype.is_floating_point or tensor.dtype.is_complex else _LIMIT_EXACT
    )


class Values:
    """The known values of one trace, keyed by the identity of the meta storage."""

    def __init__(self, seed: int = 0) -> None:
        self._known: dict[int, Tensor] = {}  # key -> the storage's bytes, flat uint8
        self._uniform: dict[int, bool] = {}
        self._generator = torch.Generator().manual_seed(seed)

    def forget(self, key: int) -> None:
        """The storage died or was overwritten with something unknown."""
        if self._known:
            self._known.pop(key, None)
        if self._uniform:
            self._uniform.pop(key, None)

    def known(self, key: int) -> bool:
        """Whether the value of the storage is known."""
        return key in self._known

    def get(self, tensor: Tensor, key: int) -> Tensor | None:
        """The value as a CPU tensor that shares the storage's known bytes, or None."""
        flat = self._known.get(key)
        if flat is None:
            return None
        with PlainTorch():
            if tensor.element_size() > 1:
                whole = flat.numel() // tensor.element_size() * tensor.element_size()
                flat = flat[:whole]
            typed = flat.view(tensor.dtype)
            return typed.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

    def put(self, tensor: Tensor, key: int, value: Tensor) -> None:
        """Remember the value of a whole new storage through one tensor on it."""
        if tensor.numel() > _limit(tensor):
            return
        size = tensor.untyped_storage().nbytes()
        if size > 8 * _LIMIT_EXACT or tensor.layout is not torch.strided:
            return
        with PlainTorch():
            self._known[key] = torch.empty(size, dtype=torch.uint8)
            view = self.get(tensor, key)
            assert view is not None
            view.copy_(value)

    def mark_uniform(self, key: int, value: bool) -> None:
        """Every element of the (boolean) storage is assumed to be ``value``."""
        self._uniform[key] = value

    def uniform(self, key: int) -> bool | None:
        """The assumed common value of a boolean storage."""
        return self._uniform.get(key)

    def random(self, func: Any, args: Any, kwargs: Any, out: Tensor) -> Tensor | None:
        """A draw for a small random tensor; the user's generators are not touched."""
        if func not in _RANDOM or out.numel() > _limit(out):
            return None
        if out.is_floating_point() and out.numel() > _FEW:
            return None
        kwargs = {k: v for k, v in kwargs.items() if k in ("dtype",)}
        with_generator = getattr(func.overloadpacket, _generator_overload(func), None)
        if with_generator is None:
            return None
        result = with_generator(*args, generator=self._generator, **kwargs)
        assert isinstance(result, Tensor)
        return result

    def redraw(self, func: Any, args: Any, target: Tensor, key: int) -> bool:
        """An in-place draw (``random_``, ``uniform_``) that fills the whole of a small tensor."""
        if func._schema.name not in _RANDOM_IN_PLACE or target.numel() > _FEW:
            return False
        if not self.whole(target):
            return False
        with PlainTorch():
            drawn = torch.empty(target.size(), dtype=target.dtype)
            func(drawn, *args[1:], generator=self._generator)
            self.put(target, key, drawn)
        return True

    @staticmethod
    def deterministic(func: Any) -> bool:
        """Whether the operator's result follows from its arguments alone."""
        name = func._schema.name.removeprefix("aten::")
        return not name.startswith(_RANDOM_NAMES) and "dropout" not in name

    @staticmethod
    def compute(func: Any, args: Any, kwargs: Any) -> Any:
        """Run the operator on known values; UNKNOWN where the CPU has no such kernel.

        The meta run has accepted the arguments already, so a failure here says only that the
        value stays unknown (an operator that exists on CUDA only, a dtype the CPU lacks).
        """
        if kwargs.get("device") is not None:
            kwargs = dict(kwargs, device=torch.device("cpu"))
        if "pin_memory" in kwargs:
            kwargs = dict(kwargs, pin_memory=False)
        try:
            return func(*args, **kwargs)
        except (RuntimeError, NotImplementedError, TypeError, IndexError, ValueError):
            return UNKNOWN

    @staticmethod
    def whole(tensor: Tensor) -> bool:
        """Whether a tensor covers all of its storage."""
        return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()

    @staticmethod
    def small(out: Tensor) -> bool:
        """Whether a result is small enough to be worth computing."""
        return out.numel() <= _limit(out)


def _generator_overload(func: Any) -> str:
    name = func._overloadname
    return "generator" if name == "default" else f"{name}_generator"
