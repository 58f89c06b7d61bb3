"""Hugging Face models: the tables of their documentation, two BERT notebooks."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import nn

from batchfit.estimator import Estimate, Phase, Workload
from batchfit.estimator.allocator.caching import CachingAllocator

from .base import Job, Parts, Step, allocated_at

JOBS: dict[str, Job] = {}


def config_of(model_id: str | dict[str, Any], **changes: Any) -> Any:
    """A configuration that ships with batchfit, or its values, as this transformers reads it."""
    from transformers import AutoConfig

    from batchfit.cli.hf_configs import bundled_config

    found = model_id if isinstance(model_id, dict) else bundled_config(model_id)
    assert found is not None, model_id
    values = {k: v for k, v in found.items() if not k.startswith("_")} | changes
    return AutoConfig.for_model(values.pop("model_type"), **values)


def make(model_id: str | dict[str, Any], auto: str, **options: Any) -> nn.Module:
    """A model of an Auto class; options of ``from_config``."""
    import transformers

    model: nn.Module = getattr(transformers, auto).from_config(config_of(model_id), **options)
    return model.train()


def token_ids(length: int, vocabulary: int = 1000) -> Any:
    return lambda batch: {"input_ids": torch.randint(0, vocabulary, (batch, length))}


def documentation_table(
    model_id: str | dict[str, Any], auto: str, length: int, attention: str
) -> Workload:
    """huggingface/transformers SDPA tables: fp16, train mode, loss = logits.sum()."""

    def build(device: torch.device) -> Step:
        model = make(model_id, auto, attn_implementation=attention, torch_dtype=torch.float16).to(
            device
        )
        vocabulary = model.config.vocab_size
        held: dict[str, Any] = {}

        def step(batch: int) -> None:
            model.zero_grad()
            if "ids" not in held:
                held["ids"] = torch.randint(0, vocabulary, (batch, length), device=device)
            held["out"] = model(input_ids=held["ids"])
            held["loss"] = held["out"].logits.sum()
            held["loss"].backward()

        return step

    return Workload.from_step(build, name=model_id)


LAPTOP = "RTX 3080 Ti"  # the same compute capability as the laptop card of the rows
GPT2, OPT, PYTHIA = "gpt2-large", "facebook/opt-350m", "EleutherAI/pythia-410m-deduped"
_CAUSAL, _MASKED = "AutoModelForCausalLM", "AutoModelForMaskedLM"
BIOGPT, DISTILBERT, TURING = "microsoft/biogpt", "distilbert-base-uncased", "RTX 2060"
for _row, _model, _auto, _batch, _length, _gpu in (
    ("bertbase_b4_s512_eager", "bert-base-uncased", _MASKED, 4, 512, "A100 80GB"),
    ("bertbase_b16_s512_sdpa", "bert-base-uncased", _MASKED, 16, 512, "A100 80GB"),
    ("opt350m_b2_s1024_sdpa", OPT, _CAUSAL, 2, 1024, "L40S"),
    ("pythia410m_b4_s512_eager", PYTHIA, _CAUSAL, 4, 512, LAPTOP),
    ("pythia410m_b4_s2048_sdpa", PYTHIA, _CAUSAL, 4, 2048, LAPTOP),
    ("gpt2large_b1_s128_eager", GPT2, _CAUSAL, 1, 128, LAPTOP),
    ("gpt2large_b1_s1024_eager", GPT2, _CAUSAL, 1, 1024, LAPTOP),
    ("gpt2large_b4_s512_eager", GPT2, _CAUSAL, 4, 512, LAPTOP),
    ("gpt2large_b4_s1024_sdpa", GPT2, _CAUSAL, 4, 1024, LAPTOP),
    ("distilbert_b8_s256_eager", DISTILBERT, _MASKED, 8, 256, TURING),
    ("biogpt_b1_s256_eager", BIOGPT, _CAUSAL, 1, 256, TURING),
    ("biogpt_b4_s256_eager", BIOGPT, _CAUSAL, 4, 256, TURING),
    ("biogpt_b8_s256_sdpa", BIOGPT, _CAUSAL, 8, 256, TURING),
):
    _attention = _row.rsplit("_", 1)[1]
    # The rows were measured with the code that brought SDPA to each model: 4.43 for GPT-2 and
    # GPT-NeoX (which keeps its rotated keys in fp32), 4.45 for BERT, 4.48 for OPT.
    _environment = "transformers-4.41"
    if _attention == "sdpa":
        _environment = {
            "bert-base-uncased": "transformers-4.45", OPT: "transformers-4.48",
            BIOGPT: "transformers-4.48",
        }.get(_model, "transformers-4.43")  # fmt: skip
    JOBS[f"hfsdpa_{_row}"] = Job(
        lambda m=_model, a=_auto, n=_length, k=_attention: documentation_table(m, a, n, k),
        _batch, _gpu, environment=_environment,
        parts=lambda m=_model, a=_auto, n=_length, k=_attention: Parts(
            lambda: make(m, a, attn_implementation=k, torch_dtype=torch.float16), token_ids(n),
            dtype=torch.float16, hub_name=m,
        ),
    )  # fmt: skip


def bert_large(head: str) -> nn.Module:
    return make("bert-large-uncased", f"AutoModelFor{head}", attn_implementation="eager")


def bert_large_notebook() -> Workload:
    """A blog notebook: two iterations of fp32 AdamW on bert-large, sequence 512."""

    def build(device: torch.device) -> Step:
        model = bert_large("SequenceClassification").to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        held: dict[str, Any] = {}

        def step(batch: int) -> None:
            optimizer.zero_grad()
            if "ids" not in held:
                held["ids"] = torch.randint(0, 30522, (batch, 512)).to(device)
                held["labels"] = torch.randint(0, 2, (batch,)).to(device)
            held["out"] = model(input_ids=held["ids"], labels=held["labels"])
            held["out"].loss.backward()
            optimizer.step()

        return step

    return Workload.from_step(build, name="bert-large, two AdamW steps")


def reserved_at_second_backward(e: Estimate, batch: int) -> int:
    """Reserved bytes after the second forward; the notebook calls empty_cache between all phases.

    That is: before its gradients, its optimizer's step, the next forward, and when it prints.
    """
    timeline = e.timeline_at(batch)
    sizes = timeline.sizes(batch)
    cleared = {position for position, _, _ in timeline.marks}
    end = next(p for p, ph, st in timeline.marks if (ph, st) == (Phase.BACKWARD, 2))
    allocator = CachingAllocator(e.allocator)
    blocks: dict[int, Any] = {}
    for position, event in enumerate(timeline.events[:end]):
        if position in cleared:
            allocator.empty_cache()
        if event >= 0 and sizes[event]:
            blocks[int(event)] = allocator.malloc(int(sizes[event]))
        elif event < 0 and ~int(event) in blocks:
            allocator.free(blocks.pop(~int(event)))
    allocator.empty_cache()
    return allocator.reserved


for _row, _measure in (
    ("peak", None),
    ("weights", allocated_at(Phase.FORWARD, 1)),
    ("fwd1", allocated_at(Phase.BACKWARD, 1)),
    ("reserved_fwd2", reserved_at_second_backward),
):
    JOBS[f"nb_bertlarge_{_row}"] = Job(
        bert_large_notebook, 4, "RTX 3090", _measure, environment="transformers-4.41",
        parts=lambda: Parts(
            lambda: bert_large("SequenceClassification"), token_ids(512), optimizer="adam",
            hub_name="bert-large-uncased",
        ),
    )  # fmt: skip


class SoftmaxBefore111(torch.autograd.Function):
    """Softmax as torch had it up to 1.10: its input is saved beside its result.

    derivatives.yaml: ``self: _softmax_backward_data(grad, result, dim, self)``; 1.11 takes only the
    input's dtype.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int) -> torch.Tensor:
        result = torch.softmax(x, dim)
        ctx.save_for_backward(x, result)
        ctx.dim = dim
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        x, result = ctx.saved_tensors
        return torch._softmax_backward_data(gradients[0], result, ctx.dim, x.dtype), None


