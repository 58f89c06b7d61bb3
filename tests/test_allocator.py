"""The allocator's twin on cases small enough to work out by hand. Sizes in MiB unless said."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from batchfit.estimator.allocator import (
    AllocatorOutOfMemory,
    AllocatorSettings,
    CachingAllocator,
    replay,
)
from batchfit.estimator.errors import OutOfMemory, TraceError, WorkloadError

MIB = 2**20
EXPANDABLE = AllocatorSettings(expandable_segments=True)


# -- sizes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("requested", "block"), [(1, 512), (511, 512), (512, 512), (513, 1024), (100_000, 100_352)]
)
def test_blocks_are_multiples_of_512(requested: int, block: int) -> None:
    assert CachingAllocator().malloc(requested).size == block


@pytest.mark.parametrize(
    ("requested", "segment", "block"),
    [
        (1, 2 * MIB, 512),
        (MIB, 2 * MIB, MIB),  # the largest small block
        (MIB + 1, 20 * MIB, MIB + 512),
        (10 * MIB - 512, 20 * MIB, 10 * MIB - 512),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB, 10 * MIB + 512),  # 1.5 KiB short of 2 MiB is above 1 MiB: split
        (25 * MIB, 26 * MIB, 26 * MIB),  # the rest of 1 MiB is not split off, so it counts
        (25 * MIB - 512, 26 * MIB, 25 * MIB - 512),  # a rest of 1 MiB + 512 is
    ],
)
def test_segments_and_what_is_left_of_them(requested: int, segment: int, block: int) -> None:
    allocator = CachingAllocator()
    allocator.malloc(requested)
    assert (allocator.reserved, allocator.allocated) == (segment, block)


def test_small_blocks_leave_no_rest_behind() -> None:
    allocator = CachingAllocator()
    for _ in range(4096):
        allocator.malloc(1)
    assert (allocator.reserved, allocator.allocated) == (2 * MIB, 2 * MIB)
    allocator.malloc(1)
    assert allocator.reserved == 4 * MIB


def test_nothing_cannot_be_asked_for() -> None:
    with pytest.raises(TraceError, match="0 bytes"):
        CachingAllocator().malloc(0)


# -- best fit, split, merge ----------------------------------------------------------------------


def test_best_fit_is_the_smallest_then_the_lowest() -> None:
    given = iter([3 << 30, 2 << 30, 1 << 30])
    allocator = CachingAllocator(new_address=lambda size: next(given))
    blocks = [allocator.malloc(size * MIB) for size in (40, 30, 30)]
    for block in blocks:
        allocator.free(block)
    assert allocator.malloc(30 * MIB).address == 1 << 30
    assert allocator.malloc(30 * MIB).address == 2 << 30
    assert allocator.malloc(30 * MIB).address == 3 << 30
    assert allocator.reserved == 100 * MIB


def test_free_blocks_merge_with_both_neighbours() -> None:
    allocator = CachingAllocator()
    first, middle, last = (allocator.malloc(5 * MIB) for _ in range(3))
    start = first.address
    for block in (first, last, middle):
        allocator.free(block)
    (segment,) = allocator.segments()
    assert [(block.address, block.size) for block in segment.blocks] == [(start, 20 * MIB)]
    assert allocator.malloc(20 * MIB).address == start


def test_streams_and_pools_do_not_share() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(20 * MIB, stream=0))
    allocator.malloc(20 * MIB, stream=7)
    assert allocator.reserved == 40 * MIB
    allocator.malloc(100)  # 20 MiB are free on stream 0, but small blocks come from small segments
    assert allocator.reserved == 42 * MIB
    assert {(segment.stream, segment.small) for segment in allocator.segments()} == {
        (0, False),
        (7, False),
        (0, True),
    }


def test_a_block_is_freed_once() -> None:
    allocator = CachingAllocator()
    left, right = allocator.malloc(100), allocator.malloc(100)
    allocator.free(left)
    allocator.free(right)  # merges into the block to its left
    for block in (left, right):
        with pytest.raises(TraceError, match="freed twice"):
            allocator.free(block)


def test_empty_cache_returns_whole_segments_only() -> None:
    gone = []
    allocator = CachingAllocator(observer=lambda *event: gone.append(event))
    kept, dropped, whole, small = (allocator.malloc(n) for n in (5 * MIB, 5 * MIB, 30 * MIB, 100))
    for block in (dropped, whole, small):
        allocator.free(block)
    gone.clear()
    allocator.empty_cache()
    assert [(action, size) for action, _, size, _ in gone] == [
        ("segment_free", 30 * MIB),  # the large pool first
        ("segment_free", 2 * MIB),
    ]
    assert allocator.reserved == 20 * MIB
    allocator.free(kept)
    allocator.empty_cache()
    assert (allocator.reserved, allocator.segments()) == (0, ())
    assert (allocator.peak_reserved, allocator.peak_allocated) == (52 * MIB, 40 * MIB + 512)


# -- out of memory -------------------------------------------------------------------------------


def test_a_full_budget_first_gives_back_what_is_unused() -> None:
    allocator = CachingAllocator(budget=50 * MIB)
    allocator.free(allocator.malloc(30 * MIB))
    allocator.malloc(40 * MIB)  # 30 + 40 > 50, so the 30 go
    assert (allocator.reserved, allocator.peak_reserved, allocator.retries) == (
        40 * MIB,
        40 * MIB,
        1,
    )


def test_out_of_memory_says_what_there_was() -> None:
    allocator = CachingAllocator(budget=41 * MIB)
    kept = [allocator.malloc(5 * MIB) for _ in range(5)]  # 20 + 20 MiB, 15 of them free
    allocator.free(kept[3])  # 5 free in the one, 15 in the other
    with pytest.raises(AllocatorOutOfMemory) as error:
        allocator.malloc(16 * MIB + 1)
    assert isinstance(error.value, OutOfMemory)
    assert error.value.report.event is None
    assert (error.value.requested, error.value.rounded) == (16 * MIB + 1, 16 * MIB + 512)
    assert (error.value.segment, error.value.budget) == (18 * MIB, 41 * MIB)
    assert (error.value.allocated, error.value.reserved) == (20 * MIB, 40 * MIB)
    assert error.value.largest_free == 15 * MIB
    assert str(error.value).startswith("CUDA out of memory. Tried to allocate 18.00 MiB. ")
    where = error.value.report.message("aten::mm in encoder.layer.3 (forward)")
    assert where.endswith("Asked for 16.00 MiB by aten::mm in encoder.layer.3 (forward).")
    allocator.free(kept[0])  # it can be used on
    allocator.malloc(MIB + 1)
    assert allocator.reserved == 40 * MIB


# -- expandable segments -------------------------------------------------------------------------


def test_ranges_grow_by_pages_and_count_no_rest() -> None:
    allocator = CachingAllocator(EXPANDABLE)
    first = allocator.malloc(25 * MIB)  # two pages of 20 MiB
    assert (allocator.reserved, allocator.allocated) == (40 * MIB, 25 * MIB)
    second = allocator.malloc(36 * MIB)  # 15 free at the end, 21 missing: two more pages
    assert second.address == first.address + 25 * MIB
    assert (allocator.reserved, allocator.allocated) == (80 * MIB, 61 * MIB)
    allocator.malloc(100)
    assert allocator.reserved == 82 * MIB
    allocator.malloc(5 * MIB, stream=3)  # another stream, another range
    assert allocator.reserved == 102 * MIB


def test_ranges_prefer_a_block_that_cannot_grow() -> None:
    allocator = CachingAllocator(EXPANDABLE)
    hole = allocator.malloc(30 * MIB)
    allocator.malloc(20 * MIB)  # 60 mapped; 10 free at the end, in front of unmapped addresses
    allocator.free(hole)
    assert allocator.malloc(8 * MIB).address == hole.address  # 30 fixed before 10 that can grow


def test_ranges_unmap_whole_pages_and_fill_the_lowest_hole() -> None:
    told: list[tuple[str, int, int]] = []
    allocator = CachingAllocator(EXPANDABLE, observer=lambda *event: told.append(event[:3]))
    base = allocator.malloc(5 * MIB).address
    hole, end = allocator.malloc(60 * MIB), allocator.malloc(5 * MIB)
    assert end.address == base + 65 * MIB
    allocator.free(hole)
    told.clear()
    allocator.empty_cache()  # free from 5 to 65: pages 20 to 60; free from 70 to 80: no page
    assert told == [("segment_unmap", base + 20 * MIB, 40 * MIB)]
    assert (allocator.reserved, allocator.allocated) == (40 * MIB, 10 * MIB)
    assert [(s.address - base, s.size) for s in allocator.segments()] == [
        (0, 20 * MIB),
        (60 * MIB, 20 * MIB),
    ]
    told.clear()
    assert allocator.malloc(55 * MIB).address == base + 5 * MIB
    assert told == [("segment_map", base + 20 * MIB, 40 * MIB)]
    assert allocator.reserved == 80 * MIB


def test_an_empty_range_goes_away() -> None:
    allocator = CachingAllocator(EXPANDABLE)
    allocator.free(allocator.malloc(100 * MIB))
    allocator.empty_cache()
    assert (allocator.reserved, allocator.segments()) == (0, ())
    allocator.malloc(100 * MIB)
    assert allocator.reserved == 100 * MIB


def test_a_range_runs_out_by_pages() -> None:
    run = replay([0, 1], [30 * MIB, 15 * MIB], settings=EXPANDABLE, budget=59 * MIB)
    assert run.oom is not None
    assert (run.oom.reserved, run.oom.allocated, run.oom.largest_free) == (
        40 * MIB,
        30 * MIB,
        10 * MIB,
    )
    assert replay([0, 1], [30 * MIB, 15 * MIB], settings=EXPANDABLE, budget=60 * MIB).oom is None


# -- settings that no trace confirms: the rules of the source, worked out by hand ------------------


def test_oversize_blocks_are_not_split() -> None:
    settings = AllocatorSettings.parse("max_split_size_mb:100")
    allocator = CachingAllocator(settings)
    allocator.free(allocator.malloc(200 * MIB))
    allocator.malloc(50 * MIB)  # may not take from the 200
    assert allocator.reserved == 250 * MIB
    allocator.malloc(180 * MIB)  # 200 is 20 MiB more, which is too much
    assert allocator.reserved == 430 * MIB
    block = allocator.malloc(181 * MIB)  # this takes all 200, unsplit
    assert (block.size, allocator.reserved) == (200 * MIB, 430 * MIB)


@pytest.mark.parametrize(
    ("request_mib", "left"),
    [
        (50, [50, 130, 150]),  # the smallest of 100 and more is enough
        (260, [110, 260]),  # none is enough: the largest go until their sum is
    ],
)
def test_oversize_blocks_go_first_when_memory_is_short(request_mib: int, left: list[int]) -> None:
    allocator = CachingAllocator(AllocatorSettings.parse("max_split_size_mb:100"), 400 * MIB)
    for block in [allocator.malloc(n * MIB) for n in (110, 150, 130)]:
        allocator.free(block)
    allocator.malloc(request_mib * MIB)
    assert sorted(segment.size // MIB for segment in allocator.segments()) == left
    assert allocator.retries == 0


@pytest.mark.parametrize(
    ("text", "requested", "block"),
    [
        ("roundup_power2_divisions:4", 1200 * 1024, 1280 * 1024),  # 1024, 1280, 1536, 1792
        ("roundup_power2_divisions:4", 1024 * 1024, 1024 * 1024),
        ("roundup_power2_divisions:4", 1800 * 1024, 2048 * 1024),
        ("roundup_power2_divisions:4", 2048, 2048),  # not above 4 * 512: multiples of 512
        ("roundup_power2_divisions:4", 2049, 2560),
        ("roundup_power2_divisions:1", 1200 * 1024 + 1, 1200 * 1024 + 512),
        ("roundup_power2_divisions:[64:8,256:4,>:2]", 70 * MIB, 72 * MIB),  # steps of 8
        ("roundup_power2_divisions:[64:8,128:0,256:4,>:2]", 129 * MIB + 1, 129 * MIB + 512),
        ("roundup_power2_divisions:[64:8,256:4,>:2]", 257 * MIB, 320 * MIB),
        ("roundup_power2_divisions:[64:8,256:4,>:2]", 520 * MIB, 768 * MIB),
    ],
)
def test_power_of_two_divisions(text: str, requested: int, block: int) -> None:
    assert CachingAllocator(AllocatorSettings.parse(text)).round(requested) == block


def test_garbage_collection_returns_what_is_old() -> None:
    settings = AllocatorSettings.parse("garbage_collection_threshold:0.5")
    allocator = CachingAllocator(settings, budget=200 * MIB)
    old, young = allocator.malloc(40 * MIB), allocator.malloc(70 * MIB)
    allocator.free(old)
    for _ in range(3):  # each a search that `old` survives
        allocator.free(young)
        young = allocator.malloc(70 * MIB)
    allocator.free(young)
    allocator.malloc(80 * MIB)  # 110 > 100: ages 4 + 1, mean 2.5, so only `old` goes
    assert sorted(s.size // MIB for s in allocator.segments()) == [70, 80]
    assert allocator.retries == 0
    unlimited = CachingAllocator(settings)
    unlimited.free(unlimited.malloc(40 * MIB))
    unlimited.malloc(300 * MIB)
    assert unlimited.reserved == 340 * MIB


# -- the text of the settings ----------------------------------------------------------------------

GOOD = [
    "",
    "expandable_segments:True",
    "expandable_segments:True,",
    "expandable_segments : True , max_split_size_mb: 100",
    "garbage_collection_threshold:0.8,expandable_segments:False",
    "max_split_size_mb:20",
    "max_non_split_rounding_mb:30",
    "large_segment_size_mb:12",
    "large_segment_size_mb:40,max_split_size_mb:40",
    "backend:native",
    "per_process_memory_fraction:0.5",
    "throw_on_cudamalloc_oom:True",
    "pinned_use_background_threads:True",
    "pinned_num_register_threads:4,release_lock_on_cudamalloc:True",
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:[]",
    "roundup_power2_divisions:[>:8]",
    "roundup_power2_divisions:[64:8,128:2,256:4,512:2,1024:4,>:1]",
    "roundup_power2_divisions:[256:1,1024:4]",
    "roundup_power2_divisions:[1024:4,64:2]",
    "roundup_power2_divisions:[131072:4,>:8]",
]
BAD = [
    "expandable_segments",
    "expandable_segments:",
    "expandable_segments:true",
    "expandable_segments:1",
    "expandable_segments:True,,",
    "expandable_segments:True max_split_size_mb:30",
    "unknown:1",
    "unknown",
    "max_split_size_mb:abc",
    "max_split_size_mb:19",
    "large_segment_size_mb:10",
    "large_segment_size_mb:40,max_split_size_mb:30",
    "max_non_split_rounding_mb:20,large_segment_size_mb:40",
    "garbage_collection_threshold:0",
    "garbage_collection_threshold:1",
    "garbage_collection_threshold:x",
    "roundup_power2_divisions:3",
    "roundup_power2_divisions:0",
    "roundup_power2_divisions:[100:1]",
    "roundup_power2_divisions:[256:3]",
    "per_process_memory_fraction:1.5",
    "backend:cudaMallocAsync",
]


@pytest.mark.parametrize("text", BAD)
def test_bad_settings_are_refused_in_one_line(text: str) -> None:
    with pytest.raises(WorkloadError) as error:
        AllocatorSettings.parse(text)
    assert "\n" not in str(error.value)


def test_settings_agree_with_the_installed_pytorch() -> None:
    """Which texts are accepted, and the table of divisions, as PyTorch's own parser has them."""
    code = """
import ctypes, json, pathlib, sys, torch
apply = torch._C._accelerator_setAllocatorSettings
library = pathlib.Path(torch.__file__).parent / "lib" / "libc10.so"
name = "_ZN3c1016CachingAllocator26AcceleratorAllocatorConfig24roundup_power2_divisionsEm"
divisions = getattr(ctypes.CDLL(str(library)), name) if library.exists() else None
found = []
for text in json.load(sys.stdin):
    apply("large_segment_size_mb:20,roundup_power2_divisions:1,max_non_split_rounding_mb:20")
    try:
        apply(text)
    except (ValueError, RuntimeError):
        found.append(None)
    else:
        if divisions is None:
            found.append([])
        else:
            divisions.argtypes, divisions.restype = [ctypes.c_size_t], ctypes.c_size_t
            found.append([divisions(2**20 << power) for power in range(16)])
print(json.dumps(found))
"""
    torch = pytest.importorskip("torch")
    if not hasattr(torch._C, "_accelerator_setAllocatorSettings"):
        pytest.skip("this PyTorch has no function to set allocator settings")
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(GOOD + BAD),
        capture_output=True,
        text=True,
        check=True,
    )
    accepted = json.loads(done.stdout)
    # a CPU build of PyTorch cannot know the CUDA allocator's own keys
    for text, table in zip(GOOD + BAD, accepted, strict=True):
        if table is None:
            assert text in BAD or not torch.version.cuda, text
        else:
            assert text in GOOD, text
            if table and "roundup" in text:
                settings = AllocatorSettings.parse(text)
                assert list(settings.divisions()) == table, text


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    assert AllocatorSettings.from_environment() == AllocatorSettings()
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    assert AllocatorSettings.from_environment().expandable_segments
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    assert AllocatorSettings.from_environment() == AllocatorSettings(max_split_size=64 * MIB)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb")
    with pytest.raises(WorkloadError, match="PYTORCH_CUDA_ALLOC_CONF"):
        AllocatorSettings.from_environment()


