"""The jobs behind the rows of measured_peaks.csv, built as their sources built them.

Each entry names the row, how to build its workload, and what to read from the estimate. ``library``
is the overlay of pinned packages in which the row's model code is that of its time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from batchfit.estimator import Estimate, Phase, Workload

HF_4_41 = ("transformers==4.41.2", "tokenizers==0.19.1", "huggingface-hub==0.23.5")
HF_4_45 = ("transformers==4.45.2", "tokenizers==0.20.3", "huggingface-hub==0.25.2")
HF_4_48 = (
    "transformers==4.48.1", "tokenizers==0.21.0", "huggingface-hub==0.27.1", "peft==0.13.2",
    "accelerate==1.2.1",
)  # fmt: skip


@dataclass(frozen=True)
class Job:
    """One row.

    Attributes:
        workload: builds the job.
        batch: what to ask the estimate for.
        gpu: the catalogue's name of the row's GPU.
        measure: what the row measured, in bytes; None takes the peak.
        workspaces: whether the row's torch counted the cuBLAS workspace (2.0 and later did).
        attention: a kernel that the row's torch would take where today's would not.
        library: pinned packages of the time; empty for today's.
        cause: why the prediction is off by more than 3 %, where it is.
    """

    workload: Callable[[], Workload]
    batch: int
    gpu: str
    measure: Callable[[Estimate, int], int] | None = None
    workspaces: bool = True
    attention: Any = None
    library: tuple[str, ...] = ()
    cause: str = ""


JOBS: dict[str, Job] = {}


def allocated_at(phase: Phase, step: int) -> Callable[[Estimate, int], int]:
    """Allocated bytes at the moment that a phase begins."""

    def measure(e: Estimate, batch: int) -> int:
        curve = e.timeline(batch)
        position = next(p for p, ph, st in curve.marks if (ph, st) == (phase, step))
        return int(curve.allocated[position - 1])

    return measure


def peak_of_last_step(e: Estimate, batch: int) -> int:
    """The peak after ``reset_peak_memory_stats`` between two steps."""
    curve = e.timeline(batch)
    start = next(p for p, _, step in curve.marks if step == 2)
    return int(curve.allocated[start:].max())


def peak_of_first_step(e: Estimate, batch: int) -> int:
    """The peak of the first step, for jobs that run only one."""
    curve = e.timeline(batch)
    end = next(p for p, _, step in curve.marks if step == 2)
    return int(curve.allocated[:end].max())


# -- notebooks, single operators ---------------------------------------------------------------


def resnet50_t4(checkpointed: bool) -> Workload:
    """A course notebook: forward, CrossEntropyLoss, backward, gradients set to None."""

    def build(device: torch.device) -> Callable[[int], None]:
        import torchvision

        model = torchvision.models.resnet50(weights=None).to(device)
        if checkpointed:
            for layer in (model.layer1, model.layer2, model.layer3, model.layer4):
                for i, block in enumerate(layer):
                    layer[i] = Checkpointed(block)
        criterion = nn.CrossEntropyLoss()
        held: dict[str, Any] = {}

        def step(batch: int) -> None:
            if not held:
                held["x"] = torch.randn(batch, 3, 224, 224, device=device)
                held["y"] = torch.randint(0, 1000, (batch,), device=device)
            held["out"] = model(held["x"])
            held["loss"] = criterion(held["out"], held["y"])
            held["loss"].backward()
            model.zero_grad(set_to_none=True)

        return step

    return Workload.from_step(build, name="ResNet-50, forward and backward")


class Checkpointed(nn.Module):
    """A block whose activations are recomputed."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = checkpoint(self.block, x, use_reentrant=False)
        return result


JOBS["nb_resnet50_t4_none"] = Job(lambda: resnet50_t4(False), 32, "T4")
JOBS["nb_resnet50_t4_per_block"] = Job(lambda: resnet50_t4(True), 32, "T4")


