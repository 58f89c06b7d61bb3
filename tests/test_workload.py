"""Every option of a workload does what it says; every mistake gets one line with what to do."""

from __future__ import annotations

from collections import namedtuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from batchfit.estimator import (
    BatchfitError,
    Category,
    DataDependentError,
    Phase,
    TargetError,
    TraceError,
    Workload,
    WorkloadError,
    estimate,
)
from batchfit.estimator.losses import LOSSES
from batchfit.estimator.optimizers import optimizer_names, parse_optimizer
from batchfit.estimator.workload import PRECISIONS

from .helpers import A100, quick, run, run_step


def linear():
    return nn.Linear(8, 4)


def rows(b):
    return torch.empty(b, 8)


def job(**options):
    return Workload(**{"model": linear, "inputs": rows, "loss": "mse", **options})


def images(**options):
    base = {
        "model": lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)),
        "inputs": lambda b: torch.empty(b, 3, 16, 16),
        "loss": "sum",
    }
    return Workload(**{**base, **options})


def one_line(caught, *words):
    """The message is one line, and says these things."""
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


# -- precision -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "weights", "cast"),
    [
        # 8 x 4 x itemsize; the copy that autocast makes: 8 x 4 x 2
        ("fp32", 128, None),
        ("tf32", 128, None),
        ("amp-fp16", 128, 64),
        ("amp-bf16", 128, 64),
        ("bf16", 64, None),
        ("fp16", 64, None),
    ],
)
def test_precision(precision, weights, cast):
    made = run(job(precision=precision))
    assert made.sizes(category=Category.PARAMETERS)[0] == weights
    copies = made.sizes(category=Category.AUTOCAST_COPIES)
    assert (copies[0] if copies else None) == cast
    # gradients have the dtype of the weights
    assert weights in made.sizes(category=Category.GRADIENTS)
    # only amp-fp16 scales the loss: scale and growth tracker stay
    kept = [s for s in made.find("full") if s.death is None]
    assert len(kept) == (2 if precision == "amp-fp16" else 0)


def test_every_precision_is_tested():
    assert set(PRECISIONS) == {"fp32", "tf32", "amp-fp16", "amp-bf16", "bf16", "fp16"}


def test_integer_inputs_stay_integers():
    work = Workload(
        model=lambda: nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 10)),
        inputs=lambda b: torch.zeros(b, 4, dtype=torch.long),
        precision="bf16",
    )
    made = run(work, 2)
    # tokens 2 x 4 x 8 = 64, and the targets the same
    assert made.sizes(category=Category.INPUTS, step=1) == [64, 64]


# -- options -------------------------------------------------------------------------------------


def test_channels_last_makes_inputs_and_weights_so():
    seen = []

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 3)

        def forward(self, x):
            for tensor in (x, self.conv.weight, self.conv(x)):
                seen.append(tensor.is_contiguous(memory_format=torch.channels_last))
            return self.conv(x)

    run(images(model=Net, memory_format="channels_last"))
    assert seen == [True] * 6
    seen.clear()
    run(images(model=Net))
    assert seen == [False] * 6


def test_checkpointing_uses_the_switch_of_the_model():
    called = []

    class Net(nn.Linear):
        def __init__(self):
            super().__init__(8, 4)

        def gradient_checkpointing_enable(self):
            called.append("hf")

    class Other(nn.Linear):
        def __init__(self):
            super().__init__(8, 4)

        def set_grad_checkpointing(self):
            called.append("timm")

    run(job(model=Net, checkpointing=True))
    run(job(model=Other, checkpointing=True))
    assert called == ["hf", "timm"]
    run(job(model=Net))
    assert called == ["hf", "timm"]


def test_checkpointing_of_a_model_without_a_switch():
    with pytest.raises(WorkloadError) as caught:
        run(job(checkpointing=True))
    one_line(caught, "Linear", "torch.utils.checkpoint")


@pytest.mark.parametrize("count", [1, 2, 5])
def test_accumulation_runs_so_many_micro_batches(count):
    made = run(job(accumulate=count))
    for step in (1, 2):
        assert len(made.find("addmm", step=step)) == count
        assert len([m for m in made.timeline.marks if m[1:] == (Phase.BACKWARD, step)]) == count
        assert len([m for m in made.timeline.marks if m[1:] == (Phase.OPTIMIZER, step)]) == 1


