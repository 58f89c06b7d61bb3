"""The allocator's twin against real traces of the CUDA allocator (tests/data/oracle/README.md)."""

from __future__ import annotations

import gzip
import importlib
import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batchfit.estimator.allocator import ranges, replay, segments
from batchfit.estimator.allocator.blocks import MIN_BLOCK, ROUND_LARGE, SMALL_LIMIT

ROOT = Path(__file__).parents[1]
ORACLE = ROOT / "tests" / "data" / "oracle"
PATHS = sorted((ORACLE / "allocator").glob("*.json.gz"))
NAMES = [path.name[:9] for path in PATHS]

sys.path.append(str(ROOT / "benchmarks"))
traces = importlib.import_module("allocator_traces")
table = importlib.import_module("allocator_oracle")
speed = importlib.import_module("allocator_speed")


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    return {name: traces.read(path) for name, path in zip(NAMES, PATHS, strict=True)}


def test_all_traces_are_there() -> None:
    assert len(PATHS) == 44


@pytest.mark.parametrize("name", NAMES)
def test_exact_replay(name: str, recorded: dict[str, Any]) -> None:
    """Every address, new segment, release, the end table and both peaks."""
    outcome = traces.exact(recorded[name])
    assert not outcome.miss
    real = recorded[name]["real"]
    assert (outcome.peak_allocated, outcome.peak_reserved, outcome.end_reserved) == (
        real["peak_allocated"],
        real["peak_reserved"],
        real["end_reserved"],
    )


@pytest.mark.parametrize("name", NAMES)
def test_blind_replay(name: str, recorded: dict[str, Any]) -> None:
    """With invented addresses: reserved exact (ranges too), allocated within 0.5 %."""
    outcome, real = traces.blind(recorded[name]), recorded[name]["real"]
    assert not outcome.miss
    assert outcome.peak_reserved == real["peak_reserved"]
    assert outcome.peak_allocated == pytest.approx(real["peak_allocated"], rel=0.005)


def test_oom_of_a_real_gpu(recorded: dict[str, Any]) -> None:
    """The one trace that ran out: with the GPU's memory as budget, so does the twin, there."""
    trace = recorded["trace-071"]
    (place,) = [index for index, event in enumerate(trace["events"]) if event[0] == "oom"]
    events, sizes = speed.timeline({**trace, "events": trace["events"][:place]})
    wanted = trace["events"][place][2]
    events, sizes = [*events, len(sizes)], [*sizes, wanted]
    # README item 11: 80,302 MiB were reserved on such a card with 91.25 MiB free
    run = replay(events, sizes, settings=trace["settings"], budget=80_393 << 20)
    assert run.oom is not None
    assert (run.oom.event, run.oom.requested) == (len(events) - 1, wanted)
    assert run.oom.reserved == trace["real"]["end_reserved"]
    assert run.retries == 2  # once it helped, once it did not


def beginning_at(trace: dict[str, Any], place: int) -> dict[str, Any]:
    """Return the trace as if the recording had begun later, before the peaks; its start is lost."""
    events = trace["events"]
    while events[place][0] in ("free_completed", "oom") or events[place - 1][0].startswith("seg"):
        place += 1
    real = dict(trace["real"])
    for name, actions in (
        ("allocations", ("alloc",)),
        ("new_segments", traces.GROWTHS),
        ("segments_released", traces.RELEASES),
    ):
        real[name] = sum(event[0] in actions for event in events[place:])
    return traces.prepare({**trace, "events": events[place:], "real": real})


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.6])
@pytest.mark.parametrize("name", ["trace-029", "trace-071"])
def test_rebuilt_start(name: str, share: float, recorded: dict[str, Any]) -> None:
    """The harness itself: a range's state is found again from the events that follow."""
    trace = recorded[name]
    part = beginning_at(trace, int(share * len(trace["events"])))
    assert part["start"].segments
    assert not traces.exact(part).miss
    assert traces.blind(part).peak_reserved == trace["real"]["peak_reserved"]


# -- the table -----------------------------------------------------------------------------------


def test_the_table_fails_on_a_miss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = ORACLE / "allocator" / "trace-076.json.gz", tmp_path / "trace-999.json.gz"
    shutil.copy(good, tmp_path)
    assert table.main([str(tmp_path)]) == 0
    trace = json.loads(gzip.decompress(good.read_bytes()))
    alloc = next(event for event in trace["events"] if event[0] == "alloc")
    alloc[1] += MIN_BLOCK
    bad.write_bytes(gzip.compress(json.dumps(trace).encode()))
    assert table.main([str(tmp_path)]) == 1
    assert "trace-999: exact: event 1 " in capsys.readouterr().out
    assert table.main([str(tmp_path / "nothing")]) == 2


