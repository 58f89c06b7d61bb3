"""Leave no trace: everything a probe may change is put back as it was.

Tensors are saved on the host, so that the device keeps its memory for the step. They are put back
in place wherever the tensor still has the storage it had, so that views and aliases of it hold.
"""

from __future__ import annotations

import copy
import functools
import random
import sys
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .flags import saved_flags

__all__ = ["preserved"]

Undo = Callable[[], Any]


@contextmanager
def preserved(objects: Iterable[Any] = ()) -> Iterator[None]:
    """Within the block anything may happen to the objects; afterwards they are as before.

    Also after an exception, ``KeyboardInterrupt`` included. Put back are, for modules: parameters,
    buffers, gradients (None stays None), requires_grad, train or eval mode, and plain attributes;
    for optimizers: state (what was born in the block goes) and hyperparameters; for tensors:
    values and gradients; for anything else, such as GradScaler and learning rate schedulers: its
    attributes. Besides: the random generators of Python, numpy and every torch device, the flags
    of cuDNN and of matrix multiplication, autocast and its cache, grad mode.

    Args:
        objects: modules, optimizers, scalers, schedulers, tensors.
    """
    undo: list[Undo] = [*saved_flags(), *saved_random()]
    seen: set[int] = set()
    for item in objects:
        undo += _saved(item, seen)
    try:
        yield
    finally:
        with torch.no_grad():
            for put_back in reversed(undo):
                put_back()
        torch.clear_autocast_cache()


def _saved(item: Any, seen: set[int]) -> list[Undo]:
    if id(item) in seen:
        return []
    seen.add(id(item))
    if isinstance(item, nn.Module):
        return [undo for module in item.modules() for undo in _saved_module(module, seen)]
    if isinstance(item, Optimizer):
        return _saved_optimizer(item, seen)
    if isinstance(item, Tensor):
        return [_saved_tensor(item)]
    return [_saved_attributes(item)]


def _saved_module(module: nn.Module, seen: set[int]) -> list[Undo]:
    undo: list[Undo] = []
    for table in (module._parameters, module._buffers):
        for tensor in table.values():
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                undo.append(_saved_tensor(tensor))
        undo.append(_saved_table(table))
    undo.append(_saved_attributes(module, without=("_parameters", "_buffers", "_modules")))
    undo.append(_saved_table(module._modules))
    return undo


def _saved_table(table: dict[str, Any]) -> Undo:
    """Which objects a table of a module holds, under which names."""
    before = dict(table)

    def put_back() -> None:
        table.clear()
        table.update(before)

    return put_back


def _saved_optimizer(optimizer: Optimizer, seen: set[int]) -> list[Undo]:
    undo = []
    groups = [
        {key: value if key == "params" else _copied(value) for key, value in group.items()}
        for group in optimizer.param_groups
    ]
    for group in optimizer.param_groups:
        for param in group["params"]:
            if id(param) not in seen:
                seen.add(id(param))
                undo.append(_saved_tensor(param))
    state = {param: _copied(values) for param, values in optimizer.state.items()}
    count = len(groups)

    def put_back() -> None:
        optimizer.state.clear()
        for param, values in state.items():
            optimizer.state[param] = _fresh(values)
        del optimizer.param_groups[count:]
        for group, before in zip(optimizer.param_groups, groups, strict=True):
            params = group["params"]
            group.clear()
            group.update({k: params if k == "params" else _fresh(v) for k, v in before.items()})

    # A scheduler counts calls on the optimizer itself (_opt_called, a wrapped step()).
    without = ("state", "param_groups", "defaults")
    return [*undo, put_back, _saved_attributes(optimizer, without)]


def _saved_tensor(tensor: Tensor) -> Undo:
    """Value, gradient and requires_grad of a tensor; in place if it keeps its storage."""
    value = _Host(tensor.detach())
    grad = None if tensor.grad is None else _Host(tensor.grad)
    requires_grad, leaf = tensor.requires_grad, tensor.is_leaf

    def put_back() -> None:
        if not value.write_back(tensor):
            tensor.data = value.make()
        if leaf:
            tensor.grad = None
            tensor.requires_grad_(requires_grad)
            tensor.grad = None if grad is None else grad.make()

    return put_back


