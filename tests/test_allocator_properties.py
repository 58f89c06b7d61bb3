"""What must hold for the allocator's twin whatever the job does (hypothesis)."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from batchfit.estimator.allocator import (
    AllocatorOutOfMemory,
    AllocatorSettings,
    Block,
    CachingAllocator,
    replay,
)

MIB = 2**20

sizes = st.one_of(
    st.integers(1, 4096),
    st.integers(1, MIB),
    st.integers(MIB - 600, MIB + 600),
    st.integers(1, 12 * MIB),
    st.integers(1, 200 * MIB),
)
configurations = st.sampled_from(
    [
        "",
        "",
        "expandable_segments:True",
        "expandable_segments:True",
        "max_split_size_mb:40",
        "roundup_power2_divisions:4",
        "garbage_collection_threshold:0.6",
        "garbage_collection_threshold:0.4,max_split_size_mb:20,roundup_power2_divisions:8",
        "expandable_segments:True,max_split_size_mb:60",
        "large_segment_size_mb:12",
    ]
).map(AllocatorSettings.parse)
budgets = st.one_of(st.none(), st.integers(2 * MIB, 600 * MIB))
# (size, stream): allocate; "empty": empty the cache; a number in [0, 1): free a live block
operations = st.lists(
    st.one_of(
        st.tuples(sizes, st.integers(0, 2)),
        st.floats(0, 1, exclude_max=True),
        st.floats(0, 1, exclude_max=True),
        st.just("empty"),
    ),
    max_size=60,
)


def check(allocator: CachingAllocator, live: list[Block]) -> None:
    """Bytes are conserved, blocks tile their segments, none overlap, free neighbours are merged."""
    segments = allocator.segments()
    blocks = [block for segment in segments for block in segment.blocks]
    assert sum(block.size for block in blocks) == allocator.reserved
    assert sum(block.size for block in blocks if block.allocated) == allocator.allocated
    assert all(segment.blocks for segment in segments)
    for segment in segments:
        assert segment.blocks[0].address == segment.address
        for block, following in pairwise(segment.blocks):
            assert block.address + block.size == following.address
            assert block.allocated or following.allocated
    for segment, following_segment in pairwise(segments):
        assert segment.address + segment.size <= following_segment.address
    assert all(block.size > 0 and block.size % 512 == 0 for block in blocks)
    # what is handed out is what the table says, and never less than was asked for
    handed_out = {block.address: (block.size, block.requested) for block in live}
    assert len(handed_out) == len(live)
    assert handed_out == {b.address: (b.size, b.requested) for b in blocks if b.allocated}
    assert all(requested <= size for size, requested in handed_out.values())
    budget = allocator.device.budget
    assert allocator.allocated <= allocator.reserved
    assert budget is None or allocator.reserved <= budget
    assert allocator.peak_allocated <= allocator.peak_reserved
    assert budget is None or allocator.peak_reserved <= budget


def run(allocator: CachingAllocator, steps: list[object], each: bool) -> list[Block]:
    live: list[Block] = []
    for step in steps:
        if isinstance(step, tuple):
            try:
                live.append(allocator.malloc(*step))
            except AllocatorOutOfMemory as error:
                assert error.report.reserved == allocator.reserved
                assert error.report.largest_free < error.report.rounded or (
                    allocator.settings.max_split_size is not None
                )
        elif step == "empty":
            allocator.empty_cache()
        elif live and isinstance(step, float):
            allocator.free(live.pop(int(step * len(live))))
        if each:
            check(allocator, live)
    return live


@given(configurations, budgets, operations)
@settings(max_examples=300, deadline=None)
def test_invariants(
    configuration: AllocatorSettings, budget: int | None, steps: list[object]
) -> None:
    allocator = CachingAllocator(configuration, budget)
    live = run(allocator, steps, each=True)
    for block in live:
        allocator.free(block)
    assert allocator.allocated == 0
    check(allocator, [])
    allocator.empty_cache()
    assert (allocator.reserved, allocator.segments()) == (0, ())


@given(configurations, operations, operations)
@settings(max_examples=100, deadline=None)
def test_a_table_holds_the_whole_state(
    configuration: AllocatorSettings, before: list[object], after: list[object]
) -> None:
    """An allocator that starts from another's table behaves as the other does from then on."""
    first = CachingAllocator(configuration)
    live = run(first, before, each=False)
    second = CachingAllocator(configuration)
    twins = second.load(first.segments())
    same = [twins[block.address] for block in live]
    assert second.segments() == first.segments()
    for step in after:
        if isinstance(step, tuple):
            one, two = first.malloc(*step), second.malloc(*step)
            live.append(one)
            same.append(two)
            assert one.size == two.size
        elif isinstance(step, float) and live:
            place = int(step * len(live))
            first.free(live.pop(place))
            second.free(same.pop(place))
    check(second, same)
    assert second.allocated == first.allocated


