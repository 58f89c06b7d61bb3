"""Keeps the values of small tensors up to date, operator by operator."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from batchfit.estimator.errors import DataDependentError

from .ledger import Ledger
from .operators import Operator
from .plain import PlainTorch
from .values import UNKNOWN, Values

aten = torch.ops.aten


class Follower:
    """Computes values alongside, and answers or refuses where code reads them."""

    def __init__(self, ledger: Ledger) -> None:
        self.values = Values()
        self._ledger = ledger
        self._lifted: dict[int, tuple[Tensor, Tensor]] = {}
        ledger.on_death = self.values.forget

    def close(self) -> None:
        """Let go of the real tensors that were met."""
        self._lifted.clear()

    def lift(self, real: Tensor, remember: bool = True) -> Tensor:
        """The host twin on meta of a real tensor; its data is not copied unless it is small.

        Args:
            real: the tensor.
            remember: give the same twin for the same tensor again, which keeps the tensor alive.
        """
        found = self._lifted.get(id(real))
        if found is not None:
            return found[1]
        with PlainTorch():
            twin = torch.empty_strided(
                real.size(), real.stride(), dtype=real.dtype, device="meta"
            ).requires_grad_(real.requires_grad and real.is_leaf)
            self._ledger.register(twin, "aten::to", False)
            if real.device.type == "cpu" and real.layout is torch.strided:
                self.values.put(twin, twin.untyped_storage()._cdata, real.detach())
        if remember:
            self._lifted[id(real)] = (real, twin)
        return twin

    def _value(self, tensor: Tensor) -> Tensor | None:
        return self.values.get(tensor, tensor.untyped_storage()._cdata)

    def known_value(self, tensor: Tensor) -> Tensor | None:
        """The value of a small tensor, where it is known."""
        if not tensor.is_meta:
            return tensor
        return self._value(tensor)

    def follow(
        self, func: Any, op: Operator, args: Any, kwargs: Any, tensors: list[Tensor], out: Any
    ) -> None:
        if func.is_view:
            return
        known = op.deterministic
        if known:
            for tensor in tensors:
                if not self.values.known(tensor.untyped_storage()._cdata):
                    known = False
                    break
        if op.mutates and not known and not self._overwrites(func, args):
            for i in op.mutates:
                if i < len(args):
                    self._forget(args[i])
            if not op.deterministic and isinstance(args[0], Tensor):
                self.values.redraw(func, args, args[0], args[0].untyped_storage()._cdata)
            self._follow_uniform(op, tensors, out)
            return
        if not known and not op.mutates:
            if not tensors and isinstance(out, Tensor):
                draw = self.values.random(func, args, kwargs, out)
                if draw is not None:
                    self.values.put(out, out.untyped_storage()._cdata, draw)
            self._follow_uniform(op, tensors, out)
            return
        first = out[0] if isinstance(out, (list, tuple)) and out else out
        if isinstance(first, Tensor) and not self.values.small(first):
            for i in op.mutates:
                self._forget(args[i])
            return
        self._compute(func, op, args, kwargs, out)

    def _overwrites(self, func: Any, args: Any) -> bool:
        """Whether an in-place operator replaces the whole of a small storage by a constant."""
        if func not in (aten.fill_.Scalar, aten.zero_.default):
            return False
        target: Tensor = args[0]
        key = target.untyped_storage()._cdata
        if not self.values.known(key):
            if not self.values.whole(target) or not self.values.small(target):
                return False
            self.values.put(target, key, torch.zeros((), dtype=target.dtype))
        return self.values.known(key)

    def _forget(self, target: Any) -> None:
        for tensor in target if isinstance(target, (list, tuple)) else (target,):
            if isinstance(tensor, Tensor):
                self.values.forget(tensor.untyped_storage()._cdata)

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The operator's result on the known values of its arguments, or UNKNOWN."""
        known = {k: self._shadow(v) for k, v in kwargs.items()}
        return self.values.compute(func, tuple(self._shadow(a) for a in args), known)

    def _compute(self, func: Any, op: Operator, args: Any, kwargs: Any, out: Any) -> None:
        result = self._run(func, args, kwargs)
        if result is UNKNOWN:
            for i in op.mutates:
                self._forget(args[i])
            return
        if not op.mutates:
            self._keep(out, result)

    def _keep(self, out: Any, result: Any) -> None:
        if isinstance(out, Tensor) and isinstance(result, Tensor):
            if out.shape == result.shape and out.dtype is result.dtype:
                self.values.put(out, out.untyped_storage()._cdata, result)
        elif isinstance(out, (list, tuple)) and isinstance(result, (list, tuple)):
            for one, value in zip(out, result, strict=False):
                self._keep(one, value)

    def _shadow(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._value(value)
        if isinstance(value, (list, tuple)):
            return type(value)(self._shadow(item) for item in value)
        return value

    def _follow_uniform(self, op: Operator, tensors: list[Tensor], out: Any) -> None:
        """any/all/not of a tensor that is assumed uniform (see isnan, isinf, isfinite)."""
        if op.name not in ("aten::any", "aten::all", "aten::logical_not") or not tensors:
            return
        value = self.values.uniform(tensors[0].untyped_storage()._cdata)
        if value is not None:
            self.assume(out, value if op.name != "aten::logical_not" else not value)

    def assume(self, tensor: Tensor, value: bool) -> None:
        """Assume that every element of a boolean tensor is ``value``."""
        key = tensor.untyped_storage()._cdata
        self.values.mark_uniform(key, value)
        with PlainTorch():
            self.values.put(tensor, key, torch.tensor(value))

    def integers(self, tensor: Tensor) -> list[int]:
        """The values of a small integer tensor."""
        value = self.known_value(tensor)
        if value is None:
            self.refuse("lengths of a packed sequence")
        with PlainTorch():
            return [int(v) for v in value.flatten().tolist()]

    def from_integers(self, values: Sequence[int]) -> Tensor:
        """A host tensor with these values."""
        with PlainTorch():
            real = torch.tensor(list(values), dtype=torch.int64)
        return self.lift(real)

    def scalar(self, tensor: Tensor) -> Any:
        value = self._value(tensor)
        if value is not None:
            return value.item()
        if tensor.is_floating_point():
            if _read_by_torch():
                return 0.0  # GradScaler asks whether a gradient was infinite: none is
            self._ledger.note(
                "a number that the code reads from the GPU (such as loss.item()) was taken as 0"
            )
            return 0.0
        raise DataDependentError(
            f"{self.where()} reads a {tensor.dtype} value that only real data can give (.item(), "
            "int(), bool() or a Python `if` on a tensor); pass inputs whose values are known, or "
            "give the workload a step that does not depend on it"
        )

    def refuse(self, what: str) -> NoReturn:
        """Raise: the code asks for data that does not exist."""
        raise DataDependentError(
            f"{self.where()} asks for the data of a tensor ({what}), which only a real run has; "
            "leave that out of the step"
        )

    def where(self) -> str:
        """The running module and the line of user code, for messages."""
        modules = self._ledger.modules
        path = modules.paths[modules.current]
        line = _user_line()
        return (f"module {path!r}" if path else "the step") + (f" ({line})" if line else "")

    def data_dependent(
        self, func: Any, op: Operator, args: Any, kwargs: Any, tensors: list[Tensor], device: bool
    ) -> Any:
        """nonzero, unique, masked_select: run on the known values, give back the shape found."""
        result: Any = UNKNOWN
        if all(self.values.known(t.untyped_storage()._cdata) for t in tensors):
            result = self._run(func, args, kwargs)
        if result is UNKNOWN:
            raise DataDependentError(
                f"{self.where()} calls {op.name}, whose result has a size that only real data can "
                "tell; trace a part of the model without it, or give inputs whose values are known"
            )
        return self._wrap(result, op, device)

    def _wrap(self, result: Any, op: Operator, on_device: bool) -> Any:
        if isinstance(result, Tensor):
            twin = torch.empty_strided(
                result.size(), result.stride(), dtype=result.dtype, device="meta"
            )
            self._ledger.register(twin, op.name, on_device)
            self.values.put(twin, twin.untyped_storage()._cdata, result)
            return twin
        if isinstance(result, (list, tuple)):
            return type(result)(self._wrap(item, op, on_device) for item in result)
        return result


def _read_by_torch() -> bool:
    """Whether the code that reads a value is torch's own and not the user's."""
    # torch 2.14 puts two wrappers of its own above a dispatch mode.
    between = (__name__.rsplit(".", 2)[0], "torch._compile", "torch._dynamo")
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(between):
        frame = frame.f_back
    name = frame.f_globals.get("__name__", "") if frame is not None else ""
    return bool(name.startswith("torch."))


def _user_line() -> str:
    """File and line of the innermost Python frame that is neither torch's nor ours."""
    ours = __name__.rsplit(".", 2)[0]
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not name.startswith((f"{ours}.", "torch.")) and name not in (ours, "torch"):
            return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""