class _Host:
    """A copy of a tensor on the host, and where it came from."""

    def __init__(self, tensor: Tensor) -> None:
        self._device = tensor.device
        self._copy = tensor.detach().to("cpu", copy=True)
        strided = tensor.layout is torch.strided
        self._strides = tensor.stride() if strided else None
        self._offset = tensor.storage_offset() if strided else 0
        self._storage = weakref.ref(tensor.untyped_storage()) if strided else None

    def write_back(self, tensor: Tensor) -> bool:
        """Copy the value into the tensor, if it has the storage and shape that it had."""
        storage = self._storage() if self._storage is not None else None
        if (
            storage is None
            or tensor.layout is not torch.strided
            or tensor.dtype is not self._copy.dtype
            or tensor.shape != self._copy.shape
            or tensor.untyped_storage()._cdata != storage._cdata
            or (tensor.stride(), tensor.storage_offset()) != (self._strides, self._offset)
        ):
            return False
        tensor.detach().copy_(self._copy)
        return True

    def make(self) -> Tensor:
        """The tensor anew on its device."""
        if self._strides is None:
            return self._copy.to(self._device, copy=True)
        like = torch.empty_strided(
            self._copy.shape, self._strides, dtype=self._copy.dtype, device=self._device
        )
        return like.copy_(self._copy)


def _saved_attributes(item: Any, without: tuple[str, ...] = ()) -> Undo:
    """The attributes of any object: numbers, text, containers and tensors by value."""
    attributes = getattr(item, "__dict__", None)
    if not isinstance(attributes, dict):
        return lambda: None
    before = {key: _copied(value) for key, value in attributes.items() if key not in without}

    def put_back() -> None:
        for key in [k for k in attributes if k not in before and k not in without]:
            del attributes[key]
        for key, value in before.items():
            attributes[key] = _fresh(value)

    return put_back


def _copied(value: Any) -> Any:
    """A copy of plain data; tensors go to the host, other objects stay themselves."""
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        return _SavedValue(value)
    if type(value) in (dict, OrderedDict, defaultdict):
        made = copy.copy(value)
        for key, item in value.items():
            made[key] = _copied(item)
        return made
    if type(value) in (list, tuple):
        return type(value)(_copied(item) for item in value)
    if type(value) in (set, deque):
        return copy.copy(value)
    return value


class _SavedValue:
    """A tensor among plain data: the object itself is given back, with its old value."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor: weakref.ref[Tensor] = weakref.ref(tensor)
        self._requires_grad = tensor.requires_grad and tensor.is_leaf
        self._host = _Host(tensor)

    def get(self) -> Tensor:
        tensor = self._tensor()
        if tensor is not None and self._host.write_back(tensor):
            return tensor
        return self._host.make().requires_grad_(self._requires_grad)


def _fresh(value: Any) -> Any:
    """Plain data as it was, from what :func:`_copied` kept."""
    if isinstance(value, _SavedValue):
        return value.get()
    if type(value) in (dict, OrderedDict, defaultdict):
        made = copy.copy(value)
        for key, item in value.items():
            made[key] = _fresh(item)
        return made
    if type(value) in (list, tuple):
        return type(value)(_fresh(item) for item in value)
    if type(value) in (set, deque):
        return copy.copy(value)
    return value


def saved_random() -> list[Undo]:
    """The random generators of Python, numpy (if it is loaded) and every torch device."""
    undo: list[Undo] = [functools.partial(random.setstate, random.getstate())]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        undo.append(functools.partial(numpy.random.set_state, numpy.random.get_state()))
    undo.append(functools.partial(torch.set_rng_state, torch.get_rng_state()))
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        undo.append(functools.partial(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all()))
    xpu = getattr(torch, "xpu", None)
    if xpu is not None and xpu.is_available():
        undo.append(functools.partial(xpu.set_rng_state_all, xpu.get_rng_state_all()))
    if torch.backends.mps.is_available():
        undo.append(functools.partial(torch.mps.set_rng_state, torch.mps.get_rng_state()))
    return undo