# -- ablations -----------------------------------------------------------------------------------


def no_merging(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(segments.SegmentPool, "recycle", segments.Pool.add)


def first_fit(patch: pytest.MonkeyPatch) -> None:
    def lowest(pool: segments.Pool, size: int) -> int:
        keys = pool._keys
        start = segments.bisect_left(keys, size << segments.ADDRESS_BITS)
        mask = (1 << segments.ADDRESS_BITS) - 1
        return min(range(start, len(keys)), key=lambda k: keys[k] & mask, default=len(keys))

    patch.setattr(segments.Pool, "best_fit", lowest)


def no_shared_segment(patch: pytest.MonkeyPatch) -> None:
    def own_size(size: int, settings: object) -> int:
        return ROUND_LARGE * -(-size // ROUND_LARGE)

    patch.setattr(segments, "segment_size", own_size)


def split_any_rest(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(segments.SegmentPool, "splits", lambda pool, size, rest: rest >= MIN_BLOCK)


@pytest.mark.parametrize("ablate", [no_merging, first_fit, no_shared_segment, split_any_rest])
def test_ablations_are_caught(
    ablate: Callable[[pytest.MonkeyPatch], None],
    recorded: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A twin without one of the rules differs from the GPU on many traces.

    Seen: exact replay misses 36, 42, 18, 31 of 44; blind peak reserved misses 25, 32, 17, 0.
    """
    ablate(monkeypatch)
    exact = blind = 0
    for trace in recorded.values():
        exact += bool(traces.exact(trace).miss)
        blind += traces.blind(trace).peak_reserved != trace["real"]["peak_reserved"]
    print(f"{ablate.__name__}: exact replay misses {exact}, blind peak reserved misses {blind}")
    assert exact > 15


def ranges_without_reach(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ranges.RangePool, "best_fit", segments.Pool.best_fit)


def ranges_split_like_segments(patch: pytest.MonkeyPatch) -> None:
    def splits(pool: ranges.RangePool, size: int, rest: int) -> bool:
        return rest >= (MIN_BLOCK if pool.small else SMALL_LIMIT + 1)

    patch.setattr(ranges.RangePool, "splits", splits)


def ranges_of_small_pages(patch: pytest.MonkeyPatch) -> None:
    original = ranges.RangePool.__init__

    def init(pool: ranges.RangePool, *args: Any, **options: Any) -> None:
        original(pool, *args, **options)
        pool.page = ROUND_LARGE

    patch.setattr(ranges.RangePool, "__init__", init)


@pytest.mark.parametrize(
    "ablate", [ranges_without_reach, ranges_split_like_segments, ranges_of_small_pages]
)
def test_ablations_of_ranges_are_caught(
    ablate: Callable[[pytest.MonkeyPatch], None],
    recorded: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ablate(monkeypatch)
    expandable = [trace for trace in recorded.values() if trace["expandable_segments"]]
    misses = sum(bool(traces.exact(trace).miss) for trace in expandable)
    print(f"{ablate.__name__}: exact replay misses {misses} of {len(expandable)}")
    assert misses >= 1


# -- speed ---------------------------------------------------------------------------------------


def test_speed(recorded: dict[str, Any]) -> None:
    """10,000 events in under 60 ms (about 15 on the machine it was written on)."""
    events, sizes = speed.timeline(recorded["trace-075"])
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        replay(events, sizes)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) / len(events) * 10_000 < 0.060


def test_sizes_are_those_of_the_installed_pytorch() -> None:
    """The constants stand in a header that PyTorch ships."""
    torch = pytest.importorskip("torch")
    header = Path(torch.__file__).parent / "include" / "c10" / "core" / "AllocatorConfig.h"
    if not header.exists():
        pytest.skip("this PyTorch ships no headers")
    text = header.read_text()
    for line in (
        f"kMinBlockSize = {MIN_BLOCK};",
        f"kSmallSize = {SMALL_LIMIT};",
        f"kRoundLarge = {ROUND_LARGE};",
        "kSmallBuffer = 2097152;",
        "kMinLargeAlloc = 10485760;",
        "large_segment_size_{20971520};",
    ):
        assert line in text