def test_evaluation_runs_in_evaluation_mode_without_gradients():
    seen = []

    class Net(nn.Linear):
        def forward(self, x):
            seen.append((self.training, torch.is_grad_enabled()))
            return super().forward(x)

    run(job(model=lambda: Net(8, 4), evaluate=True), steps=1)
    assert seen == [(True, True), (False, False)]


def test_inference_runs_in_evaluation_mode_without_gradients():
    seen = []

    class Net(nn.Linear):
        def forward(self, x):
            seen.append((self.training, torch.is_grad_enabled()))
            return super().forward(x)

    made = run(job(model=lambda: Net(8, 4), inference=True), steps=1)
    assert seen == [(False, False)]
    categories = {s.category for s in made.storages}
    assert not categories & {Category.GRADIENTS, Category.OPTIMIZER_STATE}


def test_targets_are_made_as_the_user_says():
    made = run(job(loss="cross_entropy", targets=lambda b: torch.zeros(b, 4)), 4)
    # inputs 4 x 8 x 4 = 128; soft targets (class probabilities) 4 x 4 x 4 = 64
    assert made.sizes(category=Category.INPUTS, step=1) == [128, 64]


def test_with_changes_one_thing():
    work = job()
    other = work.with_(accumulate=2)
    assert (work.accumulate, other.accumulate) == (1, 2)
    assert other.model is work.model
    with pytest.raises(TypeError):
        work.with_(nonsense=1)


def test_a_workload_is_frozen_and_keyword_only():
    with pytest.raises(AttributeError):
        job().accumulate = 3
    with pytest.raises(TypeError):
        Workload(linear, rows)


def test_describe_is_plain():
    import json

    for work in (
        job(),
        job(optimizer=torch.optim.SGD),
        job(optimizer=(torch.optim.SGD, {"lr": 0.1})),
        job(optimizer=lambda p: torch.optim.SGD(p)),
        job(optimizer=None, loss=lambda o, i: o.sum()),
        job(inference=True),
        Workload.from_step(lambda device: lambda batch: None, name="mine"),
    ):
        assert json.loads(json.dumps(work.describe())) == work.describe()
    assert job().describe()["optimizer"] == "adamw"
    assert job(optimizer=torch.optim.SGD).describe()["optimizer"] == "SGD"
    assert job(loss=None).describe()["loss"] == "auto"
    assert job(inference=True).describe()["form"] == "inference"


# -- inputs --------------------------------------------------------------------------------------


class Sum(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x, y=None, more=None):
        x = self.layer(x)
        if y is not None:
            x = x + self.layer(y)
        if more is not None:
            x = x + self.layer(more["z"][0])
        return x


Pair = namedtuple("Pair", ["x", "y"])
BYTES = 8 * 4  # one row of inputs


@pytest.mark.parametrize(
    ("inputs", "tensors"),
    [
        (lambda b: torch.empty(b, 8), 1),
        (lambda b: (torch.empty(b, 8), torch.empty(b, 8)), 2),
        (lambda b: [torch.empty(b, 8), torch.empty(b, 8)], 2),
        (lambda b: {"x": torch.empty(b, 8), "y": torch.empty(b, 8)}, 2),
        (lambda b: Pair(torch.empty(b, 8), torch.empty(b, 8)), 2),
        (lambda b: {"x": torch.empty(b, 8), "more": {"z": [torch.empty(b, 8)]}}, 2),
        (torch.empty(3, 8), 1),
        ((torch.empty(3, 8), torch.empty(3, 8)), 2),
        ({"x": torch.empty(3, 8), "y": torch.empty(3, 8)}, 2),
        (Pair(torch.empty(3, 8), torch.empty(3, 8)), 2),
        ({"x": torch.empty(3, 8), "more": {"z": [torch.empty(3, 8)]}}, 2),
        ((torch.empty(3, 8), None), 1),
    ],
)
@pytest.mark.parametrize("batch", [1, 5])
def test_inputs_of_every_kind(inputs, tensors, batch):
    made = run(Workload(model=Sum, inputs=inputs, loss="sum"), batch)
    assert made.sizes(category=Category.INPUTS, step=1) == [batch * BYTES] * tensors


def test_example_inputs_keep_what_is_no_tensor():
    work = Workload(model=Sum, inputs=(torch.empty(3, 8), torch.empty(3, 8)), loss="sum")
    one = work.host_inputs(7)
    assert type(one) is tuple
    assert [t.shape for t in one] == [(7, 8), (7, 8)]
    work = Workload(model=Sum, inputs={"x": torch.empty(3, 8), "flag": True}, loss="sum")
    assert work.host_inputs(7)["flag"] is True