def amp_recipe() -> Workload:
    """pytorch/tutorials recipes_source/recipes/amp_recipe.py, the fp32 run."""

    def build(device: torch.device) -> Callable[[int], None]:
        layers: list[nn.Module] = []
        for _ in range(2):
            layers += [nn.Linear(4096, 4096), nn.ReLU()]
        net = nn.Sequential(*layers, nn.Linear(4096, 4096)).to(device)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.001)
        data = [torch.randn(512, 4096, device=device) for _ in range(50)]
        targets = [torch.randn(512, 4096, device=device) for _ in range(50)]
        loss_fn = nn.MSELoss().to(device)
        held: dict[str, Any] = {}
        pairs = iter(zip(data, targets, strict=True))

        def step(batch: int) -> None:
            x, y = next(pairs)
            held["out"] = net(x)
            held["loss"] = loss_fn(held["out"], y)
            held["loss"].backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

        return step

    return Workload.from_step(build, name="AMP recipe MLP")


JOBS["amp_recipe_fp32"] = Job(amp_recipe, 512, "T4", workspaces=False)


def linear_forward() -> Workload:
    def build(device: torch.device) -> Callable[[int], None]:
        layer = nn.Linear(1024, 1024, bias=False).to(device)
        x = torch.randn(1, 512, 1024, device=device)

        def step(batch: int) -> None:
            layer(x)

        return step

    return Workload.from_step(build, name="nn.Linear forward")


JOBS["pt104604_linear_1.11"] = Job(linear_forward, 1, "V100 16GB", workspaces=False)
JOBS["pt104604_linear_2.0"] = Job(linear_forward, 1, "V100 16GB")


def leaf_benchmark(
    make: Callable[[torch.device], Callable[[torch.Tensor], torch.Tensor]],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    scalar: bool,
) -> Workload:
    """Liger-Kernel's benchmark: a leaf input, its gradient accumulates over iterations."""

    def build(device: torch.device) -> Callable[[int], None]:
        function = make(device)
        x = torch.randn(*shape, dtype=dtype, device=device).requires_grad_(True)
        upstream = None if scalar else torch.randn_like(x)

        def step(batch: int) -> None:
            y = function(x)
            y.backward(upstream, retain_graph=not scalar)  # type: ignore[no-untyped-call]

        return step

    return Workload.from_step(build, name="single operator")