# -- replay --------------------------------------------------------------------------------------


def test_replay_counts_and_names_the_peaks() -> None:
    sizes = [25 * MIB, 0, 100, 30 * MIB, 5 * MIB]
    events = [0, 1, 2, ~0, 3, ~1, ~3, 4]
    run = replay(events, sizes)
    # 26 | +512 | 0 MiB + 512 | 30 MiB + 512 in a new segment | 5 out of the free 26
    assert (run.peak_allocated, run.peak_allocated_event) == (30 * MIB + 512, 4)
    assert (run.peak_reserved, run.peak_reserved_event) == (58 * MIB, 4)
    assert (run.end_allocated, run.end_reserved) == (5 * MIB + 512, 58 * MIB)
    assert run.fragmentation == pytest.approx(1 - (30 * MIB + 512) / (58 * MIB))
    assert (run.events, run.oom, run.retries) == (8, None, 0)
    as_arrays = replay(np.array(events), np.array(sizes, dtype=np.int64))
    assert as_arrays == run
    assert as_arrays.segments() == run.segments()


def test_peaks_can_fall_on_different_events() -> None:
    run = replay([0, ~0, 1, ~1, 2], [8 * MIB, 12 * MIB, 100])
    assert (run.peak_allocated, run.peak_allocated_event) == (12 * MIB, 2)
    assert (run.peak_reserved, run.peak_reserved_event) == (22 * MIB, 4)
    assert replay([], []).fragmentation == 0.0
    assert replay([], []).peak_allocated_event == -1


