"""``batchfit calibrate`` and ``batchfit validate``."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from batchfit.calibration.logs import read_log
from batchfit.cli import main

from . import calibration_models as models  # noqa: F401 - it makes garbage collection quick

JOB = """
import torch
from batchfit.estimator import Workload
def make():
    net = lambda: torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 10))
    return Workload(model=net, inputs=lambda b: torch.randn(b, 64), name="small")
def wrong():
    return Workload(model=lambda: torch.nn.Linear(64, 10), inputs=lambda b: torch.randn(b, 63))
"""


@pytest.fixture
def job(tmp_path: Path) -> str:
    (tmp_path / "job.py").write_text(JOB)
    return f"{tmp_path / 'job.py'}:make"


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    status = main(list(args))
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_calibrate_answers_and_saves(
    job: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = str(tmp_path / "small.json")
    common = ["calibrate", job, "--device", "cpu", "--budget", "4MiB", "--saved", saved]
    status, out, err = run(
        capsys, *common, "--target-batch", "8192", "--dataset", "50000", "--epoch-seconds", "1000"
    )
    assert status == 0
    assert re.search(r"largest batch +\d+ \(the largest batch that fits\)", out)
    for word in ("budget", "efficient", "epoch", "within 1000 s", "for 8192", "micro-batches"):
        assert word in out
    assert "4.00 MiB, as given" in err and re.search(r"batch \d+: .* allocated", err)

    status, out, err = run(capsys, *common, "--json")
    found = json.loads(out)
    assert status == 0 and "none is made" in err
    assert found["schema"] == "batchfit.calibrate/1" and found["answer"]["batch"] > 500
    documented = _documented("batchfit.calibrate/1")
    assert {f"answer.{k}" for k in found["answer"]} | set(found) - {"answer"} <= documented

    batch = str(found["probes"][0]["batch"])
    peak = str(found["probes"][0]["peak"])
    assert run(capsys, "validate", saved, "--batch", batch, "--measured", peak)[0] == 0
    status, out, _ = run(capsys, "validate", saved, "--batch", batch, "--measured", "4MiB")
    assert status == 1 and "outside of the interval of 95 %" in out
    log = tmp_path / "train.log"
    log.write_text(f"epoch 1 max_memory_allocated: {peak}\n")
    status, out, _ = run(
        capsys, "validate", saved, "--batch", batch, "--log", str(log), "--here", "--json"
    )
    compared = json.loads(out)
    assert status == 0 and compared["within"] and compared["measured_bytes"] == int(peak)
    assert set(compared) == _documented("batchfit.validate/1")


def _documented(schema: str) -> set[str]:
    text = (Path(__file__).parent.parent / "docs" / "json.md").read_text(encoding="utf-8")
    section = text.split(f"`{schema}`\n", 1)[1].split("\n## ", 1)[0]
    names = {n for cell in re.findall(r"^\| (`[^|]*) \|", section, re.M) for n in cell.split(", ")}
    return {name.strip("`").removesuffix("[]") for name in names}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--device", "cuda:7"], "torch sees"),
        (["--device", "cpu", "--max-batch", "0"], "cap must be a positive number of samples"),
        (["--device", "cpu", "--budget", "much"], "cannot read 'much' as a memory size"),
        (["--device", "cpu", "--risk", "2"], "risk is the accepted probability"),
        (["--epoch-seconds", "3"], "--epoch-seconds goes with --dataset only"),
        (["--tuned-for", "3"], "--tuned-for goes with --target-batch only"),
    ],
)
def test_what_cannot_be_asked(
    job: str, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = run(capsys, "calibrate", job, *options)
    assert status == 2 and not out and message in err
    assert "likely a fault of batchfit" not in err


def test_an_error_of_the_step_is_said_as_it_is(
    job: str, capsys: pytest.CaptureFixture[str]
) -> None:
    target = job.replace(":make", ":wrong")
    status, _, err = run(capsys, "calibrate", target, "--device", "cpu", "--budget", "4MiB")
    assert status == 2
    assert "the step raised RuntimeError: mat1 and mat2 shapes cannot be multiplied" in err


def test_none_fits(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "calibrate", job, "--device", "cpu", "--budget", "20KiB")
    assert status == 1 and "does not fit even at the smallest batch" in out
    assert "out of memory" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "give either --measured or --log"),
        (["--measured", "1GiB", "--log", "x"], "give either --measured or --log"),
        (["--log", "x", "--reserved"], "--reserved goes with --measured only"),
        (["--measured", "1GiB"], "cannot read the calibration none.json"),
    ],
)
def test_what_cannot_be_validated(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, err = run(capsys, "validate", "none.json", "--batch", "3", *options)
    assert status == 2 and message in err


@pytest.mark.parametrize(
    ("line", "size", "reserved", "trainer"),
    [
        ("Epoch [1][50/100]  lr: 1e-3  memory: 5692  loss: 1.2", 5692 * 2**20, False, "mmengine"),
        ("eta: 0:01  iter: 19  max_mem: 7028M", 7028 * 2**20, False, "detectron2"),
        ("step: 10  loss: 7.0  memory: 47.84GiB(50.36%)", int(47.84 * 2**30), True, "torchtitan"),
        ("Step 3 | peak_memory_alloc:12.5 tokens", int(12.5 * 2**30), False, "torchtune"),
        ("Memory used: 4.82 GB", int(4.82 * 10**9), False, "litgpt"),
        ("max_memory_reserved=1234567890", 1234567890, True, "torch"),
    ],
)
def test_logs(tmp_path: Path, line: str, size: int, reserved: bool, trainer: str) -> None:
    log = tmp_path / "log"
    smaller = line.replace("5692", "100").replace("7028", "100")
    log.write_text(f"start\n{smaller}\n{line}\nend\n")
    found: Any = read_log(log)
    assert (found.reserved, found.trainer) == (reserved, trainer)
    assert found.bytes == pytest.approx(size, abs=2)


def test_a_log_without_a_peak(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log"
    log.write_text("loss: 1.0\n")
    from batchfit.calibration import CalibrationError

    with pytest.raises(CalibrationError, match="holds no peak in a wording that is known"):
        read_log(log)
