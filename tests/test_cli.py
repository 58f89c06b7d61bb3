"""The command line: what it prints, its exit statuses, and one line for every error."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from batchfit.cli import main
from batchfit.cli import options as cli_options

JOBS = """
import torch
from torch import nn
from batchfit.estimator import Workload

print("a line of the user's own")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(1024, 4096)
        self.b = nn.Linear(4096, 1000)

    def forward(self, x):
        return self.b(self.a(x).relu())


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(1024, 8)

    def forward(self, x, mask):
        return self.a(x) * mask


class Chooser(Net):
    def forward(self, x):
        y = super().forward(x)
        return y[y > 0].reshape(-1, 1)


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Embedding(100, 16)

    def forward(self, x):
        return self.a(x).mean(1)


workload = Workload(model=Net, inputs=lambda b: torch.empty(b, 1024), loss="cross_entropy")


def loop(device):
    model = Net().to(device)

    def step(batch):
        model(torch.randn(batch, 1024, device=device)).sum().backward()
        model.zero_grad()

    return step


step = Workload.from_step(loop)
"""


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder with a file of jobs, made the working directory."""
    (tmp_path / "jobs.py").write_text(JOBS)
    monkeypatch.chdir(tmp_path)
    return "jobs.py"


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The width of the terminal that runs the tests does not matter."""
    monkeypatch.delenv("COLUMNS", raising=False)


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    """Exit status, stdout, stderr."""
    capsys.readouterr()
    status = main(list(args))
    out, err = capsys.readouterr()
    return status, out, err


def run_json(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    status, out, err = run(capsys, *args, "--json")
    assert status in (0, 1), err
    return dict(json.loads(out))


# -- no torch where none is needed ----------------------------------------------------------------


@pytest.mark.parametrize(
    "args", [["--help"], ["--version"], ["gpus"], ["estimate", "--help"], ["snapshot", "--help"]]
)
def test_light_commands_do_not_load_torch(args: list[str]) -> None:
    code = (
        "import sys; from batchfit.cli import main; status = main(sys.argv[1:]);"
        "print([m for m in ('torch', 'numpy', 'transformers') if m in sys.modules], status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *args], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[] 0"


def test_the_catalogue_is_the_same_before_and_after_torch() -> None:
    code = (
        "from batchfit.cli import main; main(['gpus', 't4', '--json'])\n"
        "from batchfit.estimator import GPU, find_gpu\n"
        "assert type(find_gpu('t4')) is GPU"
    )
    subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)


def test_python_m_batchfit() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "batchfit", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("batchfit ")


def test_without_arguments_help_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys)
    assert (status, out) == (2, "")
    assert "estimate" in err and "gpus" in err


def test_choices_are_those_of_the_library() -> None:
    from batchfit.cli.plan import DEFAULT_GPU
    from batchfit.estimator import Workload
    from batchfit.estimator.cuda_rules import BACKENDS
    from batchfit.estimator.losses import LOSSES
    from batchfit.estimator.workload import MEMORY_FORMATS, PRECISIONS

    assert tuple(PRECISIONS) == cli_options.PRECISIONS
    assert tuple(MEMORY_FORMATS) == cli_options.MEMORY_FORMATS
    assert tuple(LOSSES) == cli_options.LOSSES
    assert set(BACKENDS) == set(cli_options.ATTENTION)
    assert set(cli_options.WORKLOAD_OPTIONS) <= set(Workload.__dataclass_fields__)
    assert DEFAULT_GPU == "A100 80GB"


# -- gpus -----------------------------------------------------------------------------------------


def test_gpus_are_all_listed_within_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    from batchfit.estimator import all_gpus

    status, out, _ = run(capsys, "gpus")
    assert status == 0
    for gpu in all_gpus():
        assert gpu.name in out
    assert max(map(len, out.splitlines())) <= 80


def test_gpus_filter(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "gpus", "a100", "--json")
    found = json.loads(out)
    assert found["schema"] == "batchfit.gpus/1"
    assert found["gpus"] and all("A100" in gpu["name"] for gpu in found["gpus"])
    _, out, _ = run(capsys, "gpus", "rtx-3090", "--json")
    assert "RTX 3090" in [gpu["name"] for gpu in json.loads(out)["gpus"]]


def test_gpus_without_a_match(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "gpus", "rtx", "3091")
    assert (status, out) == (2, "")
    assert "'rtx 3091'" in err and "RTX 3090" in err


# -- estimate: the question and its answer --------------------------------------------------------


@pytest.mark.parametrize(
    ("batches", "budget", "status"),
    [
        (["64"], "1GiB", 0),
        (["100000"], "1GiB", 1),
        (["64", "100000"], "1GiB", 1),
        ([], "1GiB", 0),
    ],
)
def test_exit_status_answers(
    jobs: str, capsys: pytest.CaptureFixture[str], batches: list[str], budget: str, status: int
) -> None:
    options = [word for batch in batches for word in ("--batch", batch)]
    got, out, err = run(capsys, "estimate", f"{jobs}:workload", *options, "--budget", budget)
    assert got == status, err
    assert ("does not fit" in out) == (status == 1)


def test_without_gpu_or_budget_nothing_is_refused(
    jobs: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, _ = run(capsys, "estimate", f"{jobs}:workload", "--batch", "100000000")
    assert status == 0
    assert "no GPU was named" in out


def test_the_users_output_is_not_in_the_result(
    jobs: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _, out, err = run(capsys, "estimate", f"{jobs}:workload", "--gpu", "t4", "--json")
    json.loads(out)
    assert "a line of the user's own" in err


def test_the_largest_batch_is_the_largest(jobs: str, capsys: pytest.CaptureFixture[str]) -> None:
    target = (f"{jobs}:workload", "--budget", "2GiB")
    best = run_json(capsys, "estimate", *target)["gpus"][0]["largest_batch"]
    found = run_json(capsys, "estimate", *target, "--batch", str(best), "--batch", str(best + 1))
    assert [row["fits"] for row in found["batches"]] == [True, False]
    assert found["gpus"][0]["fits"] is False


def test_conditions_on_the_answer(jobs: str, capsys: pytest.CaptureFixture[str]) -> None:
    target = (f"{jobs}:workload", "--budget", "2GiB")

    def answer(*options: str) -> int:
        return int(run_json(capsys, "estimate", *target, *options)["gpus"][0]["largest_batch"])

    free = answer()
    assert answer("--multiple-of", "96") == free // 96 * 96
    power = answer("--power-of-two")
    assert power & (power - 1) == 0 and power <= free < 2 * power
    assert answer("--max-batch", "100") == 100


def test_margin_and_budget(jobs: str, capsys: pytest.CaptureFixture[str]) -> None:
    target = (f"{jobs}:workload", "--gpu", "t4")
    plain = run_json(capsys, "estimate", *target)["gpus"][0]
    more = run_json(capsys, "estimate", *target, "--margin", "2GiB")["gpus"][0]
    assert more["budget_bytes"] == plain["budget_bytes"] + plain["margin_bytes"] - 2 * 2**30
    assert plain["budget_bytes"] == (
        plain["total_bytes"] - plain["context_bytes"] - plain["margin_bytes"]
    )
    given = run_json(capsys, "estimate", *target, "--budget", "3GiB")["gpus"][0]
    assert given["budget_bytes"] == 3 * 2**30


def test_parts_add_up(jobs: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(
        capsys, "estimate", f"{jobs}:workload", "--gpu", "t4", "--batch", "7", "--batch", "512",
        "--layers",
    )  # fmt: skip
    assert [row["batch"] for row in found["batches"]] == [7, 512]
    for row in found["batches"]:
        assert sum(row["breakdown"].values()) == row["peak_allocated_bytes"]
        assert row["peak_reserved_bytes"] >= row["peak_allocated_bytes"]
    parameters = 4 * (1024 * 4096 + 4096 + 4096 * 1000 + 1000)
    assert found["torchinfo"]["parameters_bytes"] == parameters
    assert found["torchinfo"]["gradients_bytes"] == parameters
    assert sum(m["bytes"] for m in found["modules"]) == found["batches"][-1]["peak_allocated_bytes"]
    assert [layer["kind"] for layer in found["layers"]][:2] == ["Net", "Linear"]


@pytest.mark.parametrize(
    ("options", "setting", "value"),
    [
        (["--precision", "amp-fp16"], "precision", "amp-fp16"),
        (["--optimizer", "sgd:momentum=0"], "optimizer", "sgd:momentum=0"),
        (["--loss", "mse"], "loss", "mse"),
        (["--accumulate", "2"], "accumulate", 2),
        (["--no-set-to-none"], "set_to_none", False),
        (["--no-keep-outputs"], "keep_outputs", False),
        (["--clip-grad-norm", "1.0"], "clip_grad_norm", 1.0),
        (["--ema"], "ema", True),
        (["--evaluate"], "evaluate", True),
        (["--inference"], "form", "inference"),
    ],
)
def test_settings_arrive(
    jobs: str,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    setting: str,
    value: Any,
) -> None:
    target = ("estimate", f"{jobs}:workload", "--gpu", "t4", "--batch", "64")
    assert run_json(capsys, *target, *options)["workload"][setting] == value


def test_settings_change_the_answer(jobs: str, capsys: pytest.CaptureFixture[str]) -> None:
    target = ("estimate", f"{jobs}:workload", "--gpu", "t4", "--batch", "1")

    def peak(*options: str) -> int:
        found = run_json(capsys, *target, *options)
        return int(found["batches"][0]["peak_allocated_bytes"])

    plain = peak()
    assert peak("--optimizer", "sgd:momentum=0") < plain
    assert peak("--inference") < peak("--optimizer", "sgd:momentum=0")
    assert peak("--ema") > plain


def test_several_gpus_are_one_column_each(jobs: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(
        capsys, "estimate", f"{jobs}:workload", "--gpu", "t4", "--gpu", "rtx-3090", "--gpu", "h100",
        "--batch", "64",
    )  # fmt: skip
    assert status == 0
    lines = out.splitlines()
    header = next(line for line in lines if "RTX 3090" in line and "T4" in line)
    assert header.index("T4") < header.index("RTX 3090") < header.index("H100")
    assert any(line.startswith("batch 64") and line.count("fits") == 3 for line in lines)
    assert sum(line.startswith("largest batch") for line in lines) == 1


def test_many_gpus_stay_within_the_width(jobs: str, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["t4", "rtx-3090", "rtx-4090", "a100-40gb", "a100-80gb", "v100", "l4", "h100"]
    options = [word for name in names for word in ("--gpu", name)]
    _, out, _ = run(capsys, "estimate", f"{jobs}:workload", *options)
    assert max(map(len, out.splitlines())) <= 80
    assert out.count("largest batch") > 1


def test_text_says_what_matters(jobs: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(
        capsys, "estimate", f"{jobs}:workload", "--gpu", "rtx-3090", "--batch", "64", "--layers"
    )
    assert out.splitlines()[0] == "jobs.py:workload on RTX 3090"
    assert "22.95 GiB = 23.56 GiB total - 373 MiB context - 256 MiB margin" in out
    for word in ("peak at 64", "torchinfo", "optimizer state", "layer (torchinfo)", "module, at"):
        assert word in out
    assert max(map(len, out.splitlines())) <= 80
    assert "\x1b" not in out and out.isascii()


def test_what_is_reserved_stands_beside_what_is_allocated(
    jobs: str, capsys: pytest.CaptureFixture[str]
) -> None:
    target = ("estimate", f"{jobs}:workload", "--budget", "1GiB")
    _, out, _ = run(capsys, *target)
    lines = out.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("peak reserved"))
    assert lines[start + 1].startswith("peak allocated")
    assert max(map(len, lines)) <= 80
    for row in run_json(capsys, *target)["batches"]:
        # Within the budget, the allocator gives back what it caches before it runs out.
        assert row["fits"] and row["reserved_in_budget_bytes"] <= 2**30
        assert row["peak_allocated_bytes"] <= row["reserved_in_budget_bytes"]
    _, out, _ = run(capsys, "estimate", f"{jobs}:workload", "--gpu", "t4", "--gpu", "h100")
    assert out.count("  reserves") == 1


def test_where_it_runs_out(jobs: str, capsys: pytest.CaptureFixture[str]) -> None:
    batches = ("--batch", "64", "--batch", "1000000")
    target = ("estimate", f"{jobs}:workload", *batches)
    status, out, _ = run(capsys, *target, "--gpu", "t4")
    assert status == 1 and max(map(len, out.splitlines())) <= 80
    text = " ".join(out.split())
    assert text.count("CUDA out of memory. Tried to allocate 15.26 GiB.") == 1
    assert "by aten::addmm in a, forward pass." in text
    status, out, _ = run(capsys, *target, "--gpu", "t4", "--gpu", "h100")
    assert status == 1
    assert "T4 batch 1000000, as PyTorch would put it: CUDA out of" in " ".join(out.split())
    small, large = run_json(capsys, *target, "--gpu", "t4")["batches"]
    assert small["out_of_memory"] is None
    assert large["out_of_memory"].startswith("CUDA out of memory.")
    assert large["reserved_in_budget_bytes"] is None
    # Nobody asked whether it fits.
    assert "CUDA out of memory" not in run(capsys, *target)[1]
    assert {row["out_of_memory"] for row in run_json(capsys, *target)["batches"]} == {None}


def test_settings_of_the_allocator(
    jobs: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = ("estimate", f"{jobs}:workload", "--gpu", "t4", "--batch", "5000")
    expandable = "expandable_segments:True"

    def reserved(*options: str) -> int:
        return int(run_json(capsys, *target, *options)["batches"][0]["peak_reserved_bytes"])

    plain, other = reserved(), reserved("--allocator", expandable)
    assert plain != other
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", expandable)
    assert reserved() == other
    assert reserved("--allocator", "") == plain  # the option wins
    found = run_json(capsys, *target, "--allocator", expandable)
    assert found["allocator"] == expandable
    assert f"allocator {expandable}" in " ".join(
        run(capsys, *target, "--allocator", expandable)[1].split()
    )


def test_a_fraction_of_the_gpu_is_a_budget(jobs: str, capsys: pytest.CaptureFixture[str]) -> None:
    target = ("estimate", f"{jobs}:workload", "--gpu", "t4", "--gpu", "a100-40gb")
    plain = run_json(capsys, *target)["gpus"]
    half = run_json(capsys, *target, "--allocator", "per_process_memory_fraction:0.5")["gpus"]
    for one, other in zip(plain, half, strict=True):
        assert other["budget_bytes"] == one["total_bytes"] // 2
        assert other["largest_batch"] < one["largest_batch"]
        assert other["reserved_in_budget_bytes"] <= other["budget_bytes"]


def test_a_gpu_beside_another_is_as_alone(jobs: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Of one capability, but not of one size: each has its own answer."""
    target = ("estimate", f"{jobs}:workload", "--gpu")
    both = run_json(capsys, *target, "a100-40gb", "--gpu", "a100-80gb")["gpus"]
    alone = [run_json(capsys, *target, name)["gpus"][0] for name in ("a100-40gb", "a100-80gb")]
    assert both == alone