def test_batch_dimension_of_example_inputs():
    work = Workload(model=Sum, inputs=torch.empty(5, 3, 8), batch_dim=1, loss="sum")
    assert work.host_inputs(7).shape == (5, 7, 8)
    assert run(work, 7).sizes(category=Category.INPUTS, step=1) == [5 * 7 * BYTES]


def test_integers_of_an_example_are_repeated():
    work = job(inputs=torch.tensor([[1, 2], [3, 4], [5, 6]]))
    assert work.host_inputs(5).tolist() == [[1, 2], [3, 4], [5, 6], [1, 2], [3, 4]]
    assert work.host_inputs(1).tolist() == [[1, 2]]


def test_example_inputs_are_not_changed():
    example = torch.ones(3, 8)
    work = job(inputs=example)
    run(work, 7)
    assert example.shape == (3, 8)
    assert example.sum() == 24
    assert not example.requires_grad


# -- losses --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in LOSSES if n != "model"])
def test_losses_by_name(name):
    made = run(job(loss=name), 4)
    assert made.find(category=Category.GRADIENTS)
    # inputs 128; targets: class numbers 4 x 8, or as the output 4 x 4 x 4, or none
    targets = {"cross_entropy": [32], "sum": [], "mean": []}.get(name, [64])
    assert made.sizes(category=Category.INPUTS, step=1) == [128, *targets]


class WithLoss(nn.Module):
    def __init__(self, kind=dict):
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.kind = kind

    def forward(self, x):
        logits = self.layer(x)
        return self.kind(loss=logits.square().sum(), logits=logits)


Output = namedtuple("Output", ["loss", "logits"])


@pytest.mark.parametrize("kind", [dict, Output])
@pytest.mark.parametrize("loss", [None, "model"])
def test_loss_of_the_model(kind, loss):
    made = run(job(model=lambda: WithLoss(kind), loss=loss), 4)
    assert made.sizes(category=Category.INPUTS, step=1) == [128]  # no targets are made
    assert made.find(category=Category.GRADIENTS)


def test_loss_of_a_model_that_has_none():
    with pytest.raises(WorkloadError) as caught:
        run(job(loss="model"))
    one_line(caught, "labels", "cross_entropy")


def test_without_a_loss_cross_entropy_is_taken():
    assert run(job(loss=None), 4).sizes(category=Category.INPUTS, step=1) == [128, 32]


def test_callable_loss():
    seen = []

    def loss(outputs, inputs):
        seen.append((outputs.shape, inputs.shape))
        return F.mse_loss(outputs, inputs[:, :4])

    run(job(loss=loss), 5)
    assert seen == [((5, 4), (5, 8))] * 2


@pytest.mark.parametrize("bad", [lambda o, i: o, lambda o, i: 1.0, lambda o, i: None])
def test_callable_loss_must_give_a_scalar_tensor(bad):
    with pytest.raises(WorkloadError) as caught:
        run(job(loss=bad))
    one_line(caught, "scalar")


def test_targets_of_language_models_and_segmentation():
    language = Workload(
        model=lambda: nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 10)),
        inputs=lambda b: torch.zeros(b, 6, dtype=torch.long),
        loss="cross_entropy",
    )
    # classes are last: (N, T, V) logits, (N, T) targets: 2 x 6 x 8 = 96 bytes, as the tokens
    assert run(language).sizes(category=Category.INPUTS, step=1) == [96, 96]
    pixels = images(loss="cross_entropy")
    # logits (2, 8, 12, 12): targets 2 x 12 x 12 x 8 = 2304; inputs 2 x 3 x 16 x 16 x 4 = 6144
    assert run(pixels).sizes(category=Category.INPUTS, step=1) == [6144, 2304]


def test_cross_entropy_of_flat_outputs():
    with pytest.raises(WorkloadError) as caught:
        run(job(model=lambda: nn.Sequential(nn.Linear(8, 1), nn.Flatten(0)), loss="cross_entropy"))
    one_line(caught, "cross_entropy", "callable")


