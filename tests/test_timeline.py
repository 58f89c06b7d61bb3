"""Two traces laid together: when it is allowed, what it says, and what it says at other batches."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from batchfit.estimator import Phase, Workload, find_gpu
from batchfit.estimator.timeline import BLOCK, deviations, from_trace, merge, same_order
from batchfit.estimator.tracing import Category, Log, Trace, TraceOptions, trace

from .helpers import A100

OPTIONS = TraceOptions(find_gpu(A100))


def made(batch, sizes, events=None, operators=None, phases=None, **rest):
    """A trace by hand: storages born one after the other, unless events say otherwise."""
    count = len(sizes)
    log = Log(
        sizes=list(sizes),
        itemsizes=[4] * count,
        operators=operators or [f"aten::op{i}" for i in range(count)],
        modules=[0] * count,
        phases=phases or [Phase.FORWARD] * count,
        categories=[Category.TEMPORARIES] * count,
        events=list(range(count)) if events is None else list(events),
        marks=[(0, Phase.FORWARD, 1)],
        **rest,
    )
    return Trace(batch, log, [""], None)


# -- merging -------------------------------------------------------------------------------------


def test_a_line_through_two_traces():
    line = merge(made(2, [1000, 300, 8]), made(3, [1000, 400, 9]))
    assert line.per_sample.tolist() == [0, 100, 1]
    assert line.fixed.tolist() == [1000, 100, 6]
    assert line.sizes(10).tolist() == [1000, 1100, 16]
    assert line.sizes(2).tolist() == [1000, 300, 8]


def test_a_line_through_distant_traces():
    line = merge(made(2, [20]), made(12, [120]))
    assert line.sizes(7).tolist() == [70]


def test_a_slope_that_is_no_whole_number_is_refused():
    assert merge(made(2, [20]), made(4, [21])) is None


def test_two_traces_at_one_batch_are_refused():
    assert merge(made(2, [20]), made(2, [20])) is None


def test_other_operators_births_deaths_or_phases_are_refused():
    one = made(2, [8, 8], [0, 1, ~0])
    assert merge(one, made(3, [8, 8], [0, 1, ~0])) is not None
    assert merge(one, made(3, [8, 8], [0, 1, ~1])) is None
    assert merge(one, made(3, [8, 8], [0, ~0, 1])) is None
    assert merge(one, made(3, [8, 8], [0, 1])) is None
    assert merge(one, made(3, [8, 8, 8], [0, 1, ~0, 2])) is None
    assert merge(one, made(3, [8, 8], [0, 1, ~0], operators=["aten::op0", "aten::x"])) is None
    assert merge(one, made(3, [8, 8], [0, 1, ~0], phases=[Phase.FORWARD, Phase.BACKWARD])) is None


def test_order_of_deaths_between_two_births_does_not_matter():
    one, other = made(2, [8] * 3, [0, 1, ~0, ~1, 2]), made(3, [8] * 3, [0, 1, ~1, ~0, 2])
    assert same_order(one, other)
    assert merge(one, other) is not None


def test_deviations_of_a_third_trace():
    line = merge(made(2, [20, 8]), made(3, [30, 8]))
    assert deviations(line, made(7, [70, 8])) == []
    assert deviations(line, made(7, [70, 9])) == [("aten::op1", "", 8, 9)]
    assert deviations(line, made(7, [70])) is None
    assert deviations(line, made(7, [70, 8], [1, 0])) is None


# -- what a timeline says -------------------------------------------------------------------------


def test_live_bytes_are_rounded_up_to_blocks():
    line = from_trace(made(2, [1, 512, 513, 0], [0, 1, 2, ~0, 3, ~1]))
    assert line.live(2).tolist() == [512, 1024, 2048, 1536, 1536, 1024]
    assert line.peak(2) == 2048


def test_an_empty_timeline():
    line = from_trace(made(2, []))
    assert line.peak(2) == 0
    assert line.alive_at(0) == []
    assert line.phase_peaks(line.live(2)) == {}


def test_alive_at_follows_births_and_deaths():
    line = from_trace(made(2, [8] * 3, [0, 1, ~0, 2]))
    assert [line.alive_at(i) for i in range(4)] == [[0], [0, 1], [1], [1, 2]]


def test_phases_and_moments():
    log = made(2, [512] * 4, [0, 1, 2, ~2, 3])
    log.log.marks = [
        (0, Phase.INIT, 0),
        (1, Phase.FORWARD, 1),
        (2, Phase.BACKWARD, 1),
        (4, Phase.FORWARD, 2),
    ]
    line = from_trace(log)
    assert [line.phase_at(i) for i in range(5)] == [
        (Phase.INIT, 0),
        (Phase.FORWARD, 1),
        (Phase.BACKWARD, 1),
        (Phase.BACKWARD, 1),
        (Phase.FORWARD, 2),
    ]
    live = line.live(2)
    assert line.phase_peaks(live) == {
        Phase.INIT: 512,
        Phase.FORWARD: 1536,
        Phase.BACKWARD: 1536,
    }
    moment = line.moment(2, 1536)
    assert (moment.phase, moment.step, moment.operator) == (Phase.BACKWARD, 1, "aten::op2")


def test_activations_are_what_outlives_the_forward_pass():
    log = made(2, [512] * 3, [0, 1, ~1, 2, ~0, ~2])
    log.log.categories = [None] * 3
    log.log.marks = [(0, Phase.FORWARD, 1), (3, Phase.BACKWARD, 1)]
    line = from_trace(log)
    # the first is alive when backward begins, the second died, the third is born in backward
    log.log.phases = [Phase.FORWARD, Phase.FORWARD, Phase.BACKWARD]
    line = from_trace(log)
    assert line.categories == [Category.ACTIVATIONS, Category.TEMPORARIES, Category.TEMPORARIES]


# -- real networks --------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.head = nn.Linear(32, 50)

    def forward(self, x):
        return self.head(self.layer(self.embed(x)))


def cnn():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10),
    )  # fmt: skip


def tokens(b):
    return torch.zeros(b, 9, dtype=torch.long)


NETWORKS = {
    "mlp": Workload(
        model=lambda: nn.Sequential(nn.Linear(33, 65), nn.GELU(), nn.Linear(65, 7)),
        inputs=lambda b: torch.empty(b, 33),
    ),
    "cnn": Workload(model=cnn, inputs=lambda b: torch.empty(b, 3, 17, 17), precision="amp-fp16"),
    "transformer": Workload(model=Attention, inputs=tokens, precision="amp-bf16", accumulate=2),
    "channels_last": Workload(
        model=cnn,
        inputs=lambda b: torch.empty(b, 3, 17, 17),
        memory_format="channels_last",
        optimizer="sgd",
        ema=True,
    ),
    "lstm": Workload(
        model=lambda: nn.LSTM(6, 10, 2),
        inputs=lambda b: torch.empty(5, b, 6),
        loss=lambda o, i: o[0].sum(),
    ),
    "inference": Workload(
        model=cnn, inputs=lambda b: torch.empty(b, 3, 17, 17), inference=True, precision="fp16"
    ),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_the_timeline_is_what_a_trace_at_that_batch_says(name):
    work = NETWORKS[name]
    line = merge(trace(work, 2, OPTIONS), trace(work, 3, OPTIONS))
    assert line is not None
    for batch in (5, 64):
        direct = trace(work, batch, OPTIONS)
        assert deviations(line, direct) == []
        assert line.peak(batch) == from_trace(direct).peak(batch)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_trace_can_be_repeated(name):
    one, other = (trace(NETWORKS[name], 3, OPTIONS).log for _ in range(2))
    assert one.sizes == other.sizes
    assert one.events == other.events
    assert one.categories == other.categories


@pytest.mark.parametrize("name", NETWORKS)
def test_bytes_are_conserved(name):
    line = from_trace(trace(NETWORKS[name], 3, OPTIONS))
    events = line.events.tolist()
    births, deaths = [e for e in events if e >= 0], [~e for e in events if e < 0]
    # every storage is born once, in order of its number, and dies at most once, after its birth
    assert births == list(range(len(line.fixed)))
    assert len(deaths) == len(set(deaths))
    assert all(events.index(i) < events.index(~i) for i in deaths)
    # what is alive at the end is what was born and did not die
    end = line.alive_at(len(events) - 1)
    assert set(end) == set(births) - set(deaths)
    blocks = -(-line.sizes(3) // BLOCK) * BLOCK
    assert line.live(3)[-1] == blocks[end].sum()
    assert (line.live(3) >= 0).all()


def test_a_quadratic_storage_is_not_on_the_line():
    class Gram(nn.Linear):
        def forward(self, x):
            x = super().forward(x)
            return x @ x.t()

    work = Workload(
        model=lambda: Gram(8, 8), inputs=lambda b: torch.empty(b, 8), loss="sum", optimizer="sgd"
    )
    line = merge(trace(work, 2, OPTIONS), trace(work, 3, OPTIONS))
    found = deviations(line, trace(work, 10, OPTIONS))
    # 2 x 2 x 4 = 16 and 3 x 3 x 4 = 36 predict 176 at batch 10; 10 x 10 x 4 = 400 it is
    assert ("aten::mm", "", 176, 400) in found


def test_a_branch_on_the_batch_is_noticed():
    class Branch(nn.Linear):
        def forward(self, x):
            x = super().forward(x)
            return F.relu(x) if len(x) % 2 else x.sigmoid()

    work = Workload(
        model=lambda: Branch(8, 8), inputs=lambda b: torch.empty(b, 8), loss="sum", optimizer="sgd"
    )
    even, odd = trace(work, 2, OPTIONS), trace(work, 3, OPTIONS)
    assert not same_order(even, odd)
    assert merge(even, odd) is None
    assert merge(even, trace(work, 4, OPTIONS)) is not None


# -- random networks ------------------------------------------------------------------------------

ACTIVATIONS = [nn.ReLU, nn.GELU, nn.Sigmoid, nn.SiLU, lambda: nn.Dropout(0.3), nn.Identity]
WIDTHS = st.integers(1, 70)


@st.composite
def networks(draw):
    """Linear layers of any width with what people put between them."""
    widths = draw(st.lists(WIDTHS, min_size=2, max_size=4))
    layers = []
    for before, after in pairwise(widths):
        bias = draw(st.booleans())
        layers.append(lambda b=before, a=after, bias=bias: nn.Linear(b, a, bias=bias))
        if draw(st.booleans()):
            layers.append(lambda a=after: nn.LayerNorm(a))
        layers.append(draw(st.sampled_from(ACTIVATIONS)))
    return Workload(
        model=lambda: nn.Sequential(*(layer() for layer in layers)),
        inputs=lambda b: torch.empty(b, widths[0]),
        loss=draw(st.sampled_from(["mse", "sum", "l1"])),
        optimizer=draw(st.sampled_from(["adamw", "sgd", "sgd:momentum=0", None])),
        precision=draw(st.sampled_from(["fp32", "amp-bf16", "amp-fp16", "bf16"])),
        accumulate=draw(st.integers(1, 2)),
        set_to_none=draw(st.booleans()),
    )


PROPERTY = settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)


@PROPERTY
@given(networks(), st.integers(4, 300))
def test_random_networks(work, batch):
    line = merge(trace(work, 2, OPTIONS), trace(work, 3, OPTIONS))
    assert line is not None
    direct = trace(work, batch, OPTIONS)
    assert deviations(line, direct) == []
    assert (line.per_sample >= 0).all()
    # one more sample never needs less
    peaks = [line.peak(b) for b in range(1, 12)]
    assert peaks == sorted(peaks)
    # before rounding, the peak is the largest of straight lines: convex
    exact = [int(np.cumsum(line.deltas(line.sizes(b))[0]).max()) for b in range(1, 12)]
    steps = np.diff(exact)
    assert (np.diff(steps) >= 0).all()
    # rounding adds less than a block per storage
    assert all(0 <= p - e <= BLOCK * len(line.fixed) for p, e in zip(peaks, exact, strict=True))
    # and what is born is what dies or stays
    ends = line.alive_at(len(line.events) - 1)
    assert len(line.events) == 2 * len(line.fixed) - len(ends)