def _cross_entropy(device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
    target = torch.randint(4096, (16384,), device=device)
    criterion = nn.CrossEntropyLoss()
    return lambda x: criterion(x, target)


JOBS["liger_ce_v4096"] = Job(
    lambda: leaf_benchmark(_cross_entropy, (16384, 4096), torch.float32, True), 1, "A100 80GB"
)
JOBS["liger_layernorm_n4096"] = Job(
    lambda: leaf_benchmark(
        lambda device: nn.LayerNorm(4096, eps=1e-6).to(device), (4096, 4096), torch.float32, False
    ),
    1,
    "A100 80GB",
)


# -- Hugging Face ------------------------------------------------------------------------------


def config_of(model_id: str, **changes: Any) -> Any:
    """A configuration that ships with batchfit, as this version of transformers reads it."""
    from transformers import AutoConfig

    from batchfit.cli.hf_configs import bundled_config

    values = bundled_config(model_id)
    assert values is not None, model_id
    values = {k: v for k, v in values.items() if not k.startswith("_")} | changes
    return AutoConfig.for_model(values.pop("model_type"), **values)


def hf_benchmark(model_id: str, auto: str, length: int, attention: str) -> Workload:
    """huggingface/transformers SDPA tables: fp16, train mode, loss = logits.sum()."""

    def build(device: torch.device) -> Callable[[int], None]:
        import transformers

        config = config_of(model_id)
        model_class = getattr(transformers, auto)
        model = model_class.from_config(
            config, attn_implementation=attention, torch_dtype=torch.float16
        ).to(device)
        model.train()
        held: dict[str, Any] = {}

        def step(batch: int) -> None:
            model.zero_grad()
            if "ids" not in held:
                held["ids"] = torch.randint(0, config.vocab_size, (batch, length), device=device)
            held["out"] = model(input_ids=held["ids"])
            held["loss"] = held["out"].logits.sum()
            held["loss"].backward()

        return step

    return Workload.from_step(build, name=model_id)


def _hf(
    row: str, model_id: str, auto: str, batch: int, length: int, attention: str, gpu: str
) -> None:
    # SDPA came to these models between 4.42 and 4.48; the eager rows are of the same tables.
    library = HF_4_41
    if attention == "sdpa":
        library = HF_4_48 if "opt" in model_id or "pythia" in model_id else HF_4_45
    JOBS[row] = Job(
        lambda: hf_benchmark(model_id, auto, length, attention), batch, gpu, library=library
    )


LAPTOP = "RTX 3080 Ti"  # the same compute capability as the laptop card of the rows
for _batch, _attention in ((4, "eager"), (16, "sdpa")):
    _hf(f"hfsdpa_bertbase_b{_batch}_s512_{_attention}", "bert-base-uncased", "AutoModelForMaskedLM",
        _batch, 512, _attention, "A100 80GB")  # fmt: skip
_hf(
    "hfsdpa_opt350m_b2_s1024_sdpa",
    "facebook/opt-350m",
    "AutoModelForCausalLM",
    2,
    1024,
    "sdpa",
    "L40S",
)
for _batch, _length, _attention in ((4, 512, "eager"), (4, 2048, "sdpa")):
    _hf(f"hfsdpa_pythia410m_b{_batch}_s{_length}_{_attention}", "EleutherAI/pythia-410m-deduped",
        "AutoModelForCausalLM", _batch, _length, _attention, LAPTOP)  # fmt: skip
for _batch, _length, _attention in ((1, 128, "eager"), (1, 1024, "eager"), (4, 512, "eager"),
                                    (4, 1024, "sdpa")):  # fmt: skip
    _hf(f"hfsdpa_gpt2large_b{_batch}_s{_length}_{_attention}", "gpt2-large", "AutoModelForCausalLM",
        _batch, _length, _attention, LAPTOP)  # fmt: skip


def bert_large_notebook() -> Workload:
    """A blog notebook: two iterations of fp32 AdamW on bert-large, sequence 512."""

    def build(device: torch.device) -> Callable[[int], None]:
        from transformers import AutoModelForSequenceClassification

        model = AutoModelForSequenceClassification.from_config(
            config_of("bert-large-uncased"), attn_implementation="eager"
        ).to(device)
        model.train()
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


JOBS["nb_bertlarge_peak"] = Job(bert_large_notebook, 4, "RTX 3090", library=HF_4_41)
JOBS["nb_bertlarge_weights"] = Job(
    bert_large_notebook, 4, "RTX 3090", allocated_at(Phase.FORWARD, 1), library=HF_4_41
)
JOBS["nb_bertlarge_fwd1"] = Job(
    bert_large_notebook, 4, "RTX 3090", allocated_at(Phase.BACKWARD, 1), library=HF_4_41
)


def bert_squad() -> Workload:
    """run_qa.py of 2021: bert-large, sequence 384, fp32, AdamW of transformers (not foreach)."""

    def build(device: torch.device) -> Callable[[int], None]:
        from transformers import AutoModelForQuestionAnswering

        model = AutoModelForQuestionAnswering.from_config(
            config_of("bert-large-uncased"), attn_implementation="eager"
        ).to(device)
        model.train()
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


JOBS["hub_bertlarge_squad"] = Job(bert_squad, 12, "V100 32GB", workspaces=False, library=HF_4_41)


def fine_tune(model_id: str | dict[str, Any], length: int, lora: bool) -> Workload:
    """fms-acceleration: Trainer, bf16 weights, gradient checkpointing, foreach AdamW."""

    def build(device: torch.device) -> Callable[[int], None]:
        import transformers
        from transformers import AutoConfig, AutoModelForCausalLM

        if isinstance(model_id, str):
            config = config_of(model_id, use_cache=False)
        else:
            values = dict(model_id)
            config = AutoConfig.for_model(values.pop("model_type"), **values, use_cache=False)
        transformers.logging.set_verbosity_error()
        model = AutoModelForCausalLM.from_config(
            config, torch_dtype=torch.bfloat16, attn_implementation="sdpa"
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
        model = model.to(device)
        model.train()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if lora:
            model.enable_input_require_grads()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5)

        def step(batch: int) -> None:
            ids = torch.randint(0, config.vocab_size, (batch, length))
            inputs = {"input_ids": ids.to(device), "labels": ids.clone().to(device)}
            loss = model(**inputs).loss
            del inputs
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            model.zero_grad()

        return step

    return Workload.from_step(build, name=str(model_id))


def _fms(row: str, model_id: str | dict[str, Any], batch: int, length: int, lora: bool) -> None:
    JOBS[row] = Job(lambda: fine_tune(model_id, length, lora), batch, "A100 80GB", library=HF_4_48)


# ibm/PowerLM-3b, config.json of the hub.
POWERLM_3B: dict[str, Any] = {
    "model_type": "granite", "hidden_size": 2304, "intermediate_size": 9216,
    "num_hidden_layers": 40, "num_attention_heads": 36, "num_key_value_heads": 36,
    "vocab_size": 49152, "max_position_embeddings": 4096, "hidden_act": "silu",
    "tie_word_embeddings": True, "attention_multiplier": 0.015625, "embedding_multiplier": 12.0,
    "logits_scaling": 9.0, "residual_multiplier": 0.22, "attention_dropout": 0.1,
}  # fmt: skip
for _batch in (4, 8):
    _fms(
        f"fms_gpt_bigcode-santac_full_none_b{_batch}",
        "bigcode/gpt_bigcode-santacoder",
        _batch,
        2048,
        False,
    )
    _fms(
        f"fms_mistral-7b-v01_full_none_b{_batch}", "mistralai/Mistral-7B-v0.1", _batch, 4096, False
    )
_fms("fms_mistral-7b-v01_lora_none_b8", "mistralai/Mistral-7B-v0.1", 8, 4096, True)
_fms("fms_powerlm-3b_lora_none_b4", POWERLM_3B, 4, 4096, True)


# -- video and segmentation --------------------------------------------------------------------


def tsn_resnet50(classes: int, segments: int) -> Workload:
    """mmaction2 TSN: ResNet-50 on every frame, dropout, mean over segments; DDP; clip 40.

    DDP of torch 1.x (no bucket views) copies gradients into flat buckets, which stay.
    """

    def build(device: torch.device) -> Callable[[int], None]:
        import torchvision

        model = torchvision.models.resnet50(num_classes=classes)
        model.fc = nn.Sequential(nn.Dropout(0.4), nn.Linear(2048, classes))
        model = model.to(device)
        bucket = torch.zeros(sum(p.numel() for p in model.parameters()), device=device)
        optimizer = torch.optim.SGD(
            model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4, foreach=False
        )
        held: dict[str, Any] = {"bucket": bucket}

        def step(batch: int) -> None:
            frames = torch.empty(batch * segments, 3, 224, 224).to(device)
            target = torch.zeros(batch, dtype=torch.long).to(device)
            logits = model(frames).view(batch, segments, classes).mean(1)
            loss = nn.functional.cross_entropy(logits, target)
            optimizer.zero_grad(set_to_none=False)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 40, foreach=False)
            optimizer.step()
            held["loss"] = loss.detach()

        return step

    return Workload.from_step(build, name="TSN ResNet-50")