def test_auxiliary_outputs_count():
    class Aux(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(8, 4), nn.Linear(8, 4)

        def forward(self, x):
            return {"out": self.one(x), "aux": self.two(x)}

    made = run(job(model=Aux))
    # each loss is a scratch buffer of every element and the result
    assert len(made.find("mse_loss", step=1)) == 4


def test_outputs_without_a_tensor():
    class Nothing(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 4)

        def forward(self, x):
            self.layer(x)
            return 3

    with pytest.raises(WorkloadError) as caught:
        run(job(model=Nothing))
    one_line(caught, "int", "loss=callable")


# -- optimizers ----------------------------------------------------------------------------------

SKIP = {"lbfgs", "sparseadam"}


@pytest.mark.parametrize("name", sorted(set(optimizer_names()) - SKIP))
def test_every_optimizer_of_torch(name):
    # Muon takes matrices only
    model = (lambda: nn.Linear(8, 4, bias=False)) if name == "muon" else linear
    made = run(job(model=model, optimizer=name))
    stateless = {"sgd:momentum=0"}
    assert bool(made.find(category=Category.OPTIMIZER_STATE)) == (name not in stateless)


@pytest.mark.parametrize(
    ("spec", "kind", "arguments"),
    [
        ("adamw", torch.optim.AdamW, {}),
        ("AdamW", torch.optim.AdamW, {}),
        ("sgd", torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        ("sgd:momentum=0", torch.optim.SGD, {"lr": 0.1, "momentum": 0}),
        (
            "sgd:momentum=0.5, nesterov=True",
            torch.optim.SGD,
            {"lr": 0.1, "momentum": 0.5, "nesterov": True},
        ),
        ("adamw:betas=0.9", torch.optim.AdamW, {"betas": 0.9}),
        ("adam:lr=1e-4,fused=True", torch.optim.Adam, {"lr": 1e-4, "fused": True}),
    ],
)
def test_parse_optimizer(spec, kind, arguments):
    assert parse_optimizer(spec) == (kind, arguments)


def test_parse_optimizer_reads_tuples():
    assert parse_optimizer("adamw:betas=(0.9,0.95)") == (torch.optim.AdamW, {"betas": (0.9, 0.95)})


def test_no_optimizer():
    assert parse_optimizer("none") is None
    made = run(job(optimizer="none"))
    assert not made.find(phase=Phase.OPTIMIZER)
    assert made.peak == run(job(optimizer=None)).peak


@pytest.mark.parametrize(
    "spec",
    [
        "sgd:momentum=0.9",
        torch.optim.SGD,
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        ("sgd", {"momentum": 0.9}),
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    ],
)
def test_optimizer_in_every_form(spec):
    made = run(job(optimizer=spec))
    momentum = spec is not torch.optim.SGD
    assert made.sizes(category=Category.OPTIMIZER_STATE) == ([128, 16] if momentum else [])


def test_existing_optimizer_keeps_its_groups():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(
        [
            {"params": model[0].parameters(), "momentum": 0.9},
            {"params": model[1].parameters(), "momentum": 0.0},
        ],
        lr=0.1,
    )
    made = run(job(model=model, optimizer=optimizer))
    # momentum of the first layer only: 8 x 8 x 4 = 256 and 8 x 4 = 32
    assert made.sizes(category=Category.OPTIMIZER_STATE) == [256, 32]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("adamv", ["adamv", "did you mean", "adam"]),
        ("qqq", ["qqq", "torch.optim"]),
        ("sgd:momentum", ["momentum", "key=value"]),
        ("sgd:momentum=a b", ["momentum", "key=value"]),
    ],
)
def test_optimizer_that_does_not_exist(spec, words):
    with pytest.raises(TargetError) as caught:
        job(optimizer=spec)
    one_line(caught, *words)


@pytest.mark.parametrize(
    "spec",
    [
        "sgd:speed=3",
        "adamw:lr=-1",
        (torch.optim.SGD, {"speed": 3}),
        lambda params: torch.optim.SGD(params, speed=3),
    ],
)
def test_optimizer_that_refuses_its_arguments(spec):
    with pytest.raises(WorkloadError) as caught:
        run(job(optimizer=spec))
    one_line(caught, "optimizer")


def test_optimizer_that_is_none_of_these():
    with pytest.raises(WorkloadError) as caught:
        run(job(optimizer=lambda params: 3))
    one_line(caught, "int", "step()")


@pytest.mark.parametrize("bad", [3, 1.5, object(), nn.Linear(1, 1)])
def test_optimizer_of_a_wrong_type(bad):
    with pytest.raises(WorkloadError) as caught:
        run(job(optimizer=bad))
    one_line(caught, "optimizer")


