"""Targets: the user's own files, torchvision, timm, and Hugging Face configurations."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from batchfit.cli import hf, main
from batchfit.cli.hf_configs import bundled_config, bundled_ids
from batchfit.cli.options import ModelOptions
from batchfit.cli.targets import find_target
from batchfit.estimator import TargetError, WorkloadError


def found(target: str, **given: Any) -> Any:
    with ExitStack() as stack:
        return find_target(target, given, stack)


def built(target: str, **given: Any) -> torch.nn.Module:
    """The model of a target, on meta."""
    workload = found(target, **given).workload
    with torch.device("meta"):
        model: torch.nn.Module = workload.model()
    return model


# -- the user's own code --------------------------------------------------------------------------

USER = """
import torch, helper
from batchfit.estimator import Workload

class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(helper.WIDTH, 4)

model = Net()
def make_workload(): return Workload(model=Net, inputs=torch.zeros(4, helper.WIDTH))
def raises():
    raise ValueError("first line\\nsecond line")
def gives_three(): return 3
def needs(width, depth=2): return Net()
three = 3
"""


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "helper.py").write_text("WIDTH = 16\n")
    (tmp_path / "user.py").write_text(USER)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("helper", None)
    sys.modules.pop("user", None)


@pytest.mark.parametrize("where", ["user.py", "user"])
@pytest.mark.parametrize(
    ("name", "given"),
    [("Net", {"input": ((16,),)}), ("model", {"input": ((16,),)}), ("make_workload", {})],
)
def test_a_name_in_the_users_code(user: Path, where: str, name: str, given: dict[str, Any]) -> None:
    target = found(f"{where}:{name}", **given)
    assert target.workload.host_inputs(3).shape == (3, 16)
    assert target.workload.name == f"{where}:{name}"


def test_the_folder_is_on_the_path_only_meanwhile(user: Path) -> None:
    before = list(sys.path)
    with ExitStack() as stack:
        find_target(str(user / "user.py") + ":make_workload", {}, stack)
        assert str(user) in sys.path
    assert sys.path == before
    assert "user" not in sys.modules


@pytest.mark.parametrize(
    ("target", "given", "words"),
    [
        ("user.py:raises", {}, ["user.py:12", "ValueError: first line"]),
        ("user.py:gives_three", {}, ["int", "torch.nn.Module"]),
        ("user.py:three", {}, ["int", "Workload"]),
        ("user.py:needs", {}, ["width", "without arguments"]),
        ("user.py:nett", {}, ["did you mean Net"]),
        ("user.py:model", {}, ["--input"]),
    ],
)
def test_what_is_wrong_with_a_name(
    user: Path, target: str, given: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(WorkloadError) as error:
        found(target, **given)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = 1\n\nx.nothing\n", ["bad.py:3", "AttributeError"]),
        ("def f(:\n    pass\n", ["bad.py:1", "SyntaxError"]),
        ("import not_there\n", ["bad.py:1", "not_there"]),
        ("import sys\nsys.exit('usage')\n", ["bad.py:2", "__main__"]),
        ("raise MemoryError\n", ["bad.py:1", "not enough memory", "function that builds"]),
        ("import worse\n", ["worse.py:2", "ZeroDivisionError"]),
    ],
)
def test_a_file_that_raises_on_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.py").write_text(text)
    Path("worse.py").write_text("\n1 / 0\n")
    with pytest.raises(WorkloadError) as error:
        found("bad.py:x")
    for word in words:
        assert word in str(error.value)


def test_a_raising_model_names_the_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "late.py"
    file.write_text("def make():\n    raise KeyError('depth')\n")
    assert main(["estimate", f"{file}:make", "--input", "4"]) == 2
    assert "late.py:2" in capsys.readouterr().err


# -- torchvision and timm -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "inputs"),
    [
        ("resnet18", "3x224x224"),
        ("inception_v3", "3x299x299"),
        ("efficientnet_b4", "3x380x380"),
        ("lraspp_mobilenet_v3_large", "3x520x520"),
        ("r3d_18", "3x16x112x112"),
        ("mvit_v2_s", "3x16x224x224"),
    ],
)
def test_torchvision_inputs(name: str, inputs: str) -> None:
    pytest.importorskip("torchvision")
    target = found(f"torchvision:{name}")
    assert target.inputs == inputs
    assert target.workload.host_inputs(2).shape == (2, *map(int, inputs.split("x")))


def test_torchvision_never_downloads(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchvision")
    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", lambda *a, **k: pytest.fail("asked"))
    built("torchvision:fcn_resnet50")
    built("torchvision:resnet18")


def test_torchvision_options() -> None:
    pytest.importorskip("torchvision")
    model: Any = built("torchvision:vit_b_16", image_size=(384, 384), num_classes=7)
    assert model.image_size == 384
    assert model.heads.head.out_features == 7
    with pytest.raises(WorkloadError, match="square"):
        found("torchvision:vit_b_16", image_size=(384, 224))


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("resnet5O", "resnet50"),
        ("fasterrcnn_resnet50_fpn", "boxes"),
        ("quantized_resnet18", "float model"),
        ("raft_small", "pairs of frames"),
    ],
)
def test_torchvision_that_cannot_be(name: str, word: str) -> None:
    pytest.importorskip("torchvision")
    with pytest.raises(TargetError, match=word):
        found(f"torchvision:{name}")


def test_timm() -> None:
    pytest.importorskip("timm")
    assert found("timm:convnext_tiny").inputs == "3x224x224"
    assert found("timm:vit_base_patch16_384.augreg_in1k").inputs == "3x384x384"
    model: Any = built("timm:vit_tiny_patch16_224", image_size=(96, 96), channels=1, num_classes=5)
    assert model.patch_embed.img_size == (96, 96)
    assert model.patch_embed.proj.in_channels == 1
    assert model.head.out_features == 5
    with pytest.raises(TargetError, match="convnext_tiny"):
        found("timm:convnxt_tiny")
    with pytest.raises(TargetError, match="a1_in1k"):
        found("timm:resnet50.no_such_tag")


@pytest.mark.parametrize(
    ("target", "extra"),
    [("torchvision:resnet18", "vision"), ("timm:resnet18", "vision"), ("hf:gpt2", "hf")],
)
def test_a_missing_extra(target: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(TargetError) as error:
        found(target)
    assert f"pip install 'batchfit[{extra}]'" in str(error.value)


# -- Hugging Face ---------------------------------------------------------------------------------

TINY: dict[str, dict[str, Any]] = {
    "causal-lm": {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 1,
                  "n_embd": 32, "n_head": 2, "vocab_size": 100},
    "masked-lm": {"model_type": "bert", "architectures": ["BertForMaskedLM"],
                  "num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2,
                  "intermediate_size": 64, "vocab_size": 100},
    "seq2seq-lm": {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"],
                   "num_layers": 1, "d_model": 32, "d_kv": 8, "num_heads": 4, "d_ff": 64,
                   "vocab_size": 100, "pad_token_id": 0, "decoder_start_token_id": 0},
    "image-classification": {"model_type": "vit", "architectures": ["ViTForImageClassification"],
                             "num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2,
                             "intermediate_size": 64, "image_size": 64},
    "speech-seq2seq": {"model_type": "whisper",
                       "architectures": ["WhisperForConditionalGeneration"], "encoder_layers": 1,
                       "decoder_layers": 1, "d_model": 32, "encoder_attention_heads": 2,
                       "decoder_attention_heads": 2, "vocab_size": 100, "encoder_ffn_dim": 64,
                       "decoder_ffn_dim": 64, "max_source_positions": 100, "pad_token_id": 0,
                       "decoder_start_token_id": 1, "bos_token_id": 1, "eos_token_id": 2},
}  # fmt: skip


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    pytest.importorskip("transformers")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))


def config_folder(folder: Path, values: dict[str, Any]) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    return str(folder)


@pytest.mark.parametrize("task", TINY)
def test_each_task_runs(
    task: str, tmp_path: Path, no_network: None, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = config_folder(tmp_path / "model", TINY[task])
    assert main(["estimate", f"hf:{folder}", "--gpu", "t4", "--batch", "2", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["workload"]["inputs"].startswith(f"{task}, ")
    assert said["batches"][0]["peak_allocated_bytes"] > 0


@pytest.mark.parametrize(
    ("task", "labels"),
    [
        ("sequence-classification", (3,)),
        ("token-classification", (3, 64)),
        ("question-answering", (3,)),
    ],
)
def test_a_task_that_is_asked_for(
    task: str, labels: tuple[int, ...], tmp_path: Path, no_network: None
) -> None:
    folder = config_folder(tmp_path / "model", TINY["masked-lm"])
    classes = {} if task == "question-answering" else {"num_classes": 9}
    workload = found(f"hf:{folder}", task=task, sequence_length=64, **classes).workload
    inputs = workload.host_inputs(3)
    key = "start_positions" if task == "question-answering" else "labels"
    assert inputs[key].shape == labels
    assert inputs["input_ids"].shape == (3, 64)


def test_inference_has_no_labels(tmp_path: Path, no_network: None) -> None:
    folder = config_folder(tmp_path / "model", TINY["seq2seq-lm"])
    inputs = found(f"hf:{folder}", inference=True).workload.host_inputs(2)
    assert sorted(inputs) == ["attention_mask", "decoder_input_ids", "input_ids"]


def test_clip_gets_both_parts(no_network: None) -> None:
    inputs = found("hf:openai/clip-vit-base-patch32").workload.host_inputs(2)
    assert inputs["return_loss"] is True
    assert inputs["pixel_values"].shape == (2, 3, 224, 224)
    assert inputs["input_ids"].shape == (2, 77)


def test_weights_keep_fp32_whatever_the_file_says(tmp_path: Path, no_network: None) -> None:
    values = {**TINY["causal-lm"], "torch_dtype": "bfloat16"}
    model = built(f"hf:{config_folder(tmp_path / 'model', values)}")
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("written", ["gpt2", "openai-community/gpt2"])
def test_a_shipped_configuration(written: str, no_network: None) -> None:
    target = found(f"hf:{written}")
    assert target.inputs == "causal-lm, 512 tokens"


def test_a_file_as_well_as_a_folder(tmp_path: Path, no_network: None) -> None:
    folder = config_folder(tmp_path / "model", TINY["causal-lm"])
    assert hf.find_config(folder) == hf.find_config(f"{folder}/config.json") == TINY["causal-lm"]


def test_the_cache_comes_before_what_is_shipped(tmp_path: Path, no_network: None) -> None:
    commit = "0" * 40
    model = tmp_path / "cache" / "models--openai-community--gpt2"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text(commit)
    (model / "snapshots" / commit).mkdir(parents=True)
    (model / "snapshots" / commit / "config.json").write_text(json.dumps(TINY["causal-lm"]))
    shipped = bundled_config("openai-community/gpt2")
    assert hf.find_config("openai-community/gpt2") == TINY["causal-lm"] != shipped


def test_without_the_hub_the_shipped_ones_are_named(no_network: None) -> None:
    with pytest.raises(TargetError) as error:
        found("hf:nobody/nothing")
    message = str(error.value)
    assert "HF_HUB_OFFLINE" in message and "\n" not in message
    assert f"{len(bundled_ids())} configurations ship" in message and bundled_ids()[0] in message


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"model_type": "brand_new", "auto_map": {}}, ["brand_new", "never run"]),
        ({"hidden_size": 3}, ["model_type"]),
        ({"model_type": "sam", "architectures": ["SamModel"]}, ["FILE.py:NAME"]),
    ],
)
def test_configurations_that_cannot_be_used(
    values: dict[str, Any], words: list[str], tmp_path: Path, no_network: None
) -> None:
    with pytest.raises(TargetError) as error:
        found(f"hf:{config_folder(tmp_path / 'model', values)}")
    for word in words:
        assert word in str(error.value)


def test_bad_files(tmp_path: Path, no_network: None) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(TargetError, match=r"no config\.json"):
        found(f"hf:{tmp_path / 'empty'}")
    with pytest.raises(TargetError, match="JSON"):
        found(f"hf:{tmp_path / 'x.json'}")
    with pytest.raises(TargetError, match="no folder"):
        found("hf:./not-here")


def test_a_sequence_longer_than_the_positions(tmp_path: Path, no_network: None) -> None:
    folder = config_folder(tmp_path / "model", TINY["causal-lm"])
    assert found(f"hf:{folder}", sequence_length=1024).inputs == "causal-lm, 1024 tokens"
    with pytest.raises(WorkloadError, match="1024 positions"):
        found(f"hf:{folder}", sequence_length=1025)
    assert found("hf:TinyLlama/TinyLlama-1.1B-Chat-v1.0", sequence_length=4096).inputs.endswith(
        "4096 tokens"
    )
    with pytest.raises(WorkloadError, match="512 positions"):
        found("hf:FacebookAI/roberta-base", sequence_length=514)


def test_options_without_effect_are_refused(tmp_path: Path, no_network: None) -> None:
    folder = config_folder(tmp_path / "model", TINY["causal-lm"])
    with pytest.raises(Exception, match="--image-size has no effect"):
        found(f"hf:{folder}", image_size=(8, 8))
    assert ModelOptions.of({"batch": (3,), "image_size": (8, 8)}).image_size == (8, 8)


def test_attention_code(tmp_path: Path, no_network: None) -> None:
    folder = config_folder(tmp_path / "model", TINY["causal-lm"])
    model: Any = built(f"hf:{folder}", attn_implementation="eager")
    assert model.config._attn_implementation == "eager"


def test_a_function_of_the_device_is_a_step_function(tmp_path):
    file = tmp_path / "loop.py"
    file.write_text(
        "import torch\n"
        "def build(device):\n"
        "    net = torch.nn.Linear(64, 64).to(device)\n"
        "    return lambda batch: net(torch.empty(batch, 64, device=device)).sum().backward()\n"
    )
    assert main(["estimate", f"{file}:build", "--gpu", "t4", "--batch", "8"]) == 0
