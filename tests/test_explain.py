"""From what tensors ask for to what nvidia-smi shows."""

import json

import pytest
import torch

from batchfit.cli import main
from batchfit.estimator import Workload, estimate

MIB = 2**20


def linear(width: int, **options):
    job = Workload(
        model=torch.nn.Linear(width, width, bias=False), inputs=torch.empty(1, width),
        inference=True,
    )  # fmt: skip
    return estimate(job, gpu="T4", **options)


def test_by_hand():
    # A weight of 25,000,000 B (2500 x 2500) takes 25,000,448 B of a segment of 24 MiB; its rest is
    # not split off. Inputs and outputs of 10,000 B take blocks of 10,240 B.
    found = linear(2500, workspaces=False).explain(1)
    assert found.requested == 25_000_000 + 3 * 10_000  # two outputs: the last step's is kept
    assert found.rounding == (25_000_448 - 25_000_000) + 3 * 240
    assert found.unsplit == 24 * MIB - 25_000_448
    assert found.reserved == 24 * MIB + 2 * MIB
    assert found.workspace == 0


def test_an_unsplit_rest():
    # 25 MiB fill a segment of 26 MiB.
    side = 2560  # 2560 x 2560 x 4 = 25 MiB
    assert linear(side, workspaces=False).explain(1).unsplit == MIB


@pytest.mark.parametrize("batch", [1, 7, 64])
def test_the_lines_add_up(batch):
    job = Workload(model=torch.nn.Linear(1000, 300), inputs=torch.empty(1, 1000), loss="sum")
    made = estimate(job, gpu="T4")
    found = made.explain(batch)
    assert found.requested + found.rounding + found.unsplit == found.allocated == made.peak(batch)
    assert found.allocated + found.cached == found.reserved == made.reserved(batch)
    assert found.reserved + found.context == found.process
    assert found.context == made.gpu.context_bytes
    assert found.torchinfo == made.layers.torchinfo_total(batch)
    assert str(found).count("\n") == len(found.rows()) - 1


def test_a_step_function_has_no_torchinfo_line():
    def build(device):
        return lambda batch: torch.empty(batch, 1000, device=device).sum()

    found = estimate(Workload.from_step(build), gpu="T4").explain(4)
    assert found.torchinfo is None
    assert "torchinfo" not in str(found)


def test_command(capsys):
    args = ["explain", "torchvision:resnet18", "--batch", "4", "--gpu", "t4"]
    assert main(args) == 0
    assert "what nvidia-smi shows" in capsys.readouterr().out
    assert main([*args, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["reserved_bytes"] + found["context_bytes"] == found["process_bytes"]
    with open("docs/json.md", encoding="utf-8") as file:
        documented = file.read().split("`batchfit.explain/1`")[-1]
    assert all(f"| `{name}" in documented for name in found if name != "schema")