def test_optimizer_of_another_model():
    other = torch.optim.SGD(nn.Linear(3, 3).parameters(), lr=0.1)
    with pytest.raises(WorkloadError) as caught:
        run(job(model=linear(), optimizer=other))
    one_line(caught, "optimizer", "factory")


# -- step functions ------------------------------------------------------------------------------


def test_gan_with_two_optimizers():
    def build(device):
        generator = nn.Linear(16, 64, device=device)
        critic = nn.Linear(64, 1, device=device)
        first = torch.optim.AdamW(generator.parameters())
        second = torch.optim.SGD(critic.parameters(), lr=0.1, momentum=0.9)

        def step(batch):
            real = torch.randn(batch, 64, device=device)
            fake = generator(torch.randn(batch, 16, device=device))
            loss = critic(fake.detach()).mean() - critic(real).mean()
            second.zero_grad()
            loss.backward()
            second.step()
            first.zero_grad()
            (-critic(fake).mean()).backward()
            first.step()

        return step

    made = run_step(build, 4)
    # parameters: 16 x 64 x 4 = 4096, 256; 64 x 4 = 256, 4
    assert made.sizes(category=Category.PARAMETERS) == [4096, 256, 256, 4]
    # momentum of the critic, two moments of the generator
    states = sorted(made.sizes(category=Category.OPTIMIZER_STATE))
    assert states == [4, 256, 256, 256, 4096, 4096]
    assert {s.module for s in made.find(category=Category.PARAMETERS)} <= {
        "", "Linear_0", "Linear_1",
    }  # fmt: skip
    assert len([m for m in made.timeline.marks if m[1:] == (Phase.OPTIMIZER, 1)]) == 2
    assert quick(Workload.from_step(build)).affine


@pytest.mark.parametrize("value", [None, 3, nn.Linear])
def test_build_must_return_a_function(value):
    work = Workload.from_step(lambda device: value)
    if callable(value):
        with pytest.raises(BatchfitError):
            run(work)
        return
    with pytest.raises(WorkloadError) as caught:
        run(work)
    one_line(caught, type(value).__name__, "step(batch)")


def test_step_function_excludes_model_and_inputs():
    with pytest.raises(WorkloadError) as caught:
        Workload(build=lambda device: None, model=linear)
    one_line(caught, "no model")


def test_step_function_gets_a_cuda_device():
    seen = []

    def build(device):
        seen.append(device)
        return lambda batch: seen.append(batch)

    run_step(build, 5)
    assert seen == [torch.device("cuda", 0), 5, 5]


# -- mistakes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [None, 3, "resnet50", torch.empty(2)])
def test_model_of_a_wrong_kind(model):
    with pytest.raises(WorkloadError) as caught:
        Workload(model=model, inputs=rows)
    one_line(caught, "model must be")


@pytest.mark.parametrize("value", [None, 3, torch.empty(2), [nn.Linear(1, 1)]])
def test_model_function_that_gives_no_module(value):
    with pytest.raises(WorkloadError) as caught:
        run(job(model=lambda: value))
    one_line(caught, type(value).__name__, "torch.nn.Module")


def test_model_function_that_fails():
    with pytest.raises(WorkloadError) as caught:
        run(job(model=lambda: nn.Linear("a", 3)))
    one_line(caught, "could not be built")


def test_inputs_are_missing():
    with pytest.raises(WorkloadError) as caught:
        Workload(model=linear)
    one_line(caught, "inputs are missing", "lambda b")


@pytest.mark.parametrize(
    ("option", "value"),
    [("precision", "fp8"), ("memory_format", "nhwc"), ("loss", "hinge"), ("precision", "FP32")],
)
def test_option_that_does_not_exist(option, value):
    with pytest.raises(WorkloadError) as caught:
        job(**{option: value})
    one_line(caught, option, value, "one of")


@pytest.mark.parametrize("value", [0, -1])
def test_accumulate_must_be_positive(value):
    with pytest.raises(WorkloadError) as caught:
        job(accumulate=value)
    one_line(caught, "accumulate", str(value))


@pytest.mark.parametrize("value", [1.5, "2", True, None])
def test_accumulate_must_be_an_integer(value):
    with pytest.raises(WorkloadError) as caught:
        job(accumulate=value)
    one_line(caught, "accumulate")


