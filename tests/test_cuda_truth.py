"""benchmarks/cuda_truth.py without a GPU: a simulated card, and processes that misbehave."""

from __future__ import annotations

import importlib
import io
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from torch import nn

from batchfit.estimator import Workload, estimate, find_gpu
from batchfit.estimator.snapshot import predicted_snapshot
from batchfit.estimator.snapshot_compare import compare

from .helpers import GIB, MIB
from .simulated_card import SimulatedCard

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))
script = importlib.import_module("cuda_truth")
device = importlib.import_module("gpu_truth.device")
jobs = importlib.import_module("gpu_truth.jobs")
convnets = importlib.import_module("gpu_truth.convnets")
largest = importlib.import_module("gpu_truth.largest")
reader = importlib.import_module("gpu_truth.reader")
results = importlib.import_module("gpu_truth.results")
running = importlib.import_module("gpu_truth.running")
schedule = importlib.import_module("gpu_truth.schedule")
worker = importlib.import_module("gpu_truth.worker")
workspaces = importlib.import_module("gpu_truth.workspaces")

CARD = {
    "name": "NVIDIA A100-SXM4-80GB", "vendor": "nvidia", "total_bytes": 85_094_825_984,
    "capability": [8, 0], "sm_count": 108, "threads_per_sm": 2048, "torch": "x",
}  # fmt: skip
A100 = find_gpu("A100 80GB")
SMALL_LIMITS = {"8 GiB": 400 * MIB, "16 GiB": 600 * MIB}
HIDDEN = 90 * MIB


def small_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(14400, 10)
    )  # fmt: skip


def small_job(**changes: Any) -> Any:
    workload = Workload(
        model=small_net, inputs=lambda b: torch.rand(b, 3, 32, 32), loss="cross_entropy",
        name="small", **changes,
    )  # fmt: skip
    return jobs.Job("small", "CNN", lambda: workload, (2, 4, 8), True)


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits that a small job meets."""
    monkeypatch.setattr(worker, "LIMITS", SMALL_LIMITS)


def measure(job: Any, card: SimulatedCard, seconds: float = 60.0, have: Any = ()) -> Any:
    """Every part of a job on a card, by name; "outside" too."""
    made, prediction = worker.predict(job, CARD)
    card._estimate = made
    found: dict[str, Any] = {}

    def emit(message: dict[str, Any]) -> None:
        if "part" in message:
            found[message["part"]] = message["found"]
        else:
            found.update(message)

    clock = worker.Clock(time.monotonic() + seconds)
    try:
        workload = running.with_weights_at_hand(job.make())
        worker.Measuring(job, workload, card, made, prediction, clock).all(list(have), emit)
    finally:
        card.close()
    return prediction, found


# -- the measurements ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def as_predicted() -> Any:
    """(card, prediction, parts) of a card that takes what is predicted."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(worker, "LIMITS", SMALL_LIMITS)
        card = SimulatedCard(A100)
        return card, *measure(small_job(), card)


