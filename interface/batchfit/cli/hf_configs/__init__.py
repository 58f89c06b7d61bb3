"""Architectures of well-known Hugging Face models, shipped as JSON, so that no network is needed.

Each file holds the architecture fields of a public ``config.json``; ``INDEX.json`` names the source
of each and how it was checked. Neither dtype nor generation settings are kept. Nothing here imports
transformers; ``AutoConfig.for_model(**bundled_config("gpt2"))`` makes its configuration object.
"""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import Any, cast

__all__ = ["bundled_config", "bundled_ids"]


def _read(name: str) -> dict[str, Any]:
    text = resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
    return cast("dict[str, Any]", json.loads(text))


@cache
def _files() -> dict[str, str]:
    """Lower-cased model id or alias -> file name."""
    found: dict[str, str] = {}
    for model_id, entry in _read("INDEX.json")["models"].items():
        for name in (model_id, *entry["aliases"]):
            found[name.lower()] = entry["file"]
    return found


def bundled_config(model_id: str) -> dict[str, Any] | None:
    """The configuration of a model we ship, or None if we do not.

    The id may be written as on the hub (``openai-community/gpt2``), in its short form (``gpt2``) or
    as a known mirror (``NousResearch/Llama-2-7b-hf``), in any case. The dict is the caller's own.

    >>> bundled_config("gpt2")["n_embd"], bundled_config("openai-community/GPT2")["n_layer"]
    (768, 12)
    >>> bundled_config("nobody/nothing") is None
    True
    """
    file = _files().get(model_id.strip().strip("/").lower())
    return None if file is None else _read(file)


def bundled_ids() -> list[str]:
    """The hub ids of the shipped models, sorted.

    >>> "meta-llama/Llama-2-7b-hf" in bundled_ids()
    True
    """
    return sorted(_read("INDEX.json")["models"], key=str.lower)
