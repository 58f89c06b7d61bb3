"""``batchfit snapshot``: a file that PyTorch's viewer opens, and a real one laid beside it."""

from __future__ import annotations

import copy
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from batchfit.estimator.snapshot import load_snapshot
from batchfit.estimator.snapshot_replay import real_peak

from .recorded_jobs import JOBS as RECORDED
from .snapshots import recorded_step, step_snapshot
from .test_cli import jobs, no_terminal, run, run_json
from .test_docs import _documented, _fields

__all__ = ["jobs", "no_terminal"]  # fixtures

SCHEMA = "batchfit.snapshot-comparison/1"
TARGET = ("snapshot", "jobs.py:workload", "--batch", "64", "--gpu", "t4")

Capture = pytest.CaptureFixture[str]


@pytest.fixture(name="written")
def _written(jobs: str, capsys: Capture) -> str:
    """A predicted snapshot of the job, which stands for a real one."""
    assert run(capsys, *TARGET, "-o", "real.pickle")[0] == 0
    return "real.pickle"


def change(path: str, edit: Any) -> None:
    """Change a snapshot file."""
    snapshot = copy.deepcopy(load_snapshot(path))
    edit(snapshot)
    Path(path).write_bytes(pickle.dumps(snapshot, protocol=4))


# -- writing --------------------------------------------------------------------------------------


def test_what_is_written_is_the_estimate(jobs: str, capsys: Capture) -> None:
    status, out, err = run(capsys, *TARGET, "--output", "job.pickle")
    assert status == 0, err
    assert "a line of the user's own" in err and "a line of the user's own" not in out
    estimated = run_json(capsys, "estimate", "jobs.py:workload", "--batch", "64", "--gpu", "t4")
    peak = real_peak(load_snapshot("job.pickle"))
    row = estimated["batches"][0]
    assert peak.allocated == row["peak_allocated_bytes"]
    assert peak.reserved == row["peak_reserved_bytes"]


def test_it_says_how_to_open_the_file(jobs: str, capsys: Capture) -> None:
    """The command that it prints works as it stands, also with blanks in the name."""
    _, out, _ = run(capsys, *TARGET, "-o", "my job.pickle")
    lines = out.splitlines()
    assert lines[0] == "jobs.py:workload on T4, batch 64"
    assert "https://pytorch.org/memory_viz" in out
    assert max(len(line) for line in lines[:-1]) <= 80
    assert lines[-1].startswith("python -m torch.cuda._memory_viz trace_plot 'my job.pickle'")
    command = lines[-1].replace("python", f"'{sys.executable}'", 1)
    subprocess.run(["sh", "-c", command], check=True)
    assert "MemoryViz.js" in Path("my job.html").read_text()


def test_nothing_is_overwritten_without_force(written: str, capsys: Capture) -> None:
    before = Path(written).read_bytes()
    status, out, err = run(capsys, *TARGET, "--batch", "65", "-o", written)
    assert (status, out) == (2, "")
    assert err == f"batchfit: {written} exists already; --force overwrites it\n"  # no trace yet
    assert Path(written).read_bytes() == before
    assert run(capsys, *TARGET, "--batch", "65", "-o", written, "--force")[0] == 0
    assert Path(written).read_bytes() != before


def test_settings_reach_the_file(written: str, capsys: Capture) -> None:
    def written_with(*options: str) -> dict[str, Any]:
        assert run(capsys, *TARGET, "-o", "other.pickle", "--force", *options)[0] == 0
        return load_snapshot("other.pickle")

    plain = real_peak(load_snapshot(written))
    assert real_peak(written_with("--inference")).allocated < plain.allocated
    assert real_peak(written_with("--optimizer", "sgd:momentum=0")).allocated < plain.allocated
    expandable = written_with("--allocator", "expandable_segments:True")
    assert all(segment["is_expandable"] for segment in expandable["segments"])


def test_a_step_function_has_a_snapshot_too(jobs: str, capsys: Capture) -> None:
    status, out, _ = run(capsys, "snapshot", "jobs.py:step", "--batch", "8", "-o", "step.pickle")
    assert status == 0
    assert "no GPU was named: kernels are those of the A100-SXM4-80GB" in " ".join(out.split())


