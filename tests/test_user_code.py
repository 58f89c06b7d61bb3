"""What user code does to a trace, and a trace to user code."""

import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from batchfit.estimator import (
    Outcome,
    TargetError,
    TraceError,
    Workload,
    WorkloadError,
    estimate,
)
from batchfit.estimator.tracing import recorder

GPU = "T4"


def rows(batch):
    return torch.empty(batch, 8)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.two.weight = self.one.weight
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x):
        return self.two(self.one(x))


def test_a_factory_may_return_a_module_that_exists():
    model = Tied()
    weight, seen = model.one.weight, model.seen
    before = weight.detach().clone()
    e = estimate(Workload(model=lambda: model, inputs=rows, loss="sum"), gpu=GPU)
    assert model.one.weight is weight and model.two.weight is weight and model.seen is seen
    assert torch.equal(weight, before) and weight.grad is None
    assert e.layers.parameters == 8 * 8 * 4  # tied weights once


def test_a_step_may_move_a_module_that_exists():
    model = nn.Linear(8, 8)
    before = [p.detach().clone() for p in model.parameters()]

    def build(device):
        moved = model.to(device)

        def step(batch):
            moved(torch.empty(batch, 8, device=device)).sum().backward()
            moved.zero_grad()

        return step

    estimate(Workload.from_step(build), gpu=GPU)
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    assert all(p.device.type == "cpu" for p in model.parameters())


def test_sys_exit_is_an_error_and_not_an_answer():
    with pytest.raises(WorkloadError, match=r"sys\.exit\(0\)"):
        estimate(Workload(model=lambda: sys.exit(0), inputs=rows), gpu=GPU)


def test_a_loop_that_waits_for_data_ends(monkeypatch):
    class Endless(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            while float(y.detach().norm()) < 100:
                y = y * 2 + 1
            return y

    monkeypatch.setattr(recorder, "_MOST_CALLS", 5000)
    with pytest.raises(TraceError, match=r"still running after 5,000 operators"):
        estimate(Workload(model=lambda: Endless(8, 8), inputs=rows, loss="sum"), gpu=GPU)


def test_code_that_takes_only_some_batch_sizes():
    class Fours(nn.Linear):
        def forward(self, x):
            return super().forward(x.view(x.shape[0] // 4, 4, 8))

    work = Workload(model=lambda: Fours(8, 8), inputs=rows, loss="sum")
    with pytest.raises(TraceError, match="traced_at"):
        estimate(work, gpu=GPU)
    assert (
        estimate(work, gpu=GPU, traced_at=(4, 8)).largest_batch("256MiB", multiple_of=4, cap=64)
        == 64
    )


@pytest.mark.parametrize("dim", [9, -1, "q"])
def test_a_batch_dimension_that_is_none(dim):
    with pytest.raises(WorkloadError, match="batch_dim"):
        estimate(nn.Linear(8, 8), torch.empty(4, 8), batch_dim=dim, gpu=GPU)


def test_a_lazy_module_from_a_factory():
    with pytest.raises(WorkloadError, match="lazy module"):
        estimate(Workload(model=lambda: nn.LazyLinear(4), inputs=rows), gpu=GPU)


# torch 2.13's own compiler warns of torch.jit when it is first imported
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_compiled_model_is_estimated_in_eager_mode_and_says_so():
    model = nn.Sequential(nn.Linear(8, 8))
    eager = estimate(model, torch.empty(4, 8), loss="sum", gpu=GPU)
    compiled = estimate(torch.compile(model), torch.empty(4, 8), loss="sum", gpu=GPU)
    assert compiled.peak(8) == eager.peak(8)
    assert any("torch.compile" in note for note in compiled.notes)


def test_an_explicit_budget_is_not_cut_at_the_total_of_the_gpu():
    e = estimate(nn.Linear(8, 8), torch.empty(4, 8), loss="sum", gpu=GPU)
    beyond = 40 * 2**30  # of a T4's 15
    batch = e.largest_batch(budget=beyond, cap=2**30)
    assert 20 * 2**30 < e.peak(batch) <= beyond


# -- scripts as people write them ------------------------------------------------------------------


@pytest.mark.parametrize("pinned", [False, True])
def test_a_data_loader_with_workers_reads_in_this_process(pinned):
    data = torch.utils.data.TensorDataset(torch.randn(32, 16), torch.zeros(32, dtype=torch.long))
    loader = torch.utils.data.DataLoader(data, batch_size=8, num_workers=2, pin_memory=pinned)

    def build(device):
        model = torch.nn.Linear(16, 4).to(device)

        def step(batch):
            for x, y in loader:
                F.cross_entropy(model(x.to(device)), y.to(device)).backward()

        return step

    made = estimate(Workload.from_step(build), gpu="T4")
    assert made.peak(8) > 0
    assert any("nothing grows with the batch size" in note for note in made.notes)
    assert (loader.num_workers, loader.pin_memory) == (2, pinned)


CRITERIA = [
    (torch.nn.CrossEntropyLoss(weight=torch.ones(4)), "cross_entropy"),
    (F.cross_entropy, "cross_entropy"),
    (torch.nn.MSELoss(), "mse"),
    (F.l1_loss, "l1"),
    (torch.nn.BCEWithLogitsLoss(), "bce_with_logits"),
]


@pytest.mark.parametrize(("criterion", "name"), CRITERIA)
def test_a_criterion_of_torch_gets_a_target_of_its_kind(criterion, name):
    def peak(loss):
        job = Workload(model=torch.nn.Linear(16, 4), inputs=torch.empty(1, 16), loss=loss)
        return estimate(job, gpu="T4", workspaces=False).peak(4096)

    weight = 512 if getattr(criterion, "weight", None) is not None else 0
    assert peak(criterion) == peak(name) + weight


def test_a_loss_that_is_called_with_outputs_and_inputs_says_so():
    job = Workload(model=torch.nn.Linear(16, 4), inputs=torch.empty(1, 16),
                   loss=lambda outputs, inputs: outputs)  # fmt: skip
    with pytest.raises(WorkloadError, match=r"called with \(outputs, inputs\)"):
        estimate(job, gpu="T4")


def test_the_reserve_of_a_recurrent_network_is_no_tensor_to_index():
    job = Workload(model=Recurrent(), inputs=torch.empty(1, 200, 64), loss="sum")
    answer = estimate(job, gpu="T4").answer()
    assert answer.outcome is Outcome.FITS and answer.batch > 1000


class Recurrent(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = torch.nn.LSTM(64, 256, 2, bidirectional=True, batch_first=True)

    def forward(self, x):
        return self.rnn(x)[0]


@pytest.mark.parametrize("gpu", [0, "cuda:0", None.__class__])
def test_a_gpu_is_named_by_its_model(gpu):
    with pytest.raises(TargetError, match="rtx-3090"):
        estimate(torch.nn.Linear(2, 2), torch.empty(1, 2), gpu=gpu, loss="sum")


def test_peak_range_is_never_the_wrong_way_round():
    layers = torch.nn.Sequential(*[torch.nn.Conv2d(8, 8, 3, padding=1) for _ in range(6)])
    job = Workload(model=layers, inputs=torch.empty(1, 8, 32, 32), loss="sum")
    made = estimate(job, gpu="A100 80GB")
    for batch in (1, 7, 32, 100, 1000):
        low, high = made.peak_range(batch)
        assert low <= high == made.peak(batch)