for _row, _classes, _segments, _batch in (
    ("mmaction_tsn_r50_dense_1x1x5_50e_kinetics400_rgb", 400, 5, 16),
    ("mmaction_tsn_r50_1x1x3_100e_kinetics400_rgb", 400, 3, 32),
    ("mmaction_tsn_r50_1x1x3_75e_ucf101_rgb", 101, 3, 32),
):
    JOBS[_row] = Job(
        lambda c=_classes, s=_segments: tsn_resnet50(c, s), _batch, "V100 32GB", workspaces=False
    )

# -- why a prediction is off -------------------------------------------------------------------

CUDNN = (
    "cuDNN's convolution workspaces are not counted (one of 134,742,016 B is in the recorded step "
    "trace-035); they have no formula"
)
CAUSES = {
    "nb_resnet50_t4_none": CUDNN,
    "nb_resnet50_t4_per_block": CUDNN,
    "fms_powerlm-3b_lora_none_b4": (
        "transformers 4.48.1 keeps the bf16 logits (1.61 GB) beside their fp32 copy during the "
        "loss; the measurement fits code that rebinds them (then -0.4 %)"
    ),
    "fms_gpt_bigcode-santac_full_none_b8": (
        "1.79 GB short; one bf16 copy of the logits is 1.61 GB, so the trainer of the row probably "
        "kept one more; not confirmed"
    ),
    "hfsdpa_pythia410m_b4_s2048_sdpa": (
        "818 MB short, that is 24 layers x (two head-sized tensors of 16.8 MB and a logsumexp of "
        "0.5 MB); its SDPA class was rewritten between 4.42 and 4.48; not confirmed"
    ),
    "hub_bertlarge_squad": (
        "2.73 GB short, about twice the weights (1.34 GB): the row adds up the deltas of three log "
        "stages; not confirmed"
    ),
}
for _row, _cause in CAUSES.items():
    JOBS[_row] = replace(JOBS[_row], cause=_cause)