def bert_squad() -> Workload:
    """run_qa.py of 2021: bert-large, sequence 384, fp32, AdamW of transformers (not foreach)."""

    def build(device: torch.device) -> Step:
        model = bert_large("QuestionAnswering").to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-5, foreach=False)
        held: dict[str, Any] = {}

        def step(batch: int) -> None:
            ids = torch.randint(0, 30522, (batch, 384))
            positions = torch.randint(0, 384, (batch,))
            inputs = {
                "input_ids": ids, "attention_mask": torch.ones_like(ids),
                "token_type_ids": torch.zeros_like(ids), "start_positions": positions,
                "end_positions": positions.clone(),
            }  # fmt: skip
            with mock.patch("torch.nn.functional.softmax", SoftmaxBefore111.apply):
                out = model(**{k: v.to(device) for k, v in inputs.items()})
            loss = out.loss
            loss.backward()
            del out
            held["loss"] = loss.detach()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
            optimizer.step()
            model.zero_grad(set_to_none=False)

        return step

    return Workload.from_step(build, name="bert-large SQuAD")


JOBS["hub_bertlarge_squad"] = Job(
    bert_squad, 12, "V100 32GB", before_2=True, environment="transformers-4.41",
    parts=lambda: Parts(
        lambda: bert_large("QuestionAnswering"), token_ids(384), optimizer="adam",
        hub_name="bert-large-uncased",
    ),
)  # fmt: skip
