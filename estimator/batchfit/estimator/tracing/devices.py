"""Meta tensors that look as if they were on a CUDA device, or on the host.

User code says ``device="cuda"``, ``x.cuda()``, ``x.is_cuda``, ``torch.arange(n, device=x.device)``.
A ``TorchFunctionMode`` sees every such call before torch's argument parser does, and answers as a
machine with one GPU would: tensors the recorder counts report ``cuda:0``, the others ``cpu``.
``is_meta`` stays true: code that asks (weight initialisation) does so to leave out work on data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from .ledger import Category, Phase
from .numbers import UnknownNumber
from .plain import PlainTorch
from .recorder import Recorder

_CUDA = torch.device("cuda", 0)
_CPU = torch.device("cpu")
_META = torch.device("meta")

# Constructors that take data: built for real on the CPU, then brought in with their value.
_FROM_DATA = (torch.tensor, torch.as_tensor, torch.asarray)


def _getter(name: str) -> Any:
    """What a function mode is called with when a tensor's attribute is read."""
    return getattr(torch.Tensor, name).__get__


def _is_host(device: Any) -> bool:
    """Whether a device argument means the host (and not the simulated GPU)."""
    if isinstance(device, int):
        return False
    return torch.device(device).type != "cuda"


class CudaDevices(TorchFunctionMode):
    """Rewrites device arguments and answers device questions within a trace."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder
        constructors = _device_constructors()
        self._handlers: dict[Any, Callable[..., Any]] = {
            **{func: self._construct for func in constructors},
            **{func: self._from_data for func in _FROM_DATA},
            _getter("device"): self._device,
            _getter("is_cuda"): self._is_cuda,
            _getter("is_cpu"): self._is_cpu,
            torch.Tensor.get_device: self._get_device,
            torch.Tensor.to: self._to,
            torch.Tensor.cuda: self._cuda,
            torch.Tensor.cpu: self._cpu,
            torch.Tensor.pin_memory: self._same,
            torch.Tensor.is_pinned: self._not_pinned,
            torch.Tensor.numpy: self._numpy,
            torch.Tensor.tolist: self._tolist,
            torch.Tensor.item: self._item,
            torch.Tensor.__array__: self._numpy,
            torch.Tensor.__getitem__: self._index,
            torch.Tensor.__setitem__: self._index,
            torch.Tensor.__deepcopy__: self._deepcopy,
            torch.Tensor.data_ptr: self._data_ptr,
        }

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        handler = self._handlers.get(func)
        if handler is not None:
            return handler(func, args, kwargs)
        if "device" in kwargs and kwargs["device"] is not None:
            return self._place(func, args, kwargs, kwargs["device"])
        return func(*args, **kwargs)

    # -- making tensors ----------------------------------------------------------------------

    def _construct(self, func: Any, args: Any, kwargs: Any) -> Any:
        device = kwargs.get("device")
        return self._place(func, args, kwargs, _CPU if device is None else device)

    def _place(self, func: Any, args: Any, kwargs: Any, device: Any) -> Any:
        kwargs = dict(kwargs, device=_META)
        kwargs.pop("pin_memory", None)
        # A generator of a real device draws nothing here: values come from the recorder's own.
        kwargs.pop("generator", None)
        with self._recorder.placing(not _is_host(device)):
            return func(*args, **kwargs)

    def _from_data(self, func: Any, args: Any, kwargs: Any) -> Any:
        device = kwargs.get("device")
        data = args[0] if args else kwargs.get("data", kwargs.get("obj"))
        if isinstance(data, Tensor):
            return self._from_tensor(data, device, kwargs.get("dtype"))
        data = _plain(data)
        rest = {k: v for k, v in kwargs.items() if k not in ("device", "data", "obj", "pin_memory")}
        with PlainTorch():
            real = func(data, *args[1:], **rest)
        twin = self._recorder.follower.lift(real)
        if device is not None and not _is_host(device):
            return self._move(twin, True, None)
        return twin

    def _from_tensor(self, data: Tensor, device: Any, dtype: Any) -> Tensor:
        on_device = self._recorder.ledger.on_device(data) if data.is_meta else False
        target = on_device if device is None else not _is_host(device)
        return self._move(data, target, dtype)

    # -- asking where a tensor is ------------------------------------------------------------

    def _cuda_tensor(self, tensor: Tensor) -> bool:
        return tensor.is_meta and self._recorder.ledger.on_device(tensor)

    def _device(self, func: Any, args: Any, kwargs: Any) -> torch.device:
        tensor: Tensor = args[0]
        if not tensor.is_meta:
            return tensor.device
        return _CUDA if self._recorder.ledger.on_device(tensor) else _CPU

    def _is_cuda(self, func: Any, args: Any, kwargs: Any) -> bool:
        return self._cuda_tensor(args[0])

    def _is_cpu(self, func: Any, args: Any, kwargs: Any) -> bool:
        return not self._cuda_tensor(args[0])

    def _get_device(self, func: Any, args: Any, kwargs: Any) -> int:
        return 0 if self._cuda_tensor(args[0]) else -1

    # -- moving ------------------------------------------------------------------------------

    def _to(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensor, *rest = args
        device = kwargs.get("device")
        dtype = kwargs.get("dtype")
        others = {k: v for k, v in kwargs.items() if k in ("copy", "memory_format")}
        for position, value in enumerate(rest):
            if isinstance(value, (str, torch.device)) or (
                isinstance(value, int) and not isinstance(value, bool)
            ):
                device = value
            elif isinstance(value, torch.dtype):
                dtype = value
            elif isinstance(value, Tensor):
                device = self._device(None, (value,), {})
                dtype = value.dtype
            elif isinstance(value, bool) and position == 3:
                others["copy"] = value
        here = self._cuda_tensor(tensor)
        target = here if device is None else not _is_host(device)
        if tensor.is_meta and here == target:
            return tensor.to(dtype=dtype or tensor.dtype, **others)
        return self._move(tensor, target, dtype, others.get("memory_format"))

    def _move(
        self, tensor: Tensor, on_device: bool, dtype: torch.dtype | None, layout: Any = None
    ) -> Tensor:
        """A copy in the other memory. A real tensor becomes a meta one; its data stays."""
        dtype = dtype or tensor.dtype
        if not tensor.is_meta:
            tensor = self._recorder.follower.lift(tensor)
        if self._recorder.ledger.on_device(tensor) == on_device:
            return tensor.to(dtype)
        with self._recorder.placing(on_device):
            moved = torch.ops.aten._to_copy(tensor, dtype=dtype, memory_format=layout)
        assert isinstance(moved, Tensor)
        if on_device and self._recorder.ledger.phase is Phase.FORWARD:
            self._recorder.ledger.settle(moved, Category.INPUTS)
        return moved

    def _cuda(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        return self._move(args[0], True, None)

    def _cpu(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        return self._move(args[0], False, None)

    def _same(self, func: Any, args: Any, kwargs: Any) -> Any:
        return args[0]

    def _not_pinned(self, func: Any, args: Any, kwargs: Any) -> bool:
        return False

    def _index(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Lists and arrays in an index become tensors with values, which torch drops on meta."""
        tensor, index, *value = args
        if isinstance(index, tuple):
            index = tuple(self._index_part(part) for part in index)
        else:
            index = self._index_part(index)
        return func(tensor, index, *value, **kwargs)

    def _index_part(self, part: Any) -> Any:
        if isinstance(part, np.ndarray) or (isinstance(part, list) and not _has_slices(part)):
            return self._from_data(torch.as_tensor, (part,), {})
        return part

    # -- reading data ------------------------------------------------------------------------

    def _read(self, tensor: Tensor) -> Tensor:
        value = self._recorder.follower.known_value(tensor)
        if value is not None:
            return value
        if tensor.is_floating_point():
            self._recorder.ledger.note(
                "a tensor that the code copies to numpy or a list was taken as zeros"
            )
            with PlainTorch():
                return torch.zeros(tensor.shape, dtype=tensor.dtype, device=_CPU)
        return tensor  # torch's own message would follow; the recorder words it instead

    def _numpy(self, func: Any, args: Any, kwargs: Any) -> Any:
        value = self._read(args[0])
        if value.is_meta:
            self._recorder.follower.refuse("numpy()")
        with PlainTorch():
            return value.detach().numpy()

    def _tolist(self, func: Any, args: Any, kwargs: Any) -> Any:
        value = self._read(args[0])
        if value.is_meta:
            self._recorder.follower.refuse("tolist()")
        with PlainTorch():
            return value.tolist()

    def _item(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensor: Tensor = args[0]
        exact = not (tensor.is_floating_point() or tensor.dtype is torch.bool)
        if tensor.numel() == 1 and exact and self._recorder.follower.known_value(tensor) is None:
            self._recorder.ledger.note(
                "a count that the code reads from the GPU (such as correct.item()) is not known"
            )
            return UnknownNumber(self._recorder.follower.where())
        return tensor.item()

    def _deepcopy(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensor, memo = args
        if id(tensor) in memo:
            return memo[id(tensor)]
        if not tensor.is_meta:
            copied: Tensor = self._recorder.follower.lift(tensor)
        else:
            copied = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        memo[id(tensor)] = copied
        return copied

    def _data_ptr(self, func: Any, args: Any, kwargs: Any) -> int:
        # Code compares pointers to find tied weights and flat buffers; identity is what it needs.
        tensor: Tensor = args[0]
        base: int = tensor.untyped_storage()._cdata
        return base + int(tensor.storage_offset()) * tensor.element_size()


def _has_slices(part: list[Any]) -> bool:
    return any(item is None or item is Ellipsis or isinstance(item, slice) for item in part)


def _plain(data: Any) -> Any:
    """Numbers inside nested sequences may be zero-dim tensors; let torch see Python numbers."""
    if isinstance(data, Tensor):
        return data.item()
    if isinstance(data, (list, tuple)):
        return type(data)(_plain(item) for item in data)
    return data
