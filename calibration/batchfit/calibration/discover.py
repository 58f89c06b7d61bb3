"""What a function can reach: the objects that a probe must put back."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["discover"]


def discover(function: Any) -> list[Any]:
    """Modules, optimizers, scalers, schedulers and tensors that a function can reach.

    Looked at are what it closes over, its arguments bound by ``functools.partial``, the object it
    is a method of, its defaults, the globals that it names, and lists, tuples and dicts of these.
    """
    found: list[Any] = []
    _walk(function, found, set(), 0)
    return found


_DEPTH = 6


def _walk(value: Any, found: list[Any], seen: set[int], depth: int) -> None:
    if id(value) in seen or depth > _DEPTH:
        return
    seen.add(id(value))
    if isinstance(value, (nn.Module, Optimizer, Tensor, torch.amp.GradScaler)) or (
        hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
    ):
        found.append(value)
        return
    for inner in _reachable(value):
        _walk(inner, found, seen, depth + 1)


def _reachable(value: Any) -> Iterable[Any]:
    if isinstance(value, functools.partial):
        return (value.func, *value.args, *value.keywords.values())
    if isinstance(value, types.MethodType):
        return (value.__self__, value.__func__)
    if isinstance(value, types.FunctionType):
        cells = (c for c in value.__closure__ or () if not _empty(c))
        names = _names(value.__code__)
        named = (value.__globals__[n] for n in names if n in value.__globals__)
        return (*(c.cell_contents for c in cells), *(value.__defaults__ or ()),
                *(value.__kwdefaults__ or {}).values(), *named)  # fmt: skip
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, (list, tuple)):
        return value
    if isinstance(value, (type, types.ModuleType)) or type(value).__module__ == "builtins":
        return ()
    return tuple(getattr(value, "__dict__", {}).values())


def _names(code: types.CodeType) -> set[str]:
    """The global names that code uses, that of functions defined within it included."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names(constant)
    return names


def _empty(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is None
    except ValueError:
        return True
