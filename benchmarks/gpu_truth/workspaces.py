"""What operators allocate for themselves on the GPU and give back before they return."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from batchfit.estimator.snapshot_compare import Match, SnapshotComparison

from .device import Device

# Rows of each list that are kept in the result.
_KEPT = 40

_CONVOLUTION = re.compile(
    r"_conv_forward|at::_ops::\w*conv\w*::|Convolution\w*Backward|cudnn_conv|run_single_conv"
    r"|miopen_conv|_convolution"
)
_OPERATOR = re.compile(r"at::(?:_ops|native|cuda|meta)::|Backward\d*::apply|AccumulateGrad")


class HiddenBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """For each operator: bytes at its peak beyond what is allocated before or after it.

    The allocator's peak is restarted around every operator, so the peak of the run is lost; under a
    dispatch mode autograd also takes other paths when it adds up gradients. So this is a run of its
    own, from which only the operators' own temporaries are read.

    Attributes:
        rows: (operator, what it was called with) -> (largest hidden bytes, calls).
    """

    def __init__(self, device: Device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self.rows: dict[tuple[str, str], tuple[int, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        before = self._device.allocated()
        self._device.restart_peaks()
        result = func(*args, **(kwargs or {}))
        hidden = self._device.peaks()[0] - max(before, self._device.allocated())
        if hidden > 0:
            key = str(func), describe_call(args, kwargs or {})
            most, calls = self.rows.get(key, (0, 0))
            self.rows[key] = max(most, hidden), calls + 1
        return result

    def as_json(self) -> list[dict[str, Any]]:
        """The operators with the largest temporaries first."""
        ordered = sorted(self.rows.items(), key=lambda item: -item[1][0])
        return [
            {"operator": operator, "call": call, "hidden_bytes": most, "calls": calls}
            for (operator, call), (most, calls) in ordered[:_KEPT]
        ]


_SHORT = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16", torch.int64: "i64"}


def describe_call(args: Iterable[Any], kwargs: Mapping[str, Any]) -> str:
    """Shapes, dtypes and strides that are not contiguous, and the other arguments.

    >>> describe_call([torch.empty(2, 3).t(), [1, 1], None], {"groups": 2})
    'f32[3,2]/[1,3], [1, 1], None, groups=2'
    """

    def one(value: Any) -> str:
        if isinstance(value, Tensor):
            kind = _SHORT.get(value.dtype, str(value.dtype).removeprefix("torch."))
            shape = ",".join(map(str, value.shape))
            strides = "" if value.is_contiguous() else f"/{list(value.stride())}".replace(" ", "")
            return f"{kind}[{shape}]{strides}"
        if isinstance(value, (list, tuple)) and any(isinstance(v, Tensor) for v in value):
            shown = [one(v) for v in value[:2]]
            return f"[{len(value)}: {', '.join(shown)}{', ...' if len(value) > 2 else ''}]"
        return str(value)

    parts = [one(value) for value in args]
    return ", ".join([*parts, *(f"{key}={one(value)}" for key, value in kwargs.items())])


# -- snapshots -----------------------------------------------------------------------------------


def frames_of(event: Mapping[str, Any]) -> list[str]:
    """The frames of an event as "file:line:function", innermost first, without the machine's paths.

    >>> frames_of({"frames": [{"filename": "/x/site-packages/torch/a.py", "line": 3, "name": "f"}]})
    ['torch/a.py:3:f']
    """
    found = event.get("frames") or []
    return [shorten(f"{f.get('filename')}:{f.get('line')}:{f.get('name')}") for f in found]


def shorten(frame: str) -> str:
    """A frame without the folder in which its library is."""
    frame = frame.rpartition("site-packages/")[2]
    if frame.startswith("/"):
        path, _, rest = frame.partition(":")
        frame = f"{path.rpartition('/')[2]}:{rest}"
    return frame


def telling_frames(frames: Sequence[str]) -> list[str]:
    """The operator or autograd node in the C++ frames, and the innermost lines of Python.

    >>> telling_frames(["??:0:malloc", "lib.so:7:at::_ops::bmm::call(...)", "??:0:main",
    ...                 "torch/nn/modules/module.py:9:_call_impl", "gpt.py:3:forward"])
    ['at::_ops::bmm::call', 'gpt.py:3:forward']
    """
    shown = []
    for frame in frames:
        name = frame.split(":", 2)[-1].partition("(")[0]
        if _OPERATOR.search(name):
            shown.append(name)
        if len(shown) == 2:
            break
    python = [f for f in frames if re.match(r"[^:]*\.py:\d", f) and "nn/modules/module.py" not in f]
    return shown + python[:2]


def convolution_blocks(
    snapshot: Mapping[str, Any], explained: Iterable[int]
) -> list[dict[str, Any]]:
    """Blocks that are allocated inside convolutions and that no predicted storage explains.

    Args:
        snapshot: recorded with frames.
        explained: requested bytes of every predicted storage.

    Returns:
        requested bytes and how often, largest first.
    """
    known = set(explained)
    sizes: Counter[int] = Counter()
    for trace in snapshot.get("device_traces", []):
        for event in trace:
            if event.get("action") != "alloc" or event["size"] in known:
                continue
            if any(_CONVOLUTION.search(str(f.get("name"))) for f in event.get("frames") or []):
                sizes[event["size"]] += 1
    return [{"requested_bytes": size, "times": sizes[size]} for size in sorted(sizes, reverse=True)]


def comparison_json(found: SnapshotComparison) -> dict[str, Any]:
    """A snapshot beside the prediction: what matches, and what only one of them has."""
    return {
        "real_allocated": found.real_allocated,
        "real_reserved": found.real_reserved,
        "predicted_allocated": found.predicted_allocated,
        "matched_bytes": found.matched,
        "matched_share": round(found.matched_share, 6),
        "blocks": {"real": found.real_blocks, "predicted": found.predicted_blocks,
                   "older": found.older},
        "categories": {
            row.category or "not predicted": {"real": row.real, "predicted": row.predicted}
            for row in found.categories
        },
        "only_real": _grouped(found, Match.ONLY_REAL),
        "only_predicted": _grouped(found, Match.ONLY_PREDICTED),
    }  # fmt: skip


def _grouped(found: SnapshotComparison, match: Match) -> list[dict[str, Any]]:
    """Blocks of one side, those of one place together, the most bytes first."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for pair in found.only(match):
        if match is Match.ONLY_REAL:
            where = telling_frames([shorten(frame) for frame in pair.real_frames])
        else:
            where = list(pair.predicted_frames)
        groups.setdefault(tuple(where), []).append(pair.real_size or pair.predicted_size)
    ordered = sorted(groups.items(), key=lambda item: -sum(item[1]))
    return [
        {"bytes": sum(sizes), "blocks": len(sizes), "largest": max(sizes), "where": list(where)}
        for where, sizes in ordered[:_KEPT]
    ]
