"""How the settings of PyTorch's allocator are written.

The grammar is that of ``ConfigTokenizer`` and the parsers in c10/core/AllocatorConfig.cpp and
c10/cuda/CUDAAllocatorConfig.cpp. Which texts are accepted, and what table
``roundup_power2_divisions`` gives, is compared with the installed PyTorch in
tests/test_allocator.py (torch 2.14.1). Where PyTorch reads ``100x`` as 100 and lets a negative
size wrap around, this refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from batchfit.estimator.errors import WorkloadError
from batchfit.estimator.units import MIB

__all__ = ["ROUNDUP_INTERVALS", "read_conf"]

ROUNDUP_INTERVALS = 16
"""Powers of two from 1 MiB to 32 GiB that can be divided separately (AllocatorConfig.cpp,
kRoundUpPowerOfTwoIntervals)."""

# Accepted by PyTorch and without effect on the bytes of the device: host memory, locks, and what
# CUDA graphs do.
_WITHOUT_EFFECT = (
    "graph_capture_record_stream_reuse",
    "pinned_free_catch_all",
    "pinned_max_cached_size_mb",
    "pinned_max_round_threshold_mb",
    "pinned_num_register_threads",
    "pinned_reserve_segment_size_mb",
    "pinned_use_background_threads",
    "pinned_use_cuda_host_register",
    "pinned_use_hip_host_register",
    "release_lock_on_cudamalloc",
    "release_lock_on_hipmalloc",
    "throw_on_cudamalloc_oom",
)


def read_conf(text: str) -> dict[str, object]:
    """Return the fields of `AllocatorSettings` that a text of ``key:value,key:value`` sets.

    Raises:
        WorkloadError: the text cannot be read, or asks for another allocator.
    """
    values: dict[str, object] = {}
    tokens = _Tokens(text)
    for key in tokens.entries():
        if key in _READERS:
            name, read = _READERS[key]
            values[name] = read(tokens)
        elif key == "backend":
            _backend(tokens)
        elif key in _WITHOUT_EFFECT:
            tokens.word("a value")
        else:
            allowed = ", ".join(sorted([*_READERS, "backend"]))
            raise WorkloadError(f"allocator settings: unknown key {key!r}; known: {allowed}")
    return values


@dataclass(slots=True)
class _Tokens:
    """The words and marks of a settings text, read from left to right. Spaces do not count."""

    text: str
    _tokens: list[str] = field(init=False)
    _next: int = 0

    def __post_init__(self) -> None:
        spaced = self.text.replace(" ", "")
        for mark in ",:[]":
            spaced = spaced.replace(mark, f" {mark} ")
        self._tokens = spaced.split(" ")
        self._tokens = [token for token in self._tokens if token]

    def entries(self) -> Iterator[str]:
        """Yield each key once its colon is read; the caller then reads the value."""
        while self._next < len(self._tokens):
            key = self.word("a key")
            self.mark(":")
            yield key
            if self._next < len(self._tokens):
                self.mark(",")

    def word(self, wanted: str) -> str:
        token = self._tokens[self._next] if self._next < len(self._tokens) else ""
        if token in ("", ",", ":", "[", "]"):
            found = repr(token) if token else "the end"
            raise WorkloadError(
                f"allocator settings: expected {wanted}, found {found} in {self.text!r}; "
                "write key:value,key:value"
            )
        self._next += 1
        return token

    def mark(self, mark: str) -> None:
        if not self.at(mark):
            raise WorkloadError(
                f"allocator settings: expected {mark!r} after {self._tokens[self._next - 1]!r} "
                f"in {self.text!r}; write key:value,key:value"
            )
        self._next += 1

    def at(self, mark: str) -> bool:
        return self._next < len(self._tokens) and self._tokens[self._next] == mark


def _backend(tokens: _Tokens) -> None:
    name = tokens.word("native")
    if name != "native":
        raise WorkloadError(
            f"allocator settings: backend:{name} is another allocator, which cannot be simulated; "
            "only backend:native can"
        )


def _boolean(tokens: _Tokens) -> bool:
    word = tokens.word("True or False")
    if word not in ("True", "False"):
        raise WorkloadError(f"allocator settings: expected True or False, found {word!r}")
    return word == "True"


def _integer(tokens: _Tokens) -> int:
    word = tokens.word("a whole number")
    if not word.isascii() or not word.isdigit():
        raise WorkloadError(f"allocator settings: expected a whole number, found {word!r}")
    return int(word)


def _mebibytes(tokens: _Tokens) -> int:
    return _integer(tokens) * MIB


def _fraction(tokens: _Tokens) -> float:
    word = tokens.word("a fraction")
    try:
        return float(word)
    except ValueError:
        raise WorkloadError(
            f"allocator settings: expected a fraction such as 0.8, found {word!r}"
        ) from None


def _threshold(tokens: _Tokens) -> float:
    value = _fraction(tokens)
    if not 0.0 < value < 1.0:
        raise WorkloadError(
            "allocator settings: garbage_collection_threshold must lie between 0.0 and 1.0, "
            "both excluded"
        )
    return value


def _divisions(tokens: _Tokens) -> tuple[int, ...]:
    """Read ``4`` or ``[256:1,512:2,>:8]`` (sizes in MiB; ``>`` is everything above the last)."""
    if not tokens.at("["):
        value = _integer(tokens)
        if value == 0:  # PyTorch takes 0 only inside a list
            raise WorkloadError(
                "allocator settings: roundup_power2_divisions must be a power of two"
            )
        return (value,) * ROUNDUP_INTERVALS
    tokens.mark("[")
    table = [0] * ROUNDUP_INTERVALS
    last: int | None = None
    while not tokens.at("]"):
        bound = tokens.word("a size in MiB, or >")
        tokens.mark(":")
        value = _integer(tokens)
        if bound == ">":  # PyTorch starts one above the last bound, or above the first interval
            start = (last or 0) + 1
            table[start:] = [value] * (ROUNDUP_INTERVALS - start)
        else:
            index = _interval(bound)
            if last is None:
                table[:index] = [value] * index
            table[index] = value
            last = index
        if not tokens.at("]"):
            tokens.mark(",")
    tokens.mark("]")
    return tuple(table)


def _interval(bound: str) -> int:
    size = int(bound) if bound.isascii() and bound.isdigit() else 0
    if size == 0 or size & (size - 1):
        raise WorkloadError(
            f"allocator settings: the intervals of roundup_power2_divisions are powers of two "
            f"(MiB), not {bound!r}"
        )
    return min(size.bit_length() - 1, ROUNDUP_INTERVALS - 1)


_READERS: dict[str, tuple[str, Callable[[_Tokens], object]]] = {
    "expandable_segments": ("expandable_segments", _boolean),
    "garbage_collection_threshold": ("garbage_collection_threshold", _threshold),
    "large_segment_size_mb": ("large_segment_size", _mebibytes),
    "max_non_split_rounding_mb": ("max_non_split_rounding", _mebibytes),
    "max_split_size_mb": ("max_split_size", _mebibytes),
    "per_process_memory_fraction": ("memory_fraction", _fraction),
    "roundup_power2_divisions": ("roundup_power2_divisions", _divisions),
}
