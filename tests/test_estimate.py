"""The estimate: sums that add up, answers that hold at every batch, errors that help."""

from __future__ import annotations

from collections import namedtuple

import numpy as np
import pytest
import torch
import torchinfo
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from batchfit.estimator import (
    Budget,
    BudgetError,
    Category,
    Outcome,
    Phase,
    Workload,
    WorkloadError,
    estimate,
    find_gpu,
)
from batchfit.estimator.allocator import AllocatorSettings
from batchfit.estimator.solve import candidates, largest, largest_safe
from batchfit.estimator.timeline import from_trace
from batchfit.estimator.tracing import TraceOptions, trace

from .helpers import A100, GIB, MIB, quick


def mlp(width=256):
    return Workload(
        model=lambda: nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        ),
        inputs=lambda b: torch.empty(b, width),
        loss="mse",
        name="mlp",
    )


def cnn():
    return Workload(
        model=lambda: nn.Sequential(
            nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(16 * 15 * 15, 10),
        ),
        inputs=lambda b: torch.empty(b, 3, 32, 32),
        precision="amp-fp16",
        optimizer="sgd",
    )  # fmt: skip


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(100, 64)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(64, 4, 128, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(64, 100, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def encoder():
    return Workload(
        model=Encoder,
        inputs=lambda b: torch.zeros(b, 16, dtype=torch.long),
        precision="amp-bf16",
    )


JOBS = {"mlp": mlp, "cnn": cnn, "encoder": encoder}


@pytest.fixture(scope="module", params=JOBS)
def made(request):
    return estimate(JOBS[request.param](), gpu=A100)


@pytest.fixture(scope="module")
def small():
    """An MLP without library workspaces: tens of MiB decide."""
    return quick(mlp())


# -- sums ----------------------------------------------------------------------------------------

BATCHES = [1, 2, 7, 100, 1000]


@pytest.mark.parametrize("batch", BATCHES)
def test_parts_add_up_to_the_peak(made, batch):
    peak = made.peak(batch)
    assert sum(made.breakdown(batch).values()) == peak
    for depth in (None, 0, 1, 2):
        assert sum(made.by_module(batch, depth).values()) == peak
    assert max(made.phase_peaks(batch).values()) == peak
    assert made.reserved(batch) >= peak
    assert all(size > 0 for size in made.breakdown(batch).values())


@pytest.mark.parametrize("batch", BATCHES)
def test_curves_add_up(made, batch):
    curve = made.timeline(batch)
    total = sum(curve.by_category.values())
    assert np.array_equal(total, curve.allocated)
    assert curve.allocated.max() == made.peak(batch)
    assert (curve.allocated >= 0).all()
    assert all((part >= 0).all() for part in curve.by_category.values())
    # the peak's own event says the same as the breakdown
    at = int(curve.allocated.argmax())
    there = {c: int(part[at]) for c, part in curve.by_category.items() if part[at]}
    assert sum(there.values()) == made.peak(batch)
    assert there == made.breakdown(batch)
    # and the phases are cut at the marks
    assert [m[0] for m in curve.marks] == sorted(m[0] for m in curve.marks)
    assert curve.marks[0][1] is Phase.INIT


@pytest.mark.parametrize("batch", BATCHES)
def test_the_moment_of_the_peak(made, batch):
    moment = made.peak_moment(batch)
    curve = made.timeline(batch)
    assert moment.bytes == made.peak(batch) == curve.allocated[moment.position]
    assert moment.position == int(curve.allocated.argmax())
    assert made.phase_peaks(batch)[moment.phase] == moment.bytes


def test_by_module_is_sorted_and_cut(made):
    whole = made.by_module(8)
    assert list(whole.values()) == sorted(whole.values(), reverse=True)
    assert all(path.count(".") == 0 for path in made.by_module(8, 1))
    assert list(made.by_module(8, 0)) == [""]


@pytest.mark.parametrize("job", JOBS)
def test_names_of_modules_are_those_of_named_modules(job):
    work = JOBS[job]()
    names = {name for name, _ in work.model().named_modules()}
    made = quick(work)
    timeline = made.timeline_at(2)
    assert set(timeline.modules) <= names
    # and every module that owns a parameter is among them
    owners = {name.rpartition(".")[0] for name, _ in work.model().named_parameters()}
    params = {
        m
        for m, c in zip(timeline.modules, timeline.categories, strict=True)
        if c is Category.PARAMETERS
    }
    assert params == owners


@pytest.mark.parametrize("batch", [4, 33, 500])
def test_the_peak_is_that_of_a_direct_trace(made, batch):
    options = TraceOptions(find_gpu(A100))
    direct = from_trace(trace(made.workload, batch, options))
    line = made.timeline_at(batch)
    assert made.affine
    assert np.array_equal(direct.sizes(batch), line.sizes(batch))
    assert direct.events.tolist() == line.events.tolist()


def test_the_peak_grows_with_the_batch(made):
    peaks = [made.timeline_at(b).peak(b) for b in range(1, 200, 7)]
    assert peaks == sorted(peaks)


def test_the_answer_does_not_depend_on_the_order_of_questions():
    one, other = quick(mlp()), quick(mlp())
    batches = [100, 3, 50]
    assert [one.peak(b) for b in batches] == [other.peak(b) for b in reversed(batches)][::-1]
    one.answer("1GiB")
    assert one.peak(50) == other.peak(50)


# -- workloads that are not affine -----------------------------------------------------------------


class Gram(nn.Linear):
    """Similarity of all samples of the batch, as contrastive losses have it."""

    def forward(self, x):
        x = super().forward(x)
        return x @ x.t()


class Branch(nn.Linear):
    def forward(self, x):
        x = super().forward(x)
        return torch.relu(x) if len(x) % 2 else x.sigmoid().exp()


def contrastive():
    return Workload(
        model=lambda: Gram(64, 64), inputs=lambda b: torch.empty(b, 64), loss="mean",
        optimizer="sgd",
    )  # fmt: skip


def branching():
    return Workload(
        model=lambda: Branch(64, 64), inputs=lambda b: torch.empty(b, 64), loss="mean",
        optimizer="sgd",
    )  # fmt: skip


def test_a_branch_on_the_batch_is_traced_each_time():
    made = quick(branching())
    assert not made.affine
    assert any("different paths" in note for note in made.notes)
    options = TraceOptions(find_gpu(A100), workspaces=())
    for batch in (2, 3, 10, 11):
        direct = from_trace(trace(branching(), batch, options))
        assert made.timeline_at(batch).peak(batch) == direct.peak(batch)
        assert made.peak(batch) == direct.peak(batch)  # small blocks: nothing but rounding
    assert sum(made.breakdown(10).values()) == made.peak(10)


def test_a_branch_on_the_batch_is_solved():
    made = quick(branching())
    answer = made.answer(room(budget_above(made, 12)), cap=20)
    assert made.fits(answer.batch, answer.budget)
    assert answer.outcome in (Outcome.FITS, Outcome.CAPPED)
    assert answer.confirmed


def test_the_square_of_the_batch_is_noticed_and_solved():
    made = quick(contrastive())
    budget = room(64 * MIB)
    answer = made.answer(budget)
    assert not made.affine
    assert any("do not grow in proportion" in note for note in made.notes)
    options = TraceOptions(find_gpu(A100), workspaces=())
    for batch, fits in ((answer.batch, True), (answer.batch + 1, False)):
        direct = from_trace(trace(contrastive(), batch, options))
        assert made.timeline_at(batch).peak(batch) == direct.peak(batch)
        assert made.fits(batch, budget) is fits
    # two or three matrices of B x B x 4 bytes live at once: 64 MiB / 3 is B = 2364, / 2 is 2896
    assert 2000 < answer.batch < 2896
    assert answer.outcome is Outcome.FITS


def test_a_batch_that_was_asked_for_before_is_corrected():
    made = quick(contrastive())
    made.answer(room(64 * MIB))
    options = TraceOptions(find_gpu(A100), workspaces=())
    direct = from_trace(trace(contrastive(), 100, options))
    assert made.timeline_at(100).peak(100) == direct.peak(100)


def test_peak_of_a_square_is_right_without_asking_for_an_answer():
    made = quick(contrastive())
    options = TraceOptions(find_gpu(A100), workspaces=())
    direct = from_trace(trace(contrastive(), 1000, options))
    assert made.timeline_at(1000).peak(1000) == direct.peak(1000)


# -- the largest batch ----------------------------------------------------------------------------


def budget_above(made, batch):
    """A budget in which this batch fits and little more."""
    return max(made.reserved(b) for b in range(1, batch + 1))


# The context of an A100 sets the smallest budget that is accepted as such; a Budget is taken as is.
def room(size):
    return Budget(size)


ASKED = [{}, {"multiple_of": 8}, {"power_of_two": True}, {"multiple_of": 3, "cap": 50}]


@pytest.fixture(scope="module")
def wide():
    return quick(mlp(width=1024))


@pytest.mark.parametrize(
    ("options", "target"),
    [(o, t) for o in ASKED for t in (1, 2, 3, 10, 33, 64, 100)],
)
def test_the_answer_is_the_largest_that_fits(wide, target, options):
    made = wide
    budget = room(made.reserved(target))
    allowed = [
        b
        for b in range(1, 400)
        if b % options.get("multiple_of", 1) == 0
        and (not options.get("power_of_two") or b & (b - 1) == 0)
        and b <= options.get("cap", 400)
    ]
    fitting = {b: made.fits(b, budget) for b in allowed}
    # brute force: the largest such that it and all before it fit
    expected = 0
    for b in allowed:
        if not fitting[b]:
            break
        expected = b
    answer = made.answer(budget, **options)
    assert answer.batch == expected
    assert made.largest_batch(budget, **options) == expected
    if expected == 0:
        assert answer.outcome is Outcome.DOES_NOT_FIT
        assert answer.short_by > 0
        assert not answer.confirmed
    elif expected == max(allowed) and "cap" in options:
        assert answer.outcome is Outcome.CAPPED
    else:
        assert answer.outcome is Outcome.FITS
        after = allowed[allowed.index(expected) + 1]
        assert not made.fits(after, budget)
        assert made.out_of_memory(after, budget) is not None
    if expected:
        assert made.out_of_memory(expected, budget) is None
        assert answer.peak == made.peak(expected) <= budget.bytes
        assert answer.confirmed
        assert answer.short_by == 0


def test_fits_is_the_replay_within_the_budget(small):
    for batch in (1, 50, 500):
        need = small.reserved(batch)
        assert small.fits(batch, room(need))
        assert not small.fits(batch, room(small.peak(batch) - 1))


def test_does_not_fit(small):
    answer = small.answer(room(1 * MIB))
    assert answer.batch == 0
    assert answer.outcome is Outcome.DOES_NOT_FIT
    assert answer.short_by == small.reserved(1) - 1 * MIB
    assert answer.peak == small.peak(1)
    assert answer.reserved == small.reserved(1)
    assert "does not fit" in str(answer)
    assert str(answer.largest_category) in str(answer)


def test_capped(small):
    answer = small.answer("10GiB", cap=7)
    assert (answer.batch, answer.outcome) == (7, Outcome.CAPPED)
    answer = small.answer("10GiB", cap=7, power_of_two=True)
    assert (answer.batch, answer.outcome) == (4, Outcome.CAPPED)
    answer = small.answer("10GiB", cap=30, multiple_of=8)
    assert (answer.batch, answer.outcome) == (24, Outcome.CAPPED)


def test_unlimited():
    work = Workload(
        model=lambda: nn.Linear(1, 1), inputs=lambda b: torch.empty(b, 1), loss="mse",
        inference=True, precision="fp16",
    )  # fmt: skip
    made = quick(work)
    answer = made.answer("80GiB")
    # 1 element per sample: 2^31 - 1 samples can be indexed with 32 bits; 3 x 2 bytes of each
    assert answer.batch == made.index_limit() == 2**31 - 1
    assert answer.outcome is Outcome.UNLIMITED


def test_index_limit_of_the_widest_tensor(small):
    # Linear(256, 1024): 1024 elements per sample are the most
    assert small.index_limit() == (2**31 - 1) // 1024


def test_nothing_grows_with_the_batch():
    def build(device):
        layer = nn.Linear(8, 8, device=device)
        return lambda batch: layer(torch.empty(4, 8, device=device)).sum().backward()

    answer = quick(Workload.from_step(build)).answer("1GiB")
    assert answer.outcome is Outcome.UNLIMITED


def test_conditions_that_no_batch_meets(small):
    for options in (
        {"cap": 7, "multiple_of": 8},
        {"multiple_of": 3, "power_of_two": True},
        {"multiple_of": 0},
        {"multiple_of": -2},
        {"multiple_of": 1.5},
        {"multiple_of": True},
        {"cap": 0},
        {"cap": -1},
        {"cap": 2.5},
    ):
        with pytest.raises(WorkloadError) as caught:
            small.answer("10GiB", **options)
        assert "\n" not in str(caught.value)


def test_the_default_budget_is_that_of_the_gpu():
    made = estimate(mlp(), gpu="T4")
    gpu = find_gpu("T4")
    assert made.budget().bytes == gpu.total_bytes - gpu.context_bytes - 256 * MIB
    assert made.budget(margin="1GiB").bytes == gpu.total_bytes - gpu.context_bytes - GIB
    assert made.budget(margin=0).bytes == gpu.total_bytes - gpu.context_bytes
    assert made.budget("8GiB").bytes == 8 * GIB
    assert made.budget(8 * GIB).bytes == 8 * GIB
    assert made.budget(Budget(5)).bytes == 5
    answer = made.answer()
    assert answer.budget == made.budget()
    assert made.fits(answer.batch)


def test_a_margin_makes_the_answer_smaller():
    made = estimate(mlp(1024), gpu="T4")
    assert made.largest_batch(margin="4GiB") < made.largest_batch(margin=0)


@pytest.mark.parametrize("bad", ["lots", "-1GiB", "12 parsecs", -5, 0, 100 * MIB, "1KiB", ""])
def test_budgets_that_cannot_be_used(small, bad):
    for ask in (small.answer, lambda b: small.fits(1, b), lambda b: small.out_of_memory(1, b)):
        with pytest.raises(BudgetError) as caught:
            ask(bad)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("bad", [1.5, None, True, [1]])
def test_a_budget_of_a_wrong_type_is_refused(small, bad):
    if bad is None:
        assert small.fits(1, bad)  # the GPU's own
        return
    with pytest.raises(BudgetError):
        small.budget(bad)


def test_a_margin_that_leaves_nothing(small):
    with pytest.raises(BudgetError) as caught:
        small.budget(margin="100GiB")
    assert "\n" not in str(caught.value)


def test_message_of_running_out(small):
    budget = room(small.reserved(100))
    failing = next(b for b in range(101, 20000) if not small.fits(b, budget))
    message = small.out_of_memory(failing, budget)
    assert message.startswith("CUDA out of memory. Tried to allocate ")
    assert "pass" in message
    assert any(phase in message for phase in ("forward", "backward", "optimizer"))
    assert small.out_of_memory(100, budget) is None


def test_allocator_settings_are_used():
    classic = quick(mlp(1000))
    expandable = quick(mlp(1000), allocator="expandable_segments:True")
    parsed = quick(mlp(1000), allocator=AllocatorSettings(expandable_segments=True))
    assert expandable.reserved(100) == parsed.reserved(100)
    assert expandable.reserved(100) <= classic.reserved(100)
    assert expandable.peak(100) <= classic.peak(100)


def test_allocator_settings_of_the_environment(monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    made = quick(mlp())
    assert made.allocator.expandable_segments


def test_memory_fraction_lowers_the_budget():
    whole = estimate(mlp(1024), gpu="T4")
    half = estimate(mlp(1024), gpu="T4", allocator="per_process_memory_fraction:0.5")
    assert half.largest_batch() < whole.largest_batch()
    limit = find_gpu("T4").total_bytes // 2
    assert half.replay(half.largest_batch(), limit).oom is None
    assert half.replay(half.largest_batch() + 1, limit).oom is not None


def test_memory_fraction_is_named_where_it_runs_out():
    half = estimate(mlp(1024), gpu="T4", allocator="per_process_memory_fraction:0.5")
    assert half.out_of_memory(half.largest_batch() + 1) is not None


# -- the search by itself --------------------------------------------------------------------------


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(st.integers(0, 3000), st.sampled_from([1, 2, 3, 8]), st.booleans(), st.integers(1, 3000))
def test_search_finds_what_brute_force_finds(limit, multiple, power, cap):
    if power and multiple & (multiple - 1):
        multiple = 1
    candidate = candidates(multiple, power)
    allowed = []
    n = 1
    while candidate(n) <= cap:
        allowed.append(candidate(n))
        n += 1
    expected = max((b for b in allowed if b <= limit), default=0)
    assert largest(lambda b: b <= limit, candidate, cap) == expected
    assert largest_safe(lambda b: b <= limit, candidate, cap) == (expected, None)


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(st.integers(100, 1000), st.integers(1, 60))
def test_search_stays_below_a_hole_near_the_limit(limit, below):
    hole = limit - min(below, limit // 10)
    found, reported = largest_safe(lambda b: b <= limit and b != hole, candidates(1, False), 10_000)
    assert found == hole - 1
    # a search that never met the hole's upper side has no hole to report
    assert reported in (hole, None)


# -- the short form --------------------------------------------------------------------------------

Pair = namedtuple("Pair", ["x", "y"])


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x, y=None):
        x = self.layer(x)
        return x if y is None else x + self.layer(y["z"] if isinstance(y, dict) else y)


@pytest.mark.parametrize(
    ("example", "tensors"),
    [
        (torch.empty(4, 64), 1),
        ((torch.empty(4, 64), torch.empty(4, 64)), 2),
        ([torch.empty(4, 64), torch.empty(4, 64)], 2),
        ({"x": torch.empty(4, 64), "y": torch.empty(4, 64)}, 2),
        ({"x": torch.empty(4, 64), "y": {"z": torch.empty(4, 64)}}, 2),
        (Pair(torch.empty(4, 64), torch.empty(4, 64)), 2),
    ],
)
def test_short_form_is_the_long_form(example, tensors):
    short = quick(Two(), example, loss="sum", optimizer="sgd")
    long = quick(
        Workload(
            model=Two,
            inputs=lambda b: tuple(torch.empty(b, 64) for _ in range(tensors)),
            loss="sum",
            optimizer="sgd",
        )
    )
    assert short.workload.name == "Two"
    for batch in (1, 9, 100):
        assert short.peak(batch) == long.peak(batch)


def test_short_form_with_an_existing_optimizer():
    model = nn.Linear(64, 64)
    optimizer = torch.optim.Adam(model.parameters())
    made = quick(model, torch.empty(4, 64), loss="mse", optimizer=optimizer)
    # exp_avg and exp_avg_sq: 2 x (64 x 64 x 4 + 64 x 4 in a block of 512)
    assert made.breakdown(4)[Category.OPTIMIZER_STATE] == 2 * (16384 + 512)


def test_a_gpu_that_is_not_named_is_said():
    made = estimate(mlp())
    assert any("no GPU was named" in note for note in made.notes)
    assert not any("no GPU was named" in note for note in quick(mlp()).notes)


def test_progress_is_told():
    said = []
    quick(mlp(), progress=said.append)
    assert said == ["tracing at batch 2", "tracing at batch 3"]


def test_repr_names_job_and_gpu(small):
    assert repr(small) == f"<Estimate of mlp on {small.gpu.name}>"


# -- torchinfo -------------------------------------------------------------------------------------


def test_layers_are_torchinfos_own_sums():
    made = quick(mlp())
    theirs = torchinfo.summary(
        mlp().model(), input_data=torch.empty(1, 256), verbose=0, device="cpu"
    )
    sums = made.layers
    assert sums.parameters == theirs.total_param_bytes
    # torchinfo counts outputs twice, for their gradients
    assert 2 * sums.activations_per_sample == theirs.total_output_bytes
    assert sums.torchinfo_total(1) == theirs.total_param_bytes + theirs.total_output_bytes
    assert sums.gradients == sums.parameters
    assert sums.optimizer_state == 2 * sums.parameters  # AdamW
    # the tree: Sequential and its three layers
    assert [(layer.path, layer.kind) for layer in sums.layers] == [
        ("", "Sequential"),
        ("0", "Linear"),
        ("1", "GELU"),
        ("2", "Linear"),
    ]
    assert [layer.parameters for layer in sums.layers[1:]] == [
        256 * 1024 + 1024,
        0,
        1024 * 256 + 256,
    ]
    # Linear(256, 1024) gives 1024 x 4 bytes per sample
    assert sums.layers[1].output_bytes_per_sample == 4096


def test_tied_weights_count_once():
    made = quick(encoder())
    model = Encoder()
    once = sum(p.numel() * 4 for p in model.parameters())
    assert made.layers.parameters == once
    assert made.breakdown(2)[Category.PARAMETERS] >= once
    tied = 100 * 64 * 4
    assert once == sum(t.numel() * 4 for t in model.state_dict().values()) - tied


def test_frozen_parameters_in_the_sums():
    def make():
        model = mlp().model()
        model[0].requires_grad_(False)
        return model

    sums = quick(mlp().with_(model=make)).layers
    trained = (1024 * 256 + 256) * 4
    assert sums.gradients == trained
    assert sums.optimizer_state == 2 * trained
    assert sums.parameters > trained


def test_sums_of_inference_and_step_functions():
    assert quick(mlp().with_(inference=True)).layers.gradients == 0
    assert quick(mlp().with_(inference=True)).layers.optimizer_state == 0

    def build(device):
        return lambda batch: torch.empty(batch, 8, device=device)

    assert quick(Workload.from_step(build)).layers is None


def test_layers_do_not_disturb_the_estimate(small):
    before = small.peak(10)
    assert small.layers is small.layers
    assert small.peak(10) == before


def test_an_existing_module_may_be_summed_twice():
    model = nn.Linear(8, 8)
    made = quick(model, torch.empty(2, 8), loss="mse")
    assert made.layers.parameters == (64 + 8) * 4
    assert model.weight.device.type == "cpu"