# -- comparing ------------------------------------------------------------------------------------


def test_a_prediction_beside_itself(written: str, capsys: Capture) -> None:
    found = run_json(capsys, *TARGET, "--compare", written)
    assert (found["error"], found["matched_share"]) == (0.0, 1.0)
    for name in ("peak_allocated_bytes", "peak_reserved_bytes"):
        assert found[name]["real"] == found[name]["predicted"] > 0
    assert found["only_real"] == found["only_predicted"] == {"blocks": 0, "bytes": 0, "largest": []}
    status, out, _ = run(capsys, *TARGET, "--compare", written)
    assert status == 0
    assert "every byte alive at the real peak" in " ".join(out.split())
    assert "only real" not in out and "difference" in out


def test_another_job_beside_it(written: str, capsys: Capture) -> None:
    args = (*TARGET, "--batch", "96", "--compare", written)
    found = run_json(capsys, *args)
    assert found["schema"] == SCHEMA and found["batch"] == 96
    for side in ("real", "predicted"):
        parts = sum(row[f"{side}_bytes"] for row in found["categories"])
        assert parts == found["peak_allocated_bytes"][side]
        only = found[f"only_{side}"]
        assert only["blocks"] == len(only["largest"]) > 0
        assert only["bytes"] == sum(block["block_bytes"] for block in only["largest"])
        sizes = [block["block_bytes"] for block in only["largest"]]
        assert sizes == sorted(sizes, reverse=True)
    matched = found["matched_bytes"]
    assert matched + found["only_real"]["bytes"] == found["peak_allocated_bytes"]["real"]
    assert found["matched_share"] == matched / found["peak_allocated_bytes"]["real"] < 1
    _, out, _ = run(capsys, *args)
    assert max(map(len, out.splitlines())) <= 80 and out.isascii()
    for text in ("only real: 3 blocks", "only predicted: 3 blocks", "aten::addmm", "optimizer st"):
        assert text in out


def test_json_has_the_documented_fields(written: str, capsys: Capture) -> None:
    found = run_json(capsys, *TARGET, "--batch", "96", "--compare", written)
    parents = {"peak_allocated_bytes", "peak_reserved_bytes", "blocks", "only_real"}
    assert _fields(found) == _documented(SCHEMA) - parents - {"only_predicted"}


def test_a_real_step(tmp_path: Path, capsys: Capture) -> None:
    """A recorded run of a GPU; its peak, and a matched share that the core's tests bound."""
    step = recorded_step("trace-076")
    recorded, real = step_snapshot(step), step["step"]["real"]
    make, batch, gpu = RECORDED["trace-076"]
    file = tmp_path / "real.pickle"
    file.write_bytes(pickle.dumps(recorded, protocol=4))
    args = (
        "snapshot", f"tests.recorded_jobs:{make.__name__}", "--batch", str(batch), "--gpu", gpu,
        "--allocator", "", "--compare", str(file),
    )  # fmt: skip
    found = run_json(capsys, *args)
    assert found["peak_allocated_bytes"]["real"] == real["peak_allocated"]
    assert 1 > found["matched_share"] >= 0.9997 and abs(found["error"]) <= 0.0003
    _, out, _ = run(capsys, *args)
    assert "only real" in out and re.search(r"\.py:\d+:\w|\(older than the record\)|:0:", out)


def test_other_allocator_settings_are_said(written: str, capsys: Capture) -> None:
    _, out, _ = run(
        capsys, *TARGET, "--compare", written, "--allocator", "expandable_segments:True"
    )
    assert "--allocator expandable_segments:False" in " ".join(out.split())


def test_a_record_that_began_late_is_said(written: str, capsys: Capture) -> None:
    def late(snapshot: dict[str, Any]) -> None:
        notes = snapshot["external_annotations"]
        start = next(n["time_us"] for n in notes if n["name"] == "step 2: forward")
        snapshot["device_traces"] = [snapshot["device_traces"][0][start:]]

    change(written, late)
    assert "older than the record" in " ".join(
        run(capsys, *TARGET, "--compare", written)[1].split()
    )