def test_replay_shows_the_blocks_at_any_event() -> None:
    events, sizes = [0, 1, ~0, 2], [5 * MIB, 3 * MIB, 2 * MIB]
    (segment,) = replay(events, sizes, until=2).segments()
    assert [(b.size // MIB, b.requested // MIB, b.storage) for b in segment.blocks] == [
        (5, 5, 0),
        (3, 3, 1),
        (12, 0, None),
    ]
    (segment,) = replay(events, sizes).segments()
    assert [(b.size // MIB, b.allocated, b.storage) for b in segment.blocks] == [
        (2, True, 2),
        (3, False, None),
        (3, True, 1),
        (12, False, None),
    ]
    assert segment.size == 20 * MIB and segment.allocated == 5 * MIB


def test_replay_reports_where_it_ran_out() -> None:
    run = replay([0, ~0, 1, 2, 3], [10 * MIB, 30 * MIB, 100, 20 * MIB], budget=50 * MIB)
    assert run.oom is not None
    assert (run.events, run.oom.event, run.oom.storage) == (4, 4, 3)
    assert (run.oom.reserved, run.oom.allocated) == (32 * MIB, 30 * MIB + 512)
    assert (run.oom.requested, run.oom.segment, run.oom.budget) == (20 * MIB, 20 * MIB, 50 * MIB)
    assert run.peak_reserved == 42 * MIB and run.retries == 1


@pytest.mark.parametrize(
    ("events", "message"),
    [([0, 0], "born twice"), ([~0], "not alive"), ([0, ~0, ~0], "not alive")],
)
def test_replay_refuses_impossible_timelines(events: list[int], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        replay(events, [100])


def test_an_allocator_can_start_from_a_table() -> None:
    for settings in (AllocatorSettings(), EXPANDABLE):
        first = CachingAllocator(settings)
        blocks = [first.malloc(n * MIB // 4) for n in range(1, 60)]
        for block in blocks[::3]:
            first.free(block)
        first.empty_cache()
        second = CachingAllocator(settings)
        alive = second.load(first.segments())
        assert sorted(alive) == sorted(block.address for block in blocks if block.requested)
        assert second.segments() == first.segments()
        assert (second.allocated, second.reserved) == (first.allocated, first.reserved)
        for size in (MIB, 7 * MIB, 3 * MIB, 600 * 1024):
            assert second.malloc(size).address == first.malloc(size).address