@pytest.fixture(scope="module")
def takes_more() -> Any:
    """(prediction, parts) of one that takes 90 MiB more."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(worker, "LIMITS", SMALL_LIMITS)
        monkeypatch.setattr(worker, "_MOST_TRIALS", 40)
        return measure(small_job(), SimulatedCard(A100, hidden=HIDDEN))


def test_a_card_that_does_as_predicted_is_measured_so(as_predicted: Any) -> None:
    job, (_, prediction, found) = small_job(), as_predicted
    assert [part for part in found if part != "outside"] == worker.parts_of(job)
    for batch in job.batches:
        predicted, real = prediction["peaks"][str(batch)], found[f"peak {batch}"]
        assert real["allocated"] == predicted["allocated"]
        assert real["reserved"] == predicted["reserved"]
        assert real["optimizer_steps"] == 2
    for name in ("8 GiB", "16 GiB"):
        answer, real = prediction["largest"][name], found[f"largest {name}"]
        assert real["verdict"] == "exact"
        assert real["trials"] == ((answer["batch"], True), (answer["batch"] + 1, False))
        assert list(real["messages"]) == [str(answer["batch"] + 1)]
    assert found["snapshot"]["matched_share"] == 1.0
    assert found["snapshot"]["only_real"] == []
    assert found["snapshot"]["convolution_blocks"] == []
    assert found["outside"] == {"start": A100.context_bytes, "end": A100.context_bytes}


def test_a_card_that_takes_more_is_measured_so(takes_more: Any) -> None:
    prediction, found = takes_more
    for batch in small_job().batches:
        predicted = prediction["peaks"][str(batch)]["allocated"]
        assert found[f"peak {batch}"]["allocated"] == predicted + HIDDEN
    real = found["largest 8 GiB"]
    assert real["verdict"] == "found"
    assert real["fits"] < prediction["largest"]["8 GiB"]["batch"]
    assert (real["fits"], True) in real["trials"]
    assert (real["fits"] + 1, False) in real["trials"]


def test_limits_are_lifted_again(as_predicted: Any) -> None:
    card, _, found = as_predicted
    assert [size for size in card.limits if size] == list(SMALL_LIMITS.values())
    assert card.limits[-1] is None
    assert found["deterministic"]["oom"] == ""


@pytest.mark.usefixtures("small_limits")
def test_what_is_known_is_not_measured_again() -> None:
    job, card = small_job(), SimulatedCard(A100)
    have = [part for part in worker.parts_of(job) if part != "peak 4"]
    _, found = measure(job, card, have=have)
    assert list(found) == ["outside", "peak 4"]


@pytest.mark.usefixtures("small_limits")
def test_without_time_only_the_peaks_are_measured() -> None:
    _, found = measure(small_job(), SimulatedCard(A100), seconds=0.0)
    assert [part for part, was in found.items() if was.get("no_time")] == [
        "largest 8 GiB", "snapshot", "operators", "largest 16 GiB", "deterministic",
    ]  # fmt: skip


def test_limits_larger_than_the_card_are_left_out() -> None:
    _, found = measure(small_job(), SimulatedCard(replace(A100, total_bytes=6 * GIB)))
    assert "no 8 GiB" in found["largest 8 GiB"]["skipped"]
    tiny = SimulatedCard(replace(A100, total_bytes=A100.context_bytes + MIB))
    assert "predicted to reserve" in measure(small_job(), tiny)[1]["peak 2"]["skipped"]


@pytest.mark.usefixtures("small_limits")
def test_an_error_costs_its_part_only() -> None:
    def loss(output: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        if len(inputs) == 4:
            raise RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED")
        return output.sum()

    workload = small_job().make().with_(loss=loss)
    job = jobs.Job("small", "CNN", lambda: workload, (2, 4, 8))
    made, prediction = worker.predict(job, CARD)
    found = {}
    card = SimulatedCard(A100, made)
    clock = worker.Clock(time.monotonic() + 60)
    worker.Measuring(job, workload, card, made, prediction, clock).all(
        [], lambda m: found.update({m["part"]: m["found"]} if "part" in m else {})
    )
    card.close()
    assert "EXECUTION_FAILED" in found["peak 4"]["error"]
    assert found["peak 8"]["allocated"] == prediction["peaks"]["8"]["allocated"]


class Counter:
    """A card without memory: counts, and fails at the steps it is told to."""

    torch_device = torch.device("cpu")
    total = 80 * GIB

    def __init__(self, fail: BaseException | None = None) -> None:
        self.calls: list[str] = []
        self._fail = fail

    def fresh(self) -> tuple[int, int]:
        self.calls.append("fresh")
        return 0, 0

    def peaks(self) -> tuple[int, int]:
        self.calls.append("peaks")
        return 1, 2

    def synchronize(self) -> None:
        self.calls.append("synchronize")
        if self._fail is not None:
            raise self._fail


def test_peaks_are_read_after_the_gpu_is_done_and_before_anything_is_given_back() -> None:
    card = Counter()
    done = running.run(card, small_job().make(), 2)
    once = ["synchronize", "peaks"]
    assert card.calls == ["fresh", *once, *once, "peaks", "fresh"]
    assert (done.allocated, done.reserved, done.after) == (1, 2, ((1, 2), (1, 2)))


def test_steps_that_the_scaler_leaves_out_are_waited_for() -> None:
    """Gradients that overflow at first: the scale halves until they do not."""

    class Steep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.weight * x).half().float() * 20.0

    workload = Workload(
        model=Steep, inputs=lambda b: torch.ones(b, 1), loss="sum", precision="amp-fp16",
        optimizer="sgd:lr=0.0",
    )  # fmt: skip
    done = running.run(Counter(), workload, 4)
    assert done.optimizer_steps == 2
    assert 3 < len(done.after) <= running.MOST_STEPS
    never = workload.with_(inputs=lambda b: torch.full((b, 1), float("inf")))
    assert running.run(Counter(), never, 4).optimizer_steps == 0


@pytest.mark.parametrize(
    ("error", "ran_out"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_which_errors_mean_that_memory_ran_out(error: Exception, ran_out: bool) -> None:
    if not ran_out:
        with pytest.raises(type(error)):
            running.run(Counter(error), small_job().make(), 2)
        return
    done = running.run(Counter(error), small_job().make(), 2)
    assert done.oom == str(error).splitlines()[0]


def test_an_out_of_memory_keeps_nothing_of_the_job_alive() -> None:
    import gc
    import weakref

    alive: list[weakref.ref[nn.Module]] = []

    def model() -> nn.Module:
        made = small_net()
        alive.append(weakref.ref(made))
        return made

    error = torch.OutOfMemoryError("CUDA out of memory")
    running.run(Counter(error), small_job().make().with_(model=model), 2)
    gc.collect()
    assert alive[0]() is None


def test_weights_at_hand_are_the_same_job() -> None:
    job = small_job().make()
    copied = running.with_weights_at_hand(job)
    one, other = copied.model(), copied.model()
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert next(one.parameters()).data_ptr() != next(other.parameters()).data_ptr()
    assert estimate(copied, gpu=A100).peak(8) == estimate(job, gpu=A100).peak(8)


def test_an_lstm_survives_being_copied() -> None:
    """Its flat weights must be those of the copy."""
    made = Workload(
        model=lambda: nn.LSTM(4, 4), inputs=lambda b: torch.rand(3, b, 4), loss="sum", name="lstm"
    )
    copied = running.with_weights_at_hand(made)
    done = running.run(Counter(), copied, 2)
    assert done.optimizer_steps == 2
    assert estimate(copied, gpu=A100).reserved(8) == estimate(made, gpu=A100).reserved(8)


class Said(io.StringIO):
    """The lines of a worker."""

    def messages(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.getvalue().splitlines()]


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize("kind", ["measure", "benchmark"])
def test_a_worker_waits_for_the_word_and_tells_each_part(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said, job, card = Said(), small_job(), SimulatedCard(A100)
    monkeypatch.setattr(worker, "find_job", lambda name: job)
    monkeypatch.setattr(worker, "_private_stdout", lambda: said)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)

    def cuda() -> SimulatedCard:
        assert said.messages()[-1]["ready"]  # nothing is taken on the GPU before the word
        card._estimate = estimate(job.make(), gpu=A100)
        return card

    monkeypatch.setattr(worker, "Cuda", cuda)
    have = [part for part in worker.parts_of(job) if part not in ("peak 2", "snapshot")]
    word = json.dumps({"seconds": 60.0, "have": have}) + "\n"
    monkeypatch.setattr(worker.sys, "stdin", io.StringIO(word))
    try:
        assert worker.main({"job": "small", "kind": kind, "card": CARD}) == 0
    finally:
        card.close()
    messages = said.messages()
    parts = [message["part"] for message in messages if "part" in message]
    assert parts == (["peak 2", "snapshot"] if kind == "measure" else ["benchmark"])
    assert torch.backends.cudnn.benchmark is (kind == "benchmark")
    assert messages[-1] == {"done": True}


def test_a_worker_that_gets_no_word_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    said = Said()
    monkeypatch.setattr(worker, "find_job", lambda name: small_job())
    monkeypatch.setattr(worker, "_private_stdout", lambda: said)
    monkeypatch.setattr(worker.sys, "stdin", io.StringIO(""))
    assert worker.main({"job": "small", "kind": "benchmark", "card": CARD}) == 0
    assert [list(message) for message in said.messages()] == [["ready", "cuda_untouched"]]


# -- the largest batch -----------------------------------------------------------------------------


@given(st.integers(0, 3000), st.integers(0, 3000))
@settings(max_examples=200)
def test_the_search_finds_the_true_batch_from_any_prediction(true: int, predicted: int) -> None:
    found = largest.find_largest(lambda b: b <= true, predicted, 60)
    assert (found.fits, found.fails) == (true, true + 1)
    assert found.verdict is (
        largest.Verdict.EXACT if true == predicted
        else largest.Verdict.FOUND if true else largest.Verdict.NOTHING
    )  # fmt: skip
    if true == predicted:
        assert len(found.trials) <= 2


@given(st.integers(0, 3000), st.integers(0, 3000), st.integers(1, 12))
@settings(max_examples=200)
def test_a_search_cut_short_leaves_a_true_bracket(true: int, predicted: int, most: int) -> None:
    found = largest.find_largest(lambda b: b <= true, predicted, most)
    assert len(found.trials) <= most
    assert found.fits <= true
    assert found.fails is None or found.fails > true
    if found.verdict is not largest.Verdict.BRACKET:
        assert found.fits == true


def test_a_small_miss_costs_few_trials() -> None:
    """Half a per cent off at 2000: outwards by tens, then halving."""
    assert len(largest.find_largest(lambda b: b <= 1990, 2000, 60).trials) <= 7


def test_a_capped_prediction_is_only_confirmed() -> None:
    found = largest.find_largest(lambda b: True, 41, 9, capped=True)
    assert (found.verdict, found.trials) == (largest.Verdict.CAPPED, ((41, True),))


# -- operators and snapshots -----------------------------------------------------------------------


def test_hidden_bytes_are_those_that_are_gone_when_the_call_returns() -> None:
    class Card(Counter):
        """100 B before the call, 130 B after it, and 200 B in between."""

        now = 100

        def allocated(self) -> int:
            return self.now

        def restart_peaks(self) -> None:
            self.now = 130

        def peaks(self) -> tuple[int, int]:
            return 200, 0

    mode = workspaces.HiddenBytes(Card())
    one, other = torch.ones(2, 3).t(), torch.ones(2, 2)
    with mode:
        one @ other
    rows = {row["operator"]: row for row in mode.as_json()}
    assert rows["aten.mm.default"] == {
        "operator": "aten.mm.default", "call": "f32[3,2]/[1,3], f32[2,2]", "hidden_bytes": 70,
        "calls": 1,
    }  # fmt: skip


def test_blocks_of_convolutions_that_nothing_explains() -> None:
    made = estimate(small_job().make(), gpu=A100)
    snapshot = predicted_snapshot(made, 4)
    within = [{"name": "at::_ops::convolution::call(at::Tensor)", "filename": "a.so", "line": 1}]
    events = snapshot["device_traces"][0]
    known = made.timeline_at(4).sizes(4).tolist()
    events.insert(0, {"action": "alloc", "addr": 1, "size": 134_742_016, "frames": within})
    events.insert(0, {"action": "alloc", "addr": 1, "size": 777, "frames": []})
    events.insert(0, {"action": "alloc", "addr": 1, "size": known[0], "frames": within})
    assert workspaces.convolution_blocks(snapshot, known) == [
        {"requested_bytes": 134_742_016, "times": 1}
    ]


def test_what_is_missing_is_told_by_operator() -> None:
    made = estimate(small_job().make(), gpu=A100, workspaces=False)
    whole = estimate(small_job().make(), gpu=A100)
    found = workspaces.comparison_json(compare(made, 4, predicted_snapshot(whole, 4)))
    assert found["matched_share"] < 1
    assert sum(group["bytes"] for group in found["only_real"]) == (
        found["real_allocated"] - found["matched_bytes"]
    )


def test_frames_lose_the_folders_of_the_machine() -> None:
    frames = ["/home/me/v/lib/site-packages/torch/a.py:3:f", "/home/me/job.py:4:g", "??:0:h"]
    short = [workspaces.shorten(frame) for frame in frames]
    assert short == ["torch/a.py:3:f", "job.py:4:g", "??:0:h"]


# -- the device ------------------------------------------------------------------------------------


class FakeCuda:
    """Stands for torch.cuda: writes down what is called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, total: int) -> None:
        self.calls: list[Any] = []
        for name in ("init", "synchronize", "empty_cache", "reset_peak_memory_stats"):
            monkeypatch.setattr(torch.cuda, name, self._note(name))
        for name in ("memory_allocated", "memory_reserved"):
            monkeypatch.setattr(torch.cuda, name, self._note(name, 512))
        stats = {
            "allocated_bytes": {"all": {"current": 5, "peak": 7}, "small_pool": {"peak": 1}},
            "reserved_bytes": {"all": {"current": 8, "peak": 9}},
        }
        monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: stats)
        monkeypatch.setattr(
            torch._C, "_cuda_clearCublasWorkspaces", self._note("workspaces"), raising=False
        )
        found = type("Properties", (), {"total_memory": total})()
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda d: found)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (60 * MIB, 100 * MIB))
        monkeypatch.setattr(
            torch.cuda, "set_per_process_memory_fraction",
            lambda fraction: self.calls.append(fraction),
        )  # fmt: skip

    def _note(self, name: str, value: Any = None) -> Callable[[], Any]:
        def call() -> Any:
            self.calls.append(name)
            return value

        return call


