"""fms-acceleration: fine-tuning with the Hugging Face Trainer, gradient checkpointing, bf16."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from batchfit.estimator import Workload

from .base import Job, Parts, Step
from .huggingface import config_of, token_ids

JOBS: dict[str, Job] = {}

# ibm/PowerLM-3b, config.json of the hub.
POWERLM_3B: dict[str, Any] = {
    "model_type": "granite", "hidden_size": 2304, "intermediate_size": 9216,
    "num_hidden_layers": 40, "num_attention_heads": 36, "num_key_value_heads": 36,
    "vocab_size": 49152, "max_position_embeddings": 4096, "hidden_act": "silu",
    "tie_word_embeddings": True, "attention_multiplier": 0.015625, "embedding_multiplier": 12.0,
    "logits_scaling": 9.0, "residual_multiplier": 0.22, "attention_dropout": 0.1,
}  # fmt: skip
Model = str | dict[str, Any]


def make(model_id: Model, lora: bool) -> nn.Module:
    import transformers

    transformers.logging.set_verbosity_error()
    model: Any = transformers.AutoModelForCausalLM.from_config(
        config_of(model_id), torch_dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    if lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(
            model,
            LoraConfig(
                r=16, lora_alpha=16, lora_dropout=0.1, task_type="CAUSAL_LM",
                target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
            ),
            autocast_adapter_dtype=False,
        )  # fmt: skip
    result: nn.Module = model.train()
    return result


def fine_tune(model_id: Model, length: int, lora: bool) -> Workload:
    """One step of the Trainer: foreach AdamW, clipping, zero_grad by the model.

    ``use_cache`` stays as the configuration has it. Most models switch it off when activations are
    recomputed; GPTBigCode does not, and its outputs then live into the next forward.
    """

    def build(device: torch.device) -> Step:
        model: Any = make(model_id, lora).to(device)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if lora:
            model.enable_input_require_grads()
        vocabulary = model.config.vocab_size
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5)

        def step(batch: int) -> None:
            ids = torch.randint(0, vocabulary, (batch, length))
            inputs = {"input_ids": ids.to(device), "labels": ids.clone().to(device)}
            loss = model(**inputs).loss
            del inputs
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            model.zero_grad()

        return step

    return Workload.from_step(build, name=str(model_id))


# refs/requirements.txt and requirements_granite.txt of the repository.
LATER, EARLIER = "transformers-4.48", "transformers-4.45-peft"


def _add(
    row: str, model_id: Model, batch: int, length: int, lora: bool, environment: str = LATER
) -> None:
    JOBS[row] = Job(
        lambda: fine_tune(model_id, length, lora), batch, "A100 80GB",
        environment=environment,
        parts=lambda: Parts(
            lambda: make(model_id, lora), token_ids(length), optimizer="adam",
            dtype=torch.bfloat16, checkpointing=True,
            hub_name=model_id if isinstance(model_id, str) else "",
        ),
    )  # fmt: skip


for _batch in (4, 8):
    _add(
        f"fms_gpt_bigcode-santac_full_none_b{_batch}", "bigcode/gpt_bigcode-santacoder", _batch,
        2048, False,
    )  # fmt: skip
    _add(
        f"fms_mistral-7b-v01_full_none_b{_batch}", "mistralai/Mistral-7B-v0.1", _batch, 4096, False
    )
_add("fms_mistral-7b-v01_lora_none_b8", "mistralai/Mistral-7B-v0.1", 8, 4096, True)
_add("fms_powerlm-3b_lora_none_b4", POWERLM_3B, 4, 4096, True, EARLIER)
