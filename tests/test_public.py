"""Public measurements of whole models, predicted with the installed transformers.

Sources: tests/data/truth/README.md and the rows of measured_peaks.csv named below.
"""

import csv
from pathlib import Path

import pytest
import torch

from batchfit.cli.hf_configs import bundled_config
from batchfit.estimator import Phase, Workload, estimate

transformers = pytest.importorskip("transformers")

TRUTH = Path(__file__).parent / "data" / "truth"
UNITS = {"bytes": 1, "MiB": 2**20}


def measured(row_id):
    with (TRUTH / "measured_peaks.csv").open() as file:
        row = next(r for r in csv.DictReader(file) if r["id"] == row_id)
    return float(row["value"]) * UNITS[row["unit"]]


def config(model_id, **changes):
    values = {k: v for k, v in bundled_config(model_id).items() if not k.startswith("_")}
    values |= changes
    return transformers.AutoConfig.for_model(values.pop("model_type"), **values)


@pytest.fixture(scope="module")
def bert_large():
    def build(device):
        model = transformers.AutoModelForSequenceClassification.from_config(
            config("bert-large-uncased"), attn_implementation="eager"
        ).to(device)
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        held = {}

        def step(batch):
            optimizer.zero_grad()
            if not held:
                held["ids"] = torch.randint(0, 30522, (batch, 512)).to(device)
                held["labels"] = torch.randint(0, 2, (batch,)).to(device)
            held["out"] = model(input_ids=held["ids"], labels=held["labels"])
            held["out"].loss.backward()
            optimizer.step()

        return step

    return estimate(Workload.from_step(build, name="bert-large"), gpu="RTX 3090", allocator="")


def allocated_at(e, batch, phase, step):
    curve = e.timeline(batch)
    position = next(p for p, ph, st in curve.marks if (ph, st) == (phase, step))
    return curve.allocated[position - 1]


def test_bert_large_peak(bert_large):
    assert bert_large.peak(4) == pytest.approx(measured("nb_bertlarge_peak"), rel=0.003)


def test_bert_large_weights(bert_large):
    found = allocated_at(bert_large, 4, Phase.FORWARD, 1)
    assert found == pytest.approx(measured("nb_bertlarge_weights"), rel=0.003)


def test_bert_large_after_the_first_forward_pass(bert_large):
    found = allocated_at(bert_large, 4, Phase.BACKWARD, 1)
    assert found == pytest.approx(measured("nb_bertlarge_fwd1"), rel=0.003)


def test_mistral_7b_full_fine_tune():
    # The optimizer step is the peak: weights, gradients, two states and the list that foreach
    # AdamW makes, 5 x 2 bytes x 7.24e9 parameters, whatever the batch.
    def inputs(batch):
        ids = torch.randint(0, 32000, (batch, 4096))
        return {"input_ids": ids, "labels": ids}

    work = Workload(
        model=lambda: transformers.AutoModelForCausalLM.from_config(
            config("mistralai/Mistral-7B-v0.1", use_cache=False)
        ),
        inputs=inputs,
        precision="bf16",
        optimizer="adamw",
        checkpointing=True,
        keep_outputs=False,  # as the Trainer of that row
        name="mistral-7b",
    )
    e = estimate(work, gpu="A100 80GB", allocator="")
    assert e.peak(4) == pytest.approx(measured("fms_mistral-7b-v01_full_none_b4"), rel=0.001)
    assert e.peak_moment(4).phase is Phase.OPTIMIZER