def test_a_fresh_allocator_has_no_cublas_workspace_and_no_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = FakeCuda(monkeypatch, 80 * GIB)
    card = device.Cuda()
    fake.calls.clear()
    assert card.fresh() == (512, 512)
    assert fake.calls == [
        "synchronize", "workspaces", "empty_cache", "reset_peak_memory_stats",
        "memory_allocated", "memory_reserved",
    ]  # fmt: skip
    assert card.outside() == 40 * MIB - 512
    assert (card.allocated(), card.peaks()) == (5, (7, 9))


@given(total=st.integers(9 * GIB, 300 * GIB), limit=st.sampled_from([8 * GIB, 8 * GIB - 2 * MIB]))
def test_a_limit_allows_itself_and_not_one_page_more(total: int, limit: int) -> None:
    """The allocator compares with int(fraction * total), in whole pages of 2 MiB."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        fake = FakeCuda(monkeypatch, total)
        device.Cuda().limit(limit)
    allowed = int(fake.calls[-1] * total)
    assert limit <= allowed < limit + 2 * MIB


def test_a_card_of_the_catalogue_keeps_what_it_says_itself() -> None:
    gpu = device.card_gpu(CARD)
    assert (gpu.name, gpu.total_bytes) == ("A100-SXM4-80GB", 85_094_825_984)
    other = device.card_gpu({**CARD, "name": "NVIDIA X9", "capability": [12, 1], "sm_count": 7})
    assert (other.name, other.arch, other.sm_count) == ("NVIDIA X9", "sm_121", 7)


# -- the jobs --------------------------------------------------------------------------------------


def test_there_are_jobs_of_every_kind_that_need_only_torch() -> None:
    own = [job for job in jobs.JOBS if not job.package]
    assert len(own) >= 25
    assert len({job.name for job in jobs.JOBS}) == len(jobs.JOBS)
    assert {job.family for job in own} >= {
        "CNN", "ViT", "Swin", "GPT", "BERT", "Llama", "RNN", "UNet", "detection", "MLP",
        "embeddings",
    }  # fmt: skip
    made = [job.make() for job in own]
    assert {workload.precision for workload in made} >= {"fp32", "amp-fp16", "amp-bf16", "bf16"}
    assert all(0 < a < b < c for a, b, c in (job.batches for job in own))


def test_bfloat16_is_not_asked_of_old_cards() -> None:
    half = [job for job in jobs.JOBS if not job.package and "bf16" in job.make().precision]
    reasons = [job.missing((7, 5)) for job in half]
    assert reasons and all("8.0" in reason for reason in reasons)


def test_our_resnet50_is_that_of_torchvision() -> None:
    torchvision = pytest.importorskip("torchvision")
    with torch.device("meta"):
        ours, theirs = convnets.ResNet(), torchvision.models.resnet50()
    shapes = [{k: v.shape for k, v in model.state_dict().items()} for model in (ours, theirs)]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize(("name", "optimizers"), [("graph net fp32", 1), ("dcgan fp32", 2)])
def test_a_job_runs_for_real_on_the_cpu(name: str, optimizers: int) -> None:
    """Shapes, indices and losses are right outside a trace, too."""
    done = running.run(Counter(), jobs.find_job(name).make(), 2)
    assert done.optimizer_steps == 2 * optimizers


# -- processes -------------------------------------------------------------------------------------


class Script:
    """Makes processes that say what a test wants, in place of the workers."""

    def __init__(self, folder: Path, said: dict[str, str]) -> None:
        self._said = said
        self.started: list[tuple[str, str]] = []
        self._head = (
            "import json, sys, time, os\n"
            "def say(**m): print(json.dumps(m), flush=True)\n"
            "def part(name): say(part=name, found={'allocated': 1, 'name': name})\n"
        )

    def __call__(self, order: dict[str, Any]) -> list[str]:
        self.started.append((order["job"], order["kind"]))
        return [sys.executable, "-S", "-c", self._head + self._said[order["job"]]]


READY = "say(prediction={'x': 1}); say(ready=True, cuda_untouched=True); go = json.loads(input())\n"
ALL = READY + "[part(p) for p in %r if p not in go['have']]\nsay(done=True)\n"


def two_jobs() -> list[Any]:
    return [replace(small_job(), name=name, convolutions=False) for name in ("one", "two")]


PARTS = worker.parts_of(two_jobs()[0])


def take(
    folder: Path, said: dict[str, str], seconds: float = 30.0
) -> tuple[dict[str, Any], Script]:
    """Run two jobs whose processes say this; the entries of the file."""
    path, made = folder / "r.json", Script(folder, said)
    held = results.Results.open(path, CARD)
    plan = schedule.Schedule(held, made, seconds, 1, lambda text: None)
    plan.run([schedule.Task(job, "measure") for job in two_jobs()])
    return json.loads(path.read_text())["jobs"], made


def test_jobs_that_do_well_are_done_and_not_run_again(tmp_path: Path) -> None:
    said = {"one": ALL % PARTS, "two": ALL % PARTS}
    entries, _ = take(tmp_path, said)
    assert [entry["status"] for entry in entries.values()] == ["done", "done"]
    assert entries["one"]["prediction"] == {"x": 1} and entries["one"]["cuda_untouched"]
    _, again = take(tmp_path, said)
    assert again.started == []


def test_a_crash_costs_one_job_and_the_rest_of_it_is_run_next_time(tmp_path: Path) -> None:
    crash = READY + f"part({PARTS[0]!r})\nsys.stderr.write('it broke\\n'); os._exit(7)\n"
    entries, _ = take(tmp_path, {"one": crash, "two": ALL % PARTS})
    assert entries["one"]["status"] == "partial" and list(entries["one"]["parts"]) == PARTS[:1]
    assert entries["one"]["reasons"]["measure"] == "exit status 7: it broke"
    assert entries["two"]["status"] == "done"
    entries, again = take(tmp_path, {"one": ALL % PARTS})
    assert again.started == [("one", "measure")]
    assert entries["one"]["status"] == "done" and entries["one"]["reasons"] == {}


def test_a_hang_costs_its_time_and_the_file_has_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedule, "_LEAST", 0.2)
    monkeypatch.setattr(schedule, "_MOST", 0.2)
    monkeypatch.setattr(schedule, "_GRACE", 0.1)
    hang = READY + f"part({PARTS[0]!r})\ntime.sleep(100)\n"
    began = time.monotonic()
    entries, _ = take(tmp_path, {"one": hang, "two": ALL % PARTS})
    assert time.monotonic() - began < 20
    assert (
        entries["one"]["status"] == "partial" and "too slow" in entries["one"]["reasons"]["measure"]
    )
    assert entries["two"]["status"] == "done"


def test_a_process_that_is_never_ready_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedule, "_PREPARING", 1.0)
    entries, _ = take(tmp_path, {"one": "time.sleep(100)", "two": "time.sleep(100)"})
    assert "prepared" in entries["one"]["reasons"]["measure"]
    assert entries["one"]["status"] == "failed"


def test_when_the_time_ends_what_is_left_is_listed(tmp_path: Path) -> None:
    hang = READY + f"part({PARTS[0]!r})\ntime.sleep(100)\n"
    began = time.monotonic()
    entries, _ = take(tmp_path, {"one": hang, "two": hang}, seconds=2.0)
    assert time.monotonic() - began < 10
    assert sorted(entry["status"] for entry in entries.values()) == ["not run", "partial"]
    shown = reader.missing({"jobs": entries}).rows
    assert any("no time was left" in why for _, _, why in shown)


def test_a_job_that_cannot_be_predicted_says_so(tmp_path: Path) -> None:
    failed = "say(failed='not predicted: TraceError: x'); sys.exit(1)\n"
    entries, _ = take(tmp_path, {"one": failed, "two": ALL % PARTS})
    assert entries["one"]["reasons"] == {"measure": "not predicted: TraceError: x"}
    assert entries["one"]["status"] == "failed"


def test_a_line_cut_off_by_the_end_of_a_process_is_left_out(tmp_path: Path) -> None:
    cut = READY + f'part({PARTS[0]!r})\nsys.stdout.write(\'{{"part": "pe\'); sys.exit(3)\n'
    entries, _ = take(tmp_path, {"one": cut, "two": ALL % PARTS})
    assert list(entries["one"]["parts"]) == PARTS[:1]


def test_parts_for_which_there_was_no_time_are_wanted_again(tmp_path: Path) -> None:
    none = READY + f"part({PARTS[0]!r})\nsay(part={PARTS[-1]!r}, found={{'no_time': True}})\n"
    entries, _ = take(tmp_path, {"one": none + "say(done=True)", "two": ALL % PARTS})
    assert entries["one"]["status"] == "partial"
    entries, again = take(tmp_path, {"one": ALL % PARTS})
    assert again.started == [("one", "measure")]
    assert entries["one"]["parts"][PARTS[-1]]["allocated"] == 1


def test_a_result_of_another_card_is_not_continued(tmp_path: Path) -> None:
    held = results.Results.open(tmp_path / "r.json", CARD)
    held.save()
    with pytest.raises(results.ResultError, match="another torch"):
        results.Results.open(tmp_path / "r.json", {**CARD, "torch": "y"})


def test_a_file_that_is_no_result_is_refused(tmp_path: Path, capsys: Any) -> None:
    for text in ("{", "[]", '{"schema": "other"}'):
        (tmp_path / "r.json").write_text(text)
        assert script.main(["--read", str(tmp_path / "r.json")]) == 2
        assert str(tmp_path / "r.json") in capsys.readouterr().err
    assert script.main(["--read", str(tmp_path / "none.json")]) == 2


# -- the whole -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dry(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dry run of one job, in the processes of the real script."""
    path = tmp_path_factory.mktemp("dry") / "dry.json"
    arguments = ["--dry-run", "--quiet", "--gpu", "t4", "--out", str(path)]
    assert script.main([*arguments, "--only", "graph net"]) == 0
    return path