def test_a_file_cannot_talk_to_the_terminal(written: str, capsys: Capture) -> None:
    """Names in a file are somebody else's: no escape sequence reaches the terminal."""

    def hostile(snapshot: dict[str, Any]) -> None:
        frame = {"filename": "\x1b]0;owned\x07\x1b[2J", "line": 1, "name": "\udcff\nf"}
        for event in snapshot["device_traces"][0]:
            if event["frames"]:
                event["frames"] = [{**frame, "category": "\x1b[31m"}]

    change(written, hostile)
    status, out, err = run(capsys, *TARGET, "--batch", "96", "--compare", written)
    assert status == 0, err
    assert "owned" in out and out.isascii() and "\x1b" not in out
    assert run_json(capsys, *TARGET, "--batch", "96", "--compare", written)["schema"] == SCHEMA


# -- errors ---------------------------------------------------------------------------------------


class Bomb:
    """Unpickled, it makes a file."""

    def __reduce__(self) -> tuple[Any, tuple[str, ...]]:
        return Path.touch, (Path("exploded"),)  # type: ignore[return-value]


def test_a_hostile_file_is_refused(jobs: str, capsys: Capture) -> None:
    Path("bomb.pickle").write_bytes(pickle.dumps({"segments": Bomb()}, protocol=4))
    status, out, err = run(capsys, *TARGET, "--compare", "bomb.pickle")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "bomb.pickle" in err and "can run code" in err
    assert not Path("exploded").exists()


JOB = ["jobs.py:workload", "--batch", "8"]
ERRORS = [
    ([*JOB], ["either --output or --compare"]),
    ([*JOB, "-o", "a", "--compare", "jobs.py"], ["either --output or --compare"]),
    ([*JOB, "--compare", "jobs.py", "--force"], ["--force", "--output"]),
    ([*JOB, "-o", "a", "--json"], ["--json", "--compare"]),
    (["jobs.py:workload", "-o", "a"], ["--batch"]),
    (["jobs.py:workload", "--batch", "0", "-o", "a"], ["positive integer", "0"]),
    ([*JOB, "-o", "jobs.py"], ["jobs.py exists already", "--force"]),
    ([*JOB, "-o", "."], ["it is a folder"]),
    ([*JOB, "-o", "none/a"], ["there is no folder none"]),
    ([*JOB, "-o", "a", "--gpu", "rtx-3091"], ["rtx-3091", "RTX 3090"]),
    ([*JOB, "-o", "a", "--allocator", "split:1"], ["split"]),
    ([*JOB, "-o", "a", "--optimizer", "adamx"], ["adamx"]),
    ([*JOB, "--compare", "none.pickle"], ["none.pickle", "No such file"]),
    ([*JOB, "--compare", "."], ["cannot read the snapshot"]),
    ([*JOB, "--compare", "jobs.py"], ["jobs.py", "plain data"]),
    ([*JOB, "--compare", "empty.pickle"], ["empty.pickle", "not a memory snapshot"]),
    ([*JOB, "--compare", "bad.pickle"], ["bad.pickle", "not complete"]),
]


@pytest.mark.parametrize(("args", "words"), ERRORS, ids=[" ".join(e[0][1:]) for e in ERRORS])
def test_errors_are_one_line(jobs: str, capsys: Capture, args: list[str], words: list[str]) -> None:
    Path("empty.pickle").write_bytes(pickle.dumps({}, protocol=4))
    bad = {"segments": [], "device_traces": [[{}]]}
    Path("bad.pickle").write_bytes(pickle.dumps(bad, protocol=4))
    status, out, err = run(capsys, "snapshot", *args)
    lines = [line for line in err.splitlines() if line != "a line of the user's own"]
    assert (status, out, len(lines)) == (2, "", 1), err
    assert lines[0].startswith("batchfit: ")
    for word in words:
        assert word in lines[0]
    assert not Path("a").exists()
