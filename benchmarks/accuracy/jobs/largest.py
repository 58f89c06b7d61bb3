"""Reports of which batch ran on a card and which did not (max_batch.csv)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from batchfit.estimator import Workload, find_gpu
from batchfit.estimator.gpus import context_bytes_of

from .base import Job, Parts, Step
from .huggingface import token_ids
from .notebooks import images, resnet50, resnet50_t4_once

# Not in the catalogue: its nominal memory and 58 SMs (NVIDIA's product page).
LAPTOP_3080_TI = replace(
    find_gpu("RTX 3070 Laptop"), name="RTX 3080 Ti Laptop", total_bytes=16 * 2**30,
    sm_count=58, context_bytes=context_bytes_of("nvidia", 58, 1536),
)  # fmt: skip
# Total bytes where the row states them; elsewhere the catalogue's.
TOTALS = {
    "t4_resnet50_none": 15_830_000_000,
    "t4_resnet50_per_block": 15_830_000_000,
    "xmem_cnxb_adamw_3060": 12_622_168_064,
    "xmem_r152_adam_3060": 12_622_168_064,
    "xmem_r101_sgd_4060": 8_318_222_336,
}
JOBS: dict[str, Job] = {}

for _checkpointed, _row in ((False, "none"), (True, "per_block")):
    JOBS[f"t4_resnet50_{_row}"] = Job(
        lambda c=_checkpointed: resnet50_t4_once(c), 0, "T4",
        parts=lambda c=_checkpointed: Parts(
            lambda: resnet50(c), images(224), checkpointing=c
        ),
    )  # fmt: skip


def vision(name: str) -> nn.Module:
    import torchvision

    model: nn.Module = torchvision.models.get_model(name, weights=None, num_classes=10)
    return model


def xmem(name: str, optimizer: str) -> Workload:
    """xMem's loop: CIFAR-10 at 86 pixels, 10 classes, zero_grad at its start, defaults."""
    return Workload(
        model=lambda: vision(name), inputs=lambda b: torch.empty(b, 3, 86, 86),
        loss="cross_entropy", optimizer=optimizer, name=f"{name}, {optimizer}",
    )  # fmt: skip


for _row, _name, _optimizer, _gpu in (
    ("xmem_cnxb_adamw_3060", "convnext_base", "adamw:lr=1e-3", "RTX 3060"),
    ("xmem_r101_sgd_4060", "resnet101", "sgd:lr=1e-3,momentum=0", "RTX 4060"),
    ("xmem_r152_adam_3060", "resnet152", "adam:lr=1e-3", "RTX 3060"),
):
    JOBS[_row] = Job(
        lambda n=_name, o=_optimizer: xmem(n, o), 0, _gpu,
        parts=lambda n=_name, o=_optimizer: Parts(
            lambda: vision(n), images(86), optimizer="sgd" if o.startswith("sgd") else "adam"
        ),
    )  # fmt: skip


def _language_model(kind: str, attention: str) -> nn.Module:
    import transformers

    if kind == "pythia":
        config: Any = transformers.GPTNeoXConfig(
            hidden_size=1024, num_hidden_layers=24, num_attention_heads=16,
            intermediate_size=4096, vocab_size=50304, rotary_pct=0.25,
            attn_implementation=attention,
        )  # fmt: skip
    else:
        config = transformers.OPTConfig(
            hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, ffn_dim=4096,
            vocab_size=50272, word_embed_proj_dim=512, do_layer_norm_before=False,
            attn_implementation=attention,
        )  # fmt: skip
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(
        config, torch_dtype=torch.float16
    )
    return model.train()


def language_model(kind: str, length: int, attention: str) -> Workload:
    """The Hugging Face tables: fp16 weights, ``logits.sum()``, outputs stay until the next ones."""

    def build(device: torch.device) -> Step:
        model = _language_model(kind, attention).to(device)
        kept: dict[str, Any] = {}

        def step(batch: int) -> None:
            ids = torch.randint(100, 1000, (batch, length), device=device)
            model.zero_grad()
            kept["outputs"] = model(input_ids=ids)
            kept["outputs"].logits.sum().backward()

        return step

    return Workload.from_step(build, name=f"{kind} {length} {attention}")


for _row, _kind, _length, _attention, _card in (
    ("hfsdpa_opt350m_eager_2048b", "opt", 1024, "eager", "L40S"),
    ("hfsdpa_pythia_eager_1024", "pythia", 1024, "eager", LAPTOP_3080_TI),
    ("hfsdpa_pythia_eager_2048", "pythia", 2048, "eager", LAPTOP_3080_TI),
    ("hfsdpa_pythia_sdpa_2048", "pythia", 2048, "sdpa", LAPTOP_3080_TI),
):
    JOBS[_row] = Job(
        lambda k=_kind, n=_length, a=_attention: language_model(k, n, a), 0, _card,
        environment="transformers-4.48" if _attention == "sdpa" else "transformers-4.41",
        parts=lambda k=_kind, n=_length, a=_attention: Parts(
            lambda: _language_model(k, a), token_ids(n), dtype=torch.float16,
            hub_name="facebook/opt-350m" if k == "opt" else "EleutherAI/pythia-410m-deduped",
        ),
    )  # fmt: skip
