"""A twin of PyTorch's CUDA caching allocator: the bytes it would allocate and reserve.

`replay` runs a timeline of storages through it; `CachingAllocator` is the allocator itself.

::

    settings.py   what PYTORCH_CUDA_ALLOC_CONF says       conf.py    how it is written
    blocks.py     blocks, sizes, the device               segments.py  pools of cudaMalloc segments
    ranges.py     pools of expandable segments            caching.py   the allocator
    replay.py     a timeline through it                   table.py, report.py   what comes out

The rules are those of c10/cuda/CUDACachingAllocator.cpp (torch 2.1 to 2.14), confirmed event by
event on the real traces in tests/data/oracle. Known limitations: one device; no memory pools of
CUDA graphs; a block used on a second stream (``record_stream``) is reused at once, where CUDA
waits for that stream. What settings other than ``expandable_segments`` do is read from PyTorch's
source and not confirmed by a trace.
"""

from .blocks import Block
from .caching import CachingAllocator
from .replay import Replay, replay
from .report import AllocatorOutOfMemory, BlockInfo, OomReport, SegmentInfo
from .settings import AllocatorSettings

__all__ = [
    "AllocatorOutOfMemory",
    "AllocatorSettings",
    "Block",
    "BlockInfo",
    "CachingAllocator",
    "OomReport",
    "Replay",
    "SegmentInfo",
    "replay",
]