def test_what_never_fits_says_by_how_much(jobs: str, capsys: pytest.CaptureFixture[str]) -> None:
    big = "import torch\ndef big(): return torch.nn.Linear(40000, 40000)\n"
    Path("big.py").write_text(big)
    status, out, _ = run(capsys, "estimate", "big.py:big", "--input", "40000", "--gpu", "t4")
    assert status == 1
    text = " ".join(out.split())
    assert "none: does not fit even at 1" in text
    assert "more than the budget; the largest part is optimizer state" in text


def test_what_always_fits_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "small.py"
    file.write_text("import torch\ndef small(): return torch.nn.Linear(4, 4)\n")
    _, out, _ = run(capsys, "estimate", f"{file}:small", "--input", "4", "--gpu", "b200")
    assert "fits at any size you would use" in out


def test_a_step_function_has_no_settings(jobs: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(capsys, "estimate", f"{jobs}:step", "--gpu", "t4", "--batch", "8")
    assert found["torchinfo"] is None and found["workload"]["precision"] is None
    status, _, err = run(capsys, "estimate", f"{jobs}:step", "--precision", "bf16")
    assert status == 2 and "--precision" in err


# -- errors ---------------------------------------------------------------------------------------

ERRORS = [
    (["jobs.py:workload", "--gpu", "rtx-3091"], ["rtx-3091", "RTX 3090"]),
    (["jobs.py:workload", "--batch", "0"], ["positive integer", "0"]),
    (["jobs.py:workload", "--batch", "-3"], ["positive integer", "-3"]),
    (["jobs.py:workload", "--batch", "many"], ["--batch", "many"]),
    (["jobs.py:workload", "--max-batch", "0"], ["positive integer"]),
    (["jobs.py:workload", "--multiple-of", "3", "--power-of-two"], ["power of two", "3"]),
    (["jobs.py:workload", "--multiple-of", "0"], ["multiple_of", "0"]),
    (["jobs.py:workload", "--budget", "100MiB", "--gpu", "t4"], ["100.00 MiB", "context"]),
    (["jobs.py:workload", "--budget", "plenty"], ["plenty", "22GiB"]),
    (["jobs.py:workload", "--gpu", "t4", "--margin", "20GiB"], ["margin"]),
    (["jobs.py:workload", "--optimizer", "adamx"], ["adamx", "adam"]),
    (["jobs.py:workload", "--precision", "fp8"], ["fp8", "amp-bf16"]),
    (["jobs.py:workload", "--allocator", "split:1"], ["split"]),
    (["jobs.py:workload", "--allocator", "max_split_size_mb:1"], ["max_split_size_mb", "20"]),
    (["jobs.py:workload", "--accumulate", "0"], ["accumulate"]),
    (["jobs.py:workload", "--checkpointing"], ["checkpointing"]),
    (["jobs.py:workload", "--sequence-length", "8"], ["--sequence-length", "no effect"]),
    (["jobs.py:workload", "--input", "8"], ["--input", "no effect"]),
    (["jobs.py:Net"], ["--input 3x224x224"]),
    (["jobs.py:Net", "--input", "8"], ["jobs.py:1", "shapes"]),
    (["jobs.py:Net", "--input", "1024", "--input-dtype", "int64"], ["int64", "dtypes"]),
    (["jobs.py:Net", "--input", "x"], ["3x224x224"]),
    (["jobs.py:Net", "--input", "1024", "--input-dtype", "float31"], ["float31", "float32"]),
    (
        ["jobs.py:Net", "--input", "1024", "--input-dtype", "bool", "--input-dtype", "int64"],
        ["1 --input", "2 --input-dtype"],
    ),
    (["jobs.py:Net", "--input", "1024", "--image-size", "8"], ["--image-size"]),
    (["jobs.py:Tokens", "--input", "8"], ["Long, Int", "float32", "dtypes"]),
    (["jobs.py:Masked", "--input", "1024"], ["mask"]),
    (["jobs.py:Chooser", "--input", "1024"], ["nonzero", "data"]),
    (["jobs.py:Nett"], ["Nett", "Net"]),
    (["jobs.py"], ["jobs.py:NAME"]),
    (["job.py:Net"], ["job.py", "jobs.py"]),
    (["jobs:Nett"], ["Nett"]),
    (["no.such.module:x"], ["no.such.module"]),
    (["resnet50"], ["torchvision:resnet50"]),
    (["jobs.py:workload", "--nonsense"], ["--nonsense", "--help"]),
    ([], ["TARGET"]),
]  # fmt: skip


@pytest.mark.parametrize(("args", "words"), ERRORS, ids=[" ".join(e[0]) for e in ERRORS])
def test_errors_are_one_line(
    jobs: str, capsys: pytest.CaptureFixture[str], args: list[str], words: list[str]
) -> None:
    status, out, err = run(capsys, "estimate", *args)
    lines = [line for line in err.splitlines() if line != "a line of the user's own"]
    assert (status, out, len(lines)) == (2, "", 1), err
    assert lines[0].startswith("batchfit: ")
    for word in words:
        assert word in lines[0]


def test_ctrl_c(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("batchfit.cli.command.estimate_target", interrupted)
    status, out, err = run(capsys, "estimate", "torchvision:resnet50")
    assert (status, out, err.strip()) == (130, "", "batchfit: interrupted")


@pytest.mark.parametrize(
    ("error", "word"),
    [(RuntimeError("one\ntwo"), "RuntimeError: one two"), (MemoryError(), "host")],
)
def test_whatever_else_happens_is_one_line(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    word: str,
) -> None:
    def fails(*_: Any) -> None:
        raise error

    monkeypatch.setattr("batchfit.cli.command.estimate_target", fails)
    status, out, err = run(capsys, "estimate", "torchvision:resnet50")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert word in err
    monkeypatch.setenv("BATCHFIT_TRACEBACK", "1")
    assert "Traceback" in run(capsys, "estimate", "torchvision:resnet50")[2]


def test_a_reader_that_leaves_early_is_no_error() -> None:
    code = "import sys; from batchfit.cli import main; sys.exit(main(['gpus']))"
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(write)
    assert done.stderr == ""


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_only_on_a_terminal(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from batchfit.cli.console import Progress

    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    progress = Progress()
    progress("tracing")
    progress.clear()
    assert ("tracing ..." in stream.getvalue()) == terminal
    assert stream.getvalue().endswith("\r\x1b[K") == terminal
