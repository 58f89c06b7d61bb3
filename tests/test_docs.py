"""The documents: what they show is what the program prints, and nothing is left out."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import click
import pytest

from batchfit.cli import main
from batchfit.cli.main import cli

from .helpers import load_script

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = sorted(
    path
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
)  # fmt: skip


build = load_script(ROOT / "docs" / "build_cli.py")


@pytest.mark.parametrize("name", cli.commands)
def test_every_command_and_option_is_documented_and_has_help(name: str) -> None:
    command = cli.commands[name]
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert f"## `batchfit {name}`" in text
    assert command.help and command.short_help
    for option in command.params:
        if isinstance(option, click.Option):
            assert option.help, option.name
            assert all(flag in text for flag in option.opts), option.name


@pytest.mark.parametrize("document", build.DOCUMENTS)
def test_what_is_shown_is_what_is_printed(document: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchvision")
    monkeypatch.setenv("COLUMNS", "80")
    assert build.stale(document) == []
    assert build.blocks((ROOT / document).read_text(encoding="utf-8"))


def test_a_change_of_the_output_is_noticed() -> None:
    shown = "peak allocated     513 MiB  5.51 GiB\nnote  x"
    assert build.form(shown) == build.form("peak allocated     1.03 GiB   612 MiB\nnote  x")
    assert build.form(shown) != build.form("peak     513 MiB  5.51 GiB\nnote  x")


def test_readme_commands_are_understood() -> None:
    """Every batchfit command in a README block parses: its command and options exist."""
    found = 0
    for block in re.findall(r"```sh\n(.*?)```", README, re.S):
        for line in block.splitlines():
            for part in line.split(" && "):
                words = shlex.split(part)
                if words and words[0].rpartition("/")[2] == "batchfit":
                    command = cli.commands[words[1]]
                    command.make_context(words[1], words[2:], resilient_parsing=False)
                    found += 1
    assert found >= 6


def test_readme_has_two_commands_to_set_up() -> None:
    commands = re.findall(r"^python3 -m venv .*$", README, re.M)
    assert len(commands) == 2
    assert commands[0].endswith("batchfit estimate torchvision:resnet50 --gpu rtx-3090")
    assert commands[1].endswith("pytest -n 2")
    extras = set(re.findall(r"\[([a-z,]+)\]", " ".join(commands)))
    assert extras == {"vision", "vision,hf,dev"}


def test_readme_code_runs(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torchvision")
    code = re.findall(r"```python\n(.*?)```", README, re.S)[0]
    names: dict[str, Any] = {}
    exec(code, names)
    shown = re.search(r"^largest batch +(\d+)", README, re.M)
    assert shown and names["answer"].batch > 0
    assert capsys.readouterr().out.startswith(f"{names['answer'].batch}: ")


def test_ci_runs_the_tests_as_the_readme_says() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    text = script.read_text(encoding="utf-8")
    pattern = re.search(r"grep -E '([^']+)' README\.md", text)
    assert pattern and len(re.findall(pattern[1], README, re.M)) == 1
    for tool in ("ruff check", "ruff format --check", "mypy", "lint-imports"):
        assert f".venv/bin/{tool}" in text


def test_links_lead_somewhere() -> None:
    for document in DOCUMENTS:
        for link in re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text(encoding="utf-8")):
            if "://" not in link:
                assert (document.parent / link).exists(), (document.name, link)


# -- the JSON schema ------------------------------------------------------------------------------


def _documented(schema: str) -> set[str]:
    text = (ROOT / "docs" / "json.md").read_text(encoding="utf-8")
    section = text.split(f"`{schema}`\n", 1)[1].split("\n## ", 1)[0]
    return set(re.findall(r"^\| `([\w.\[\]]+)` \|", section, re.M))


def _fields(value: Any, path: str = "") -> set[str]:
    """Paths of the fields of an object, in the notation of the document."""
    if isinstance(value, dict):
        inner = {p for k, v in value.items() for p in _fields(v, f"{path}.{k}" if path else k)}
        return inner or {path}
    if isinstance(value, list):
        return {f"{path}[]"} | {
            p for item in value if isinstance(item, dict) for p in _fields(item, f"{path}[]")
        }
    return {path}


def _printed(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main([*args, "--json"]) == 0
    return dict(json.loads(capsys.readouterr().out))


SMALL = """
import torch
from batchfit.estimator import Workload
small = Workload(model=lambda: torch.nn.Linear(8, 8), inputs=lambda b: torch.empty(b, 8))
def loop(device):
    model = torch.nn.Linear(8, 8).to(device)
    def step(batch):
        model(torch.randn(batch, 8, device=device)).sum().backward()
        model.zero_grad()
    return step
step = Workload.from_step(loop)
"""


def test_estimate_json_has_the_documented_fields(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "small.py").write_text(SMALL)
    target = str(tmp_path / "small.py")
    documented = _documented("batchfit.estimate/1")
    parents = {"torchinfo"}
    full = _printed(capsys, "estimate", f"{target}:small", "--gpu", "t4", "--layers")
    assert full["schema"] == "batchfit.estimate/1"
    assert _fields(full) == documented - parents
    # A step function and no --layers: the same fields, some of them null.
    bare = _printed(capsys, "estimate", f"{target}:step", "--batch", "4")
    assert set(bare) == set(full) and set(bare["workload"]) == set(full["workload"])
    assert bare["torchinfo"] is None and bare["layers"] is None and bare["modules"] is None
    assert bare["gpus"][0]["fits"] is None and bare["batches"][0]["fits"] is None


def test_gpus_json_has_the_documented_fields(capsys: pytest.CaptureFixture[str]) -> None:
    found = _printed(capsys, "gpus", "t4")
    assert found["schema"] == "batchfit.gpus/1"
    assert _fields(found) == _documented("batchfit.gpus/1")
