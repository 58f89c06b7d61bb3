"""The shipped Hugging Face architectures: each, built on meta, has its published parameter count.

The counts are of the class named in ``architectures``, shared tensors counted once, as given by the
model pages (safetensors metadata) or by transformers for the published checkpoint.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import resources
from typing import Any

import pytest
import torch

from batchfit.cli.hf_configs import bundled_config, bundled_ids

PARAMETERS = {
    "openai-community/gpt2": 124_439_808,
    "openai-community/gpt2-medium": 354_823_168,
    "openai-community/gpt2-large": 774_030_080,
    "openai-community/gpt2-xl": 1_557_611_200,
    "distilbert/distilgpt2": 81_912_576,
    "google-bert/bert-base-uncased": 109_514_298,
    "google-bert/bert-large-uncased": 335_174_458,
    "google-bert/bert-base-cased": 108_340_804,
    "sentence-transformers/all-MiniLM-L6-v2": 22_713_216,
    "distilbert/distilbert-base-uncased": 66_985_530,
    "FacebookAI/roberta-base": 124_697_433,
    "FacebookAI/roberta-large": 355_412_057,
    "FacebookAI/xlm-roberta-base": 278_295_186,
    "albert/albert-base-v2": 11_221_680,
    "microsoft/deberta-v3-base": 183_831_552,
    "google/electra-base-discriminator": 109_483_009,
    "google-t5/t5-small": 60_506_624,
    "google-t5/t5-base": 222_903_552,
    "google-t5/t5-large": 737_668_096,
    "google/flan-t5-small": 76_961_152,
    "google/flan-t5-base": 247_577_856,
    "google/flan-t5-large": 783_150_080,
    "facebook/bart-base": 139_420_416,
    "facebook/bart-large": 406_291_456,
    "facebook/opt-125m": 125_239_296,
    "facebook/opt-350m": 331_196_416,
    "facebook/opt-1.3b": 1_315_758_080,
    "facebook/opt-2.7b": 2_651_596_800,
    "facebook/opt-6.7b": 6_658_473_984,
    "EleutherAI/pythia-70m": 70_426_624,
    "EleutherAI/pythia-160m": 162_322_944,
    "EleutherAI/pythia-410m": 405_334_016,
    "EleutherAI/pythia-1b": 1_011_781_632,
    "EleutherAI/pythia-1.4b": 1_414_647_808,
    "EleutherAI/pythia-2.8b": 2_775_208_960,
    "EleutherAI/pythia-6.9b": 6_857_302_016,
    "EleutherAI/gpt-j-6b": 6_050_882_784,
    "EleutherAI/gpt-neo-125m": 125_198_592,
    "EleutherAI/gpt-neo-1.3B": 1_315_575_808,
    "bigscience/bloom-560m": 559_214_592,
    "bigscience/bloom-7b1": 7_069_016_064,
    "meta-llama/Llama-2-7b-hf": 6_738_415_616,
    "meta-llama/Llama-2-13b-hf": 13_015_864_320,
    "meta-llama/Llama-2-70b-hf": 68_976_648_192,
    "meta-llama/Meta-Llama-3-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": 1_100_048_384,
    "HuggingFaceTB/SmolLM2-135M": 134_515_008,
    "mistralai/Mistral-7B-v0.1": 7_241_732_096,
    "mistralai/Mixtral-8x7B-v0.1": 46_702_792_704,
    "Qwen/Qwen2-0.5B": 494_032_768,
    "Qwen/Qwen2-1.5B": 1_543_714_304,
    "Qwen/Qwen2-7B": 7_615_616_512,
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-3B": 3_085_938_688,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen2.5-14B": 14_770_033_664,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-1.7B": 1_720_574_976,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "google/gemma-2b": 2_506_172_416,
    "google/gemma-7b": 8_537_680_896,
    "google/gemma-2-2b": 2_614_341_888,
    "google/gemma-2-9b": 9_241_705_984,
    "microsoft/phi-2": 2_779_683_840,
    "microsoft/Phi-3-mini-4k-instruct": 3_821_079_552,
    "tiiuae/falcon-7b": 6_921_720_704,
    "microsoft/biogpt": 346_763_264,
    "bigcode/gpt_bigcode-santacoder": 1_124_886_528,
    "google/vit-base-patch16-224": 86_567_656,
    "google/vit-large-patch16-224": 304_326_632,
    "facebook/deit-base-patch16-224": 86_567_656,
    "facebook/deit-base-distilled-patch16-224": 87_338_192,
    "microsoft/swin-tiny-patch4-window7-224": 28_288_354,
    "facebook/convnext-tiny-224": 28_589_128,
    "facebook/convnext-base-224": 88_591_464,
    "microsoft/resnet-50": 25_557_032,
    "facebook/dinov2-base": 86_580_480,
    "openai/clip-vit-base-patch32": 151_277_313,
    "openai/clip-vit-large-patch14": 427_616_513,
    "openai/whisper-tiny": 37_760_640,
    "openai/whisper-base": 72_593_920,
    "openai/whisper-small": 241_734_912,
    "openai/whisper-medium": 763_857_920,
    "openai/whisper-large-v3": 1_543_490_560,
    "facebook/wav2vec2-base": 95_044_608,
}
# transformers 5 shares the head with the embedding in these whatever the configuration says; the
# published checkpoints hold both. Value: vocabulary x width.
HEAD_OF_ITS_OWN = {
    "google/flan-t5-small": 32128 * 512,
    "google/flan-t5-base": 32128 * 768,
    "google/flan-t5-large": 32128 * 1024,
}


def _index() -> dict[str, Any]:
    text = resources.files("batchfit.cli.hf_configs").joinpath("INDEX.json").read_text("utf-8")
    models: dict[str, Any] = json.loads(text)["models"]
    return models


def test_every_model_is_in_the_table_and_has_its_files() -> None:
    assert len(PARAMETERS) >= 30
    assert sorted(PARAMETERS, key=str.lower) == bundled_ids()
    files = {entry.name for entry in resources.files("batchfit.cli.hf_configs").iterdir()}
    index = _index()
    assert {entry["file"] for entry in index.values()} | {"INDEX.json"} == {
        name for name in files if name.endswith(".json")
    }
    for model_id, entry in index.items():
        assert entry["source"] == f"https://huggingface.co/{model_id}/blob/main/config.json"
        assert entry["checked"]


def test_no_name_leads_to_two_models() -> None:
    names = [
        name.lower()
        for model_id, entry in _index().items()
        for name in (model_id, *entry["aliases"])
    ]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("written", "model_id"),
    [
        ("gpt2", "openai-community/gpt2"),
        ("GPT2-XL", "openai-community/gpt2-xl"),
        ("bert-base-uncased", "google-bert/bert-base-uncased"),
        ("meta-llama/llama-2-7b-hf", "meta-llama/Llama-2-7b-hf"),
        ("NousResearch/Llama-2-7b-hf", "meta-llama/Llama-2-7b-hf"),
        ("meta-llama/Meta-Llama-3.1-8B", "meta-llama/Llama-3.1-8B"),
        ("EleutherAI/pythia-410m-deduped", "EleutherAI/pythia-410m"),
        (" facebook/opt-125m/ ", "facebook/opt-125m"),
    ],
)
def test_aliases(written: str, model_id: str) -> None:
    assert bundled_config(written) == bundled_config(model_id) is not None


def test_unknown_models_give_none_and_each_dict_is_the_callers_own() -> None:
    assert bundled_config("nobody/nothing") is None
    first = bundled_config("gpt2")
    assert first is not None
    first["n_embd"] = 0
    again = bundled_config("gpt2")
    assert again is not None
    assert again["n_embd"] == 768


def test_reading_imports_neither_transformers_nor_torch() -> None:
    code = (
        "import sys; from batchfit.cli.hf_configs import bundled_config;"
        " bundled_config('gpt2'); print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize("model_id", sorted(PARAMETERS, key=str.lower))
def test_parameter_count(model_id: str) -> None:
    transformers = pytest.importorskip("transformers")
    values = bundled_config(model_id)
    assert values is not None
    config = transformers.AutoConfig.for_model(**values)
    (architecture,) = values["architectures"]
    with torch.device("meta"):
        model = getattr(transformers, architecture)(config)
    counted = sum(parameter.numel() for parameter in model.parameters())
    tied = getattr(config, "tie_word_embeddings", False)
    shared = HEAD_OF_ITS_OWN.get(model_id, 0) if tied else 0
    assert counted == PARAMETERS[model_id] - shared