timelines = st.lists(st.tuples(st.one_of(st.just(0), sizes), st.floats(0, 1)), max_size=50)


def timeline(births: list[tuple[int, float]]) -> tuple[list[int], list[int]]:
    """Order births and deaths: storage i dies a share of the way from its birth to the end."""
    count = len(births)
    events = [(float(index), index) for index in range(count)]
    events += [
        (index + 0.5 + share * (count - index), ~index)
        for index, (_, share) in enumerate(births)
        if share < 0.9
    ]
    return [event for _, event in sorted(events)], [size for size, _ in births]


@given(configurations, budgets, timelines)
@settings(max_examples=200, deadline=None)
def test_replay(
    configuration: AllocatorSettings, budget: int | None, births: list[tuple[int, float]]
) -> None:
    """Deterministic; the same as calling the allocator; peaks are those of the prefixes."""
    events, lengths = timeline(births)
    whole = replay(events, lengths, settings=configuration, budget=budget)
    again = replay(events, lengths, settings=configuration, budget=budget)
    assert whole == again
    assert whole.segments() == again.segments()
    assert whole.events == (len(events) if whole.oom is None else whole.oom.event)
    allocator = CachingAllocator(configuration, budget)
    live: dict[int, Block] = {}
    for event in events[: whole.events]:
        if event >= 0 and lengths[event]:
            live[event] = allocator.malloc(lengths[event])
        elif event < 0 and lengths[~event]:
            allocator.free(live.pop(~event))
    check(allocator, list(live.values()))
    if whole.oom is None:
        assert whole.end_reserved == allocator.reserved
    assert (whole.end_allocated, whole.peak_allocated) == (
        allocator.allocated,
        allocator.peak_allocated,
    )
    for place in {0, len(events) // 2, whole.peak_allocated_event + 1}:
        part = replay(events, lengths, settings=configuration, budget=budget, until=place)
        assert part.peak_allocated <= whole.peak_allocated
        assert part.peak_reserved <= whole.peak_reserved
    if whole.peak_allocated_event >= 0:
        top = replay(
            events,
            lengths,
            settings=configuration,
            budget=budget,
            until=whole.peak_allocated_event + 1,
        )
        assert top.end_allocated == whole.peak_allocated
        assert sum(segment.allocated for segment in top.segments()) == whole.peak_allocated


@given(budgets, timelines)
@settings(max_examples=100, deadline=None)
def test_a_larger_budget_never_runs_out_earlier_without_releases(
    budget: int | None, births: list[tuple[int, float]]
) -> None:
    """A budget of the unlimited peak is enough, and changes nothing."""
    events, lengths = timeline(births)
    free = replay(events, lengths)
    enough = replay(events, lengths, budget=free.peak_reserved)
    assert enough.oom is None
    assert enough == free
    if budget is not None and budget >= free.peak_reserved:
        assert replay(events, lengths, budget=budget) == free
