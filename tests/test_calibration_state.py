"""A probe leaves no trace: every tensor, random stream and flag is as before, whatever happened."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from batchfit.calibration import calibrate, find_meter
from batchfit.calibration.discover import discover
from batchfit.calibration.job import Job
from batchfit.calibration.probes import ProbeOptions, run_probe
from batchfit.calibration.state import preserved
from batchfit.estimator import Workload


class Net(nn.Module):
    """Batch norm, dropout, a frozen and a tied weight, a counter and a cached tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.5)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.two = nn.Linear(8, 8)
        self.two.weight = self.one.weight
        self.calls = 0
        self.cache: Any = None
        self.seen = [torch.zeros(2)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.cache = x.detach()
        self.seen[0] += 1
        return self.two(self.frozen(self.drop(self.norm(self.one(x)))))


def usual_flags() -> None:
    torch.backends.cudnn.benchmark = False
    torch.set_float32_matmul_precision("highest")


@pytest.fixture(autouse=True)
def flags_of_the_other_tests() -> Iterator[None]:
    yield
    usual_flags()


class Training:
    """A user's own training objects, in the middle of a run."""

    def __init__(self, optimizer: str = "AdamW", steps: int = 2) -> None:
        torch.manual_seed(0)
        self.model = Net()
        params = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = getattr(torch.optim, optimizer)(params, lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
        self.failure: BaseException | None = None
        self.after = 1
        for _ in range(steps):
            self.step(4)
        usual_flags()
        self.model.eval()
        self.model.norm.train()
        self.model.one.weight.grad = torch.ones(8, 8)
        self.failing_calls = 0

    def step(self, batch: int) -> None:
        if self.failure is not None:
            self.failing_calls += 1
        self.model.train()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = self.model(torch.randn(batch, 8)).float().square().mean()
        self.scaler.scale(loss).backward()
        random.random(), np.random.rand()
        torch.backends.cudnn.benchmark = True
        torch.set_float32_matmul_precision("high")
        torch.use_deterministic_algorithms(True)
        if self.failure is not None and self.failing_calls > self.after:
            raise self.failure
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.scheduler.step()
        torch.use_deterministic_algorithms(False)
        torch.set_grad_enabled(False)
        torch.set_grad_enabled(True)

    def snapshot(self) -> dict[str, Any]:
        """Everything there is, as plain comparable values."""
        state = {
            f"state {i} {key}": value
            for i, values in enumerate(self.optimizer.state.values())
            for key, value in values.items()
        }
        return {
            **{f"param {n}": p for n, p in self.model.named_parameters()},
            **{f"buffer {n}": b for n, b in self.model.named_buffers()},
            **{f"grad {n}": p.grad for n, p in self.model.named_parameters()},
            **{f"requires {n}": p.requires_grad for n, p in self.model.named_parameters()},
            **{f"mode {n}": m.training for n, m in self.model.named_modules()},
            **state,
            "states": len(self.optimizer.state),
            "groups": [{k: v for k, v in g.items() if k != "params"}
                       for g in self.optimizer.param_groups],
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
            "attributes": (self.model.calls, self.model.cache, self.model.seen[0]),
            "python": random.getstate(),
            "numpy": [np.array(v).tolist() for v in np.random.get_state()[1:3]],
            "torch": torch.get_rng_state(),
            "flags": (
                torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic,
                torch.get_float32_matmul_precision(), torch.is_grad_enabled(),
                torch.are_deterministic_algorithms_enabled(), torch.is_autocast_enabled("cpu"),
            ),
        }  # fmt: skip


def copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {k: copied(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(copied(v) for v in value)
    return value


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype is b.dtype and torch.equal(a.detach(), b.detach())
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [k for k in {*before, *after} if not same(before.get(k), after.get(k))]


OOM = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
@pytest.mark.parametrize("steps", [0, 2], ids=["newborn", "running"])
@pytest.mark.parametrize(
    ("failure", "caught"),
    [
        (None, None),
        (OOM, None),
        (ValueError("no"), ValueError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
    ids=["success", "out of memory", "an error", "ctrl-c"],
)  # fmt: skip
def test_everything_is_as_before(
    optimizer: str, steps: int, failure: BaseException | None, caught: Any
) -> None:
    training = Training(optimizer, steps)
    before = copied(training.snapshot())
    pointers = [p.data_ptr() for p in training.model.parameters()]
    training.failure = failure
    meter = find_meter("cpu")
    job = Job(training.step, meter.device, ())
    # what the step does really changes all these things
    if caught is None:
        probe = run_probe(job, meter, 4, 2**40, ProbeOptions(2, 1))
        assert probe.ran is (failure is None)
    else:
        with pytest.raises(caught):
            run_probe(job, meter, 4, 2**40, ProbeOptions(2, 1))
    assert differences(before, training.snapshot()) == []
    assert pointers == [p.data_ptr() for p in training.model.parameters()]
    assert training.model.two.weight is training.model.one.weight


def test_the_comparison_notices_every_kind_of_change() -> None:
    training = Training()
    before = copied(training.snapshot())
    training.step(4)
    changed = differences(before, training.snapshot())
    for kind in ("param one.weight", "buffer norm.running_mean", "grad one.weight", "mode drop",
                 "state 0 exp_avg", "groups", "scheduler", "scaler", "attributes", "python",
                 "numpy", "torch", "flags"):  # fmt: skip
        assert kind in changed


def test_training_goes_on_as_if_nothing_had_happened() -> None:
    def losses(probe: bool) -> list[float]:
        training = Training()
        if probe:
            calibrate(training.step, device="cpu", budget="4MiB", cap=64)
        result = []
        for _ in range(3):
            training.step(4)
            result.append(training.model.one.weight.sum().item())
        return result

    assert losses(probe=True) == losses(probe=False)


def test_a_workload_on_the_users_module_leaves_it_alone() -> None:
    model = Net()
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    work = Workload(
        model=model, inputs=lambda b: torch.randn(b, 8), loss="sum", optimizer=optimizer
    )
    before = copied(dict(model.state_dict()))
    stream = torch.get_rng_state()
    made = calibrate(work, device="cpu", budget="1MiB", cap=256)
    assert made.largest_batch() == 256
    assert differences(before, dict(model.state_dict())) == []
    assert model.calls == 0 and model.cache is None and not optimizer.state
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(stream, torch.get_rng_state())


def test_a_module_that_is_converted_comes_back() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    work = Workload(model=model, inputs=lambda b: torch.randn(b, 8), loss="sum", precision="bf16")
    before = copied(dict(model.state_dict()))
    calibrate(work, device="cpu", budget="1MiB", cap=64)
    assert differences(before, dict(model.state_dict())) == []
    assert model[0].weight.dtype is torch.float32


def test_views_of_weights_still_alias_them() -> None:
    model = nn.Linear(4, 4)
    flat = model.weight.detach().view(-1)
    with preserved([model]):
        model.weight.data.mul_(3)
    model.weight.data[0, 0] = 7.0
    assert flat[0] == 7.0


def test_replaced_tensors_and_removed_buffers_come_back() -> None:
    model = Net()
    weight, mean = model.one.weight, model.norm.running_mean
    with preserved([model]):
        model.one.weight = nn.Parameter(torch.zeros(8, 8))
        model.norm.running_mean = torch.full((8,), 9.0)
        model.extra = 3
        model.register_buffer("more", torch.zeros(1))
        model.frozen.requires_grad_(True)
    assert model.one.weight is weight and model.norm.running_mean is mean
    assert not hasattr(model, "extra") and not hasattr(model, "more")
    assert not model.frozen.weight.requires_grad


GLOBAL = nn.Linear(2, 2)


def uses_a_global(batch: int) -> None:
    GLOBAL(torch.zeros(batch, 2))


def test_what_a_function_can_reach_is_found() -> None:
    from functools import partial

    inner, other, third = nn.Linear(2, 2), nn.Linear(3, 3), nn.Linear(4, 4)
    optimizer = torch.optim.SGD(other.parameters())

    class Trainer:
        def __init__(self) -> None:
            self.parts = {"model": other, "rest": [optimizer]}

        def step(self, batch: int) -> None: ...

    def closure(batch: int, model: nn.Module = third) -> None:
        inner(torch.zeros(batch, 2))

    def nested(batch: int) -> None:
        closure(batch)

    def has(function: Callable[..., Any], *objects: Any) -> bool:
        return {id(o) for o in objects} <= {id(o) for o in discover(function)}

    assert has(nested, inner, third)
    assert has(Trainer().step, other, optimizer)
    assert has(partial(uses_a_global, 3), GLOBAL)
    assert not has(uses_a_global, inner)