def test_inputs_of_a_wrong_shape():
    with pytest.raises(BatchfitError) as caught:
        run(job(inputs=lambda b: torch.empty(b, 9)))
    one_line(caught, "forward", "shapes")
    assert isinstance(caught.value, TraceError)


def test_inputs_of_a_wrong_shape_name_the_module():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(9, 4))
    with pytest.raises(TraceError) as caught:
        run(job(model=model))
    one_line(caught, "'1'")


def test_inputs_of_a_wrong_dtype():
    with pytest.raises(TraceError) as caught:
        run(job(inputs=lambda b: torch.zeros(b, 8, dtype=torch.long)))
    one_line(caught, "dtype")


def test_inputs_that_the_model_does_not_take():
    with pytest.raises(TraceError) as caught:
        run(job(inputs=lambda b: {"pixels": torch.empty(b, 8)}))
    one_line(caught, "pixels")


def test_inputs_function_that_fails():
    def bad(batch):
        raise KeyError("no such file")

    with pytest.raises(BatchfitError) as caught:
        run(job(inputs=bad))
    one_line(caught, "no such file")


def test_embedding_index_is_not_checked_but_shape_is():
    work = Workload(
        model=lambda: nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 10)),
        inputs=lambda b: torch.empty(b, 4),
        loss="cross_entropy",
    )
    with pytest.raises(TraceError) as caught:
        run(work)
    one_line(caught, "indices")


@pytest.mark.parametrize("batch", [0, -1, True, 1.5, 8.0, "8", None])
def test_batch_must_be_a_positive_integer(batch):
    made = quick(job())
    for ask in (made.peak, made.reserved, made.breakdown, made.fits, made.timeline):
        with pytest.raises(WorkloadError) as caught:
            ask(batch)
        one_line(caught, "positive integer", repr(batch))


def test_lazy_module():
    with pytest.raises(WorkloadError) as caught:
        run(job(model=nn.LazyLinear(4)))
    one_line(caught, "weight", "lazy")


def test_lazy_module_of_a_function():
    with pytest.raises(WorkloadError) as caught:
        run(job(model=lambda: nn.LazyLinear(4)))
    one_line(caught, "Lazy")


def test_loss_without_gradient():
    with pytest.raises(WorkloadError) as caught:
        run(job(loss=lambda o, i: o.detach().sum(), optimizer=None))
    one_line(caught, "inference=True")


def test_model_without_trainable_parameters():
    with pytest.raises(WorkloadError) as caught:
        run(job(model=nn.ReLU, loss="sum"))
    one_line(caught, "gradient")


def test_frozen_model():
    with pytest.raises(WorkloadError) as caught:
        run(job(model=linear().requires_grad_(False)))
    one_line(caught, "gradient", "optimizer=None")
    assert run(job(model=linear().requires_grad_(False), inference=True)).peak > 0


def test_model_that_reads_data():
    class Reads(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return y * int(y.argmax())

    with pytest.raises(DataDependentError) as caught:
        run(job(model=lambda: Reads(8, 4)))
    one_line(caught, "test_workload.py", "int")


def test_short_form_needs_a_module():
    for bad in (3, "resnet50", linear, None):
        with pytest.raises(WorkloadError) as caught:
            estimate(bad, torch.empty(2, 8), gpu=A100)
        one_line(caught, "Workload", "module")


def test_short_form_with_an_unknown_option():
    with pytest.raises(WorkloadError) as caught:
        estimate(linear(), torch.empty(2, 8), gpu=A100, optimiser="adam")
    one_line(caught, "optimiser", "estimate()")


def test_workload_goes_with_no_options():
    with pytest.raises(WorkloadError) as caught:
        estimate(job(), loss="mse", gpu=A100)
    one_line(caught, "loss")
    with pytest.raises(WorkloadError) as caught:
        estimate(job(), torch.empty(2, 8), gpu=A100)
    one_line(caught, "example_inputs")


def test_gpu_that_does_not_exist():
    with pytest.raises(TargetError) as caught:
        estimate(job(), gpu="A1000000")
    one_line(caught, "A1000000")


def test_attention_that_does_not_exist():
    with pytest.raises(WorkloadError) as caught:
        estimate(job(), gpu=A100, attention="eager")
    one_line(caught, "eager", "math")


def test_allocator_settings_that_cannot_be_read():
    with pytest.raises(WorkloadError) as caught:
        estimate(job(), gpu=A100, allocator="max_split_size_mb:many")
    one_line(caught, "many", "whole number")
