"""The accuracy suite: its rows, its figures, its processes, and what it wrote."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from .helpers import load_script

pytest.importorskip("yaml", reason="comes with timm and transformers")
ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))


def _module(name: str) -> Any:
    return importlib.import_module(f"benchmarks.accuracy.{name}")


entries, report, runner, environments, probes, peers, main = (
    _module(name)
    for name in ("entries", "report", "runner", "environments", "probes", "peers", "__main__")
)
RESULTS = ROOT / "benchmarks" / "results" / "accuracy.json"


# -- rows -----------------------------------------------------------------------------------------


def test_every_row_of_the_data_is_an_entry() -> None:
    expected = {
        "peaks": len(entries.read_csv("measured_peaks.csv")),
        "operators": len(entries.read_csv("op_memory_a100.csv")),
        "largest": len(entries.read_csv("max_batch.csv")),
        "timm": len(entries.read_csv("timm_sample.csv")),
        "timm-all": len(entries.read_csv("timm_train_brackets.csv")),
        "steps": 8,
    }
    for table, rows in expected.items():
        found = entries.entries([table])
        assert len(found) == rows == len({entry.id for entry in found}), table


def test_sizes_are_bytes() -> None:
    facts = {e.row: e.facts["measured"] for e in entries.entries(["peaks", "operators"])}
    assert facts["amp_recipe_fp32"] == 1350681600  # printed in bytes
    assert facts["mmseg_unet_fcn_64"] == 680 * 2**20  # 0.680 "GB", which are MiB / 1000
    assert facts["nb_bertlarge_peak"] == round(10562.79 * 2**20)
    assert facts["cross_entropy_full_V4096"] == 1342309376
    assert facts["embedding_full_V4096_D768"] == round((12401.40625 - 12356.537109375) * 2**20)


def test_a_row_has_a_job_or_a_reason() -> None:
    for entry in entries.entries():
        if entry.not_built:
            assert len(entry.not_built) > 10, entry.id
        else:
            asked = entries.table(entry.table).questions(entry)
            assert asked and all(question.job.gpu for question in asked), entry.id


def test_scaling_takes_one_value_per_batch() -> None:
    series = _module("tables.scaling").series()
    assert series["bert-fp16"][0] == (1, 3885 * 2**20)
    assert series["bert-fp16"][-1] == (136, 61365 * 2**20)
    assert [b for b, _ in series["t5"]] == [1, 8, 24, 32]


def test_a_bracket_is_judged_by_bytes() -> None:
    judge = _module("tables.timm").judge
    needs = {"need_fitted": 100, "need_failed": 200}
    assert judge(needs, 150) == {"off": 0, "off_pct": 0.0, "right": True}
    assert judge(needs, 80) == {"off": 20, "off_pct": 25.0, "right": False}
    assert judge(needs, 250) == {"off": -50, "off_pct": -20.0, "right": False}
    assert judge(needs, 200)["right"] is False  # the failed batch would have fitted


# -- figures --------------------------------------------------------------------------------------


def test_summary_of_errors() -> None:
    summary = report.summarize([-4.0, 1.0, -0.005, 2.0, 3.0])
    assert (summary.rows, summary.median, summary.worst) == (5, 2.0, 4.0)
    assert summary.p90 == pytest.approx(3.6)
    assert summary.under == 0.2  # -0.005 % is what the source rounded away
    assert report.summarize([]) is None


def test_what_got_worse() -> None:
    before = {
        "a": {"error_pct": -1.0}, "b": {"error_pct": 1.0}, "c": {"right": True}, "d": {},
    }  # fmt: skip
    now = [
        {"id": "a", "error_pct": 1.05}, {"id": "b", "error_pct": -1.2},
        {"id": "c", "right": False, "off_pct": 2.0}, {"id": "d", "error": "exit 1"},
        {"id": "new", "error_pct": 50.0},
    ]  # fmt: skip
    assert [line.split(":")[0] for line in report.worse(now, before)] == ["b", "c", "d"]


@given(
    st.floats(0, 1e10), st.floats(1, 1e9), st.lists(st.integers(1, 500), min_size=4, max_size=4,
                                                    unique=True),
)  # fmt: skip
def test_curves_through_exact_points(fixed: float, slope: float, batches: list[int]) -> None:
    *three, last = sorted(batches)
    points = [{"batch": b, "measured": fixed + slope * b} for b in three]
    expected = fixed + slope * last
    for name in ("line, 2 probes", "line, 3 probes", "quadratic, 3 probes"):
        count, fit = probes.FITS[name]
        assert fit(points[:count], last) == pytest.approx(expected, rel=1e-4), name
    powers = [{"batch": b, "measured": slope * b**0.7} for b in three]
    assert probes.power_law(powers, last) == pytest.approx(slope * last**0.7, rel=1e-6)


def test_peers_are_counted_on_the_same_entries() -> None:
    records = [
        {"id": "a", "error_pct": -2.0, "seconds": 4.0}, {"id": "b", "right": True, "off_pct": 0.0},
        {"id": "c", "error_pct": 9.0}, {"id": "d", "not_built": "no code"},
    ]  # fmt: skip
    asked = {
        "a": {"id": "a", "tool": {"error_pct": 50.0, "seconds": 1.0}},
        "b": {"id": "b", "tool": {"right": False, "seconds": 3.0}},
        "d": {"id": "d", "tool": {"cannot": "never counted"}},
    }
    ours, tool = report.peer_rows(records, asked)
    assert (ours.name, ours.answered, ours.asked, ours.right) == ("batchfit", 2, 2, 1)
    assert ours.errors.worst == 2.0  # "c" was not asked of the tool
    assert (tool.answered, tool.right, tool.judged, tool.seconds) == (2, 0, 1, 2.0)


def test_rules_of_thumb() -> None:
    base, rules = _module("jobs.base"), _module("peers.rules")
    job = base.Job(
        lambda: None, 3, "T4",
        parts=lambda: base.Parts(
            lambda: torch.nn.Linear(10, 10, bias=False), lambda b: (torch.empty(b, 10),)
        ),
    )  # fmt: skip
    assert rules.four_times_batch(job, 3) == 4 * 100 * 3
    assert rules.four_times_weights(job, 3) == 4 * 400
    assert [rules.pyvideoai(size) for size in (8e9, 16e9, 24e9)] == [4, 8, 16]
    with pytest.raises(peers.CannotAnswer, match="takes a module"):
        rules.four_times_batch(base.Job(lambda: None, 1, "T4"), 1)


def test_a_tool_that_fails_says_why() -> None:
    entry = entries.find("peaks/pt104604_linear_2.0")
    assert peers.ask("thresholds 16/8/4", entry)["cannot"] == "names a batch, not bytes"
    assert peers.ask("4 x weights", entry)["predicted"] == 16 * 2**20
    moment = entries.find("peaks/nb_bertlarge_fwd1")
    assert peers.ask("4 x weights", moment)["cannot"] == "knows peaks, not moments"


# -- processes ------------------------------------------------------------------------------------


def test_answers_survive_a_cut_line(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    runner.append(path, {"id": "a", "predicted": 1})
    with path.open("a") as file:
        file.write('{"id": "b", "pred')
    runner.append(path, {"id": "c", "predicted": 3})
    assert {key: r["predicted"] for key, r in runner.load(path).items()} == {"a": 1, "c": 3}


def test_only_what_is_missing_is_run() -> None:
    chosen = [e for e in entries.entries(["peaks"]) if e.row.startswith("pt104604")]
    chosen.append(next(e for e in entries.entries(["peaks"]) if e.not_built))
    first, second, without = chosen
    known = {first.id: {"predicted": 1}, second.id: {"error": "exit 1"}}
    assert main.pending(chosen, known, again=False) == [without]
    assert main.pending(chosen, known, again=True) == [second, without]
    known[without.id] = {"not_built": "no code"}
    assert main.pending(chosen, known, again=False) == []


def test_a_crash_and_a_hang_are_answers(tmp_path: Path) -> None:
    entry = entries.Entry("peaks", "no such row", "", "", "high")
    crashed = runner.run_estimate(entry, tmp_path)
    assert crashed["error"].startswith("exit 1: StopIteration")
    slow = runner.run_estimate(entries.find("peaks/amp_recipe_fp32"), tmp_path, timeout=0.01)
    assert slow["error"].startswith("not ready after")


def test_tools_after_one_that_crashed_are_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def child(arguments: list[str], folders: Any, timeout: float) -> tuple[list[Any], str]:
        names = arguments[2].split(",")
        asked.append(arguments[2])
        done = names[: names.index("bad")] if "bad" in names else names
        return [{"peer": n, "predicted": 1} for n in done], "exit -11" if "bad" in names else ""

    monkeypatch.setattr(runner, "child", child)
    monkeypatch.setattr(runner, "prepare", lambda name, root: None)
    entry = entries.find("peaks/amp_recipe_fp32")
    found = runner.run_peers(entry, ["a", "bad", "c"], Path())
    assert asked == ["a,bad,c", "c"]
    assert found == {"a": {"predicted": 1}, "bad": {"error": "exit -11"}, "c": {"predicted": 1}}


def test_environments_are_pinned_and_made_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert environments.prepare("", tmp_path) is None
    names = {e.environment for e in entries.entries()} - {""} | {"peers"}
    for name in names:
        assert all("==" in package for package in environments.packages(name)), name
    with pytest.raises(KeyError, match=r"no environment 'x' in environments\.toml"):
        environments.packages("x")

    def pip(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        Path(command[command.index("--target") + 1], "half.py").touch()
        code = 1 if "timm==0.6.7" in command else 0
        return subprocess.CompletedProcess(command, code, "", "ERROR: no network\n")

    monkeypatch.setattr(environments.subprocess, "run", pip)
    with pytest.raises(RuntimeError, match=r"timm-0\.6\.7: pip failed: ERROR"):
        environments.prepare("timm-0.6.7", tmp_path, lambda text: None)
    assert list(tmp_path.iterdir()) == []
    made = environments.prepare("peers", tmp_path, lambda text: None)
    assert made is not None and list(tmp_path.iterdir()) == [made]


def test_one_row_from_the_command_line(tmp_path: Path) -> None:
    """A real process, from the row of the data to the figure: 8 MiB and cuBLAS's 8.125 MiB."""
    arguments = ["--only", "pt104604_linear_2.0", "--no-peers", "--work", str(tmp_path)]
    result = CliRunner().invoke(main.main, arguments)
    assert result.exit_code == 0, result.output
    record = runner.load(tmp_path / "answers.jsonl")["peaks/pt104604_linear_2.0"]
    assert (record["measured"], record["predicted"]) == (16908288, 16908288)
    assert "pt104604_linear_2.0" in result.output


# -- what was written -----------------------------------------------------------------------------


def test_every_miss_has_a_cause() -> None:
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]
    assert len(rows) > 200
    assert [r["id"] for r, cause in report.misses(rows) if cause == "not explained"] == []
    assert [r["id"] for r in rows if "error" in r] == []
    known = {e.id for e in entries.entries(entries.TABLES)}
    assert set(report.causes()) <= known


def test_the_page_shows_the_results() -> None:
    page = load_script(ROOT / "docs" / "build_accuracy.py")
    assert page.PAGE.read_text(encoding="utf-8") == page.build()


def test_the_quick_set_needs_nothing_that_is_not_installed() -> None:
    chosen = [e for e in entries.entries() if e.id in main.QUICK]
    assert len(chosen) == len(main.QUICK)
    assert {e.environment for e in chosen} == {""} and not any(e.not_built for e in chosen)
    assert {e.table for e in chosen} == {"peaks", "operators", "steps", "largest", "scaling"}