def test_a_dry_run_predicts_what_estimate_does(dry: Path) -> None:
    entry = json.loads(dry.read_text())["jobs"]["graph net fp32"]
    made = estimate(jobs.find_job("graph net fp32").make(), gpu="t4")
    assert entry["prediction"]["peaks"]["8"]["allocated"] == made.peak(8)
    assert entry["prediction"]["largest"]["8 GiB"]["batch"] == made.largest_batch(budget=8 * GIB)


def test_predictions_of_a_result_can_be_made_again(
    dry: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = json.loads(dry.read_text())
    data["jobs"]["graph net fp32"]["parts"] = {"peak 2": {"allocated": 5}}
    copy = tmp_path / "old.json"
    copy.write_text(json.dumps(data))
    again = Script(tmp_path, {"graph net fp32": "say(prediction={'peaks': 'new'})"})
    monkeypatch.setattr(script, "command", again)
    assert script.main(["--predict-again", str(copy), "--quiet", "--only", "graph net"]) == 0
    assert again.started == [("graph net fp32", "predict")]
    entry = json.loads(copy.read_text())["jobs"]["graph net fp32"]
    assert entry["prediction"] == {"peaks": "new"}
    assert entry["parts"] == {"peak 2": {"allocated": 5}}


def test_the_search_of_cudnn_comes_later_but_not_last() -> None:
    tasks = script.in_order(jobs.JOBS)
    for job in jobs.JOBS:
        places = [i for i, task in enumerate(tasks) if task.job is job]
        assert len(places) == 1 + job.convolutions
    first = next(i for i, task in enumerate(tasks) if task.kind == "benchmark")
    assert tasks[first].job is jobs.JOBS[0] and first < 10


def test_the_parent_says_what_is_missing_without_a_gpu(capsys: Any, tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    assert script.main(["--out", str(tmp_path / "r.json")]) == 2
    assert "no CUDA device" in capsys.readouterr().err


@pytest.fixture
def measured(takes_more: Any) -> dict[str, Any]:
    """A result with a job that takes 90 MiB more than predicted, and one that was not run."""
    prediction, found = takes_more
    parts = {name: part for name, part in found.items() if name != "outside"}
    entry = {
        "family": "CNN", "batches": [2, 4, 8], "prediction": prediction, "parts": parts,
        "outside": found["outside"], "status": "done", "reasons": {},
    }  # fmt: skip
    late = {"family": "GPT", "batches": [1, 2, 3], "parts": {}, "status": "not run", "reasons": {}}
    made = {"machine": CARD, "jobs": {"small": entry, "late|one": late}}
    return dict(json.loads(json.dumps(made)))


def test_the_tables_say_what_was_found(measured: dict[str, Any]) -> None:
    rows = reader.error_rows(measured)
    assert [row["batch"] for row in rows] == [2, 4, 8]
    for row in rows:
        assert row["allocated"] - row["predicted_allocated"] == HIDDEN
    shown = {table.title: table for table in reader.tables(measured)}
    errors = sorted(abs(row["allocated_error"]) for row in rows)
    assert shown["In short"].rows[0][:3] == ["all", "3", f"{errors[1]:.3f} %"]
    assert shown["In short"].rows[0][-2:] == ["100%", "0 of 2"]
    assert [row[4] for row in shown["The largest batch"].rows] == ["found", "found"]
    assert ["late|one", "all", "not run: no time was left"] in shown["Not run"].rows
    assert all(len(row) == len(t.header) for t in shown.values() for row in t.rows)


def test_the_page_is_one_table_after_the_other(measured: dict[str, Any]) -> None:
    page = reader.markdown(measured)
    assert "late\\|one" in page
    lines = [line for line in page.splitlines() if line.startswith("|")]
    tables = reader.tables(measured)
    assert len(lines) == sum(len(table.rows) + 2 for table in tables)
    out = io.StringIO()
    reader.print_tables(measured, Console(file=out, width=200))
    assert all(table.title in out.getvalue() for table in tables)
