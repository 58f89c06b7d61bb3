"""A real snapshot beside the prediction, as text or as JSON."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from batchfit.estimator.snapshot_compare import BlockPair, Match, SnapshotComparison

from .console import Table, facts, plain_bytes, render, width
from .snapshots import Compared

SCHEMA = "batchfit.snapshot-comparison/1"

# Blocks of one kind that are shown as text, and in the JSON; frames of each, as text.
_SHOWN = 6
_LISTED = 50
_FRAMES = 3

_MATCHED = (Match.IN_ORDER, Match.MOVED)

# Frames that say nothing about the job: C++ ones, and how a module's forward is called.
_NOISE = ("??", "nn/modules/module.py")


def comparison_json(compared: Compared) -> dict[str, Any]:
    """The comparison as one JSON object; docs/json.md describes every field."""
    found, job = compared.found, compared.job
    return {
        "schema": SCHEMA,
        "target": job.target.text,
        "snapshot": compared.path,
        "gpu": job.gpu.name,
        "batch": found.batch,
        "allocator": job.settings or None,
        "peak_allocated_bytes": {
            "real": found.real_allocated, "predicted": found.predicted_allocated,
        },
        "peak_reserved_bytes": {
            "real": found.real_reserved, "predicted": found.predicted_reserved,
        },
        "error": found.error,
        "blocks": {
            "real": found.real_blocks, "predicted": found.predicted_blocks,
            "older": found.older,
            "matched": sum(pair.match in _MATCHED for pair in found.blocks),
            "moved": sum(pair.match is Match.MOVED for pair in found.blocks),
        },
        "matched_bytes": found.matched,
        "matched_share": found.matched_share,
        "categories": [
            {
                "category": row.category.replace(" ", "_") or None,
                "real_bytes": row.real,
                "predicted_bytes": row.predicted,
                "difference_bytes": row.difference,
            }
            for row in found.categories
        ],
        "only_real": _only_json(found, Match.ONLY_REAL),
        "only_predicted": _only_json(found, Match.ONLY_PREDICTED),
        "notes": list(compared.notes),
    }  # fmt: skip


def _only_json(found: SnapshotComparison, match: Match) -> dict[str, Any]:
    pairs = found.only(match)
    return {
        "blocks": len(pairs),
        "bytes": sum(_size(pair) for pair in pairs),
        "largest": [
            {
                "requested_bytes": pair.requested,
                "block_bytes": _size(pair),
                "category": pair.category.replace(" ", "_") or None,
                "frames": list(_frames(pair)),
            }
            for pair in pairs[:_LISTED]
        ],
    }


def comparison_text(compared: Compared) -> str:
    """What ``batchfit snapshot --compare`` prints."""
    found, job = compared.found, compared.job
    totals = Table(["", "real", "predicted", "difference"])
    for name, real, predicted in (
        ("peak reserved", found.real_reserved, found.predicted_reserved),
        ("peak allocated", found.real_allocated, found.predicted_allocated),
    ):
        totals.row(name, plain_bytes(real), plain_bytes(predicted), _change(real, predicted))
    for row in sorted(found.categories, key=lambda r: (not r.category, -max(r.predicted, r.real))):
        difference = row.difference
        totals.row(
            f"  {_clean(row.category) or 'not predicted'}",
            plain_bytes(row.real) if row.real else "-",
            plain_bytes(row.predicted) if row.predicted else "-",
            f"{'+' if difference > 0 else ''}{plain_bytes(difference)}" if difference else "same",
        )
    share = 100 * found.matched_share
    same = (
        f"{share:.2f} % of the bytes alive at the real peak: a block of that size is predicted, too"
        if found.matched < found.real_allocated
        else "every byte alive at the real peak: all its blocks are predicted, too"
    )
    moved = sum(pair.match is Match.MOVED for pair in found.blocks)
    rows = [
        ("matched", same),
        ("blocks", f"{found.real_blocks} real, {found.predicted_blocks} predicted"
                   + (f"; {moved} in another order" if moved else "")),
    ]  # fmt: skip
    title = f"{job.target.text} on {job.gpu.name}, batch {job.batch}, beside {compared.path}"
    parts: list[RenderableType] = [
        Text(title, style="bold"), Text(job.words, style="dim"), "", totals.rich(), "", facts(rows),
    ]  # fmt: skip
    for name, match in (("real", Match.ONLY_REAL), ("predicted", Match.ONLY_PREDICTED)):
        parts += _only(name, found.only(match))
    if compared.notes:
        parts += ["", facts([("note", note) for note in compared.notes])]
    return render(*parts)


def _change(real: int, predicted: int) -> str:
    if real == predicted:
        return "same"
    return f"{100 * (predicted / real - 1):+.2f} %" if real else "-"


def _only(name: str, pairs: tuple[BlockPair, ...]) -> list[RenderableType]:
    """The largest blocks that only one side has, equal ones together, each with its frames."""
    if not pairs:
        return []
    groups: dict[tuple[Any, ...], list[BlockPair]] = {}
    for pair in pairs:
        groups.setdefault((_size(pair), pair.category, _frames(pair)), []).append(pair)
    total = plain_bytes(sum(_size(pair) for pair in pairs))
    blocks = "1 block" if len(pairs) == 1 else f"{len(pairs)} blocks"
    parts: list[RenderableType] = ["", Text(f"only {name}: {blocks}, {total}", style="bold")]
    largest = sorted(groups.values(), key=lambda group: -sum(_size(pair) for pair in group))
    for group in largest[:_SHOWN]:
        first = group[0]
        times = f"{len(group)} x " if len(group) > 1 else ""
        category = f"  {_clean(first.category)}" if first.category else ""
        parts.append(Text(f"  {times}{plain_bytes(_size(first))}{category}"))
        if first.predicted_frames:
            shown = _place(first.predicted_frames)
        else:
            shown = _telling(first.real_frames) or ["(older than the record)"]
        parts += [Text(f"    {_shorten(frame, width() - 4)}") for frame in shown]
    rest = [pair for group in largest[_SHOWN:] for pair in group]
    if rest:
        size = plain_bytes(sum(_size(pair) for pair in rest))
        others = "1 other" if len(rest) == 1 else f"{len(rest)} others"
        parts.append(Text(f"  {others}, {size}", style="dim"))
    return parts


def _size(pair: BlockPair) -> int:
    """Bytes of a block that only one side has."""
    return pair.real_size or pair.predicted_size


def _frames(pair: BlockPair) -> tuple[str, ...]:
    return pair.real_frames or pair.predicted_frames


def _place(frames: tuple[str, ...]) -> list[str]:
    """Where a predicted block comes from, in words.

    >>> _place(("layer1.conv:2:aten::convolution", "forward:2:activations"))
    ['aten::convolution in layer1.conv, forward of step 2']
    >>> _place(("step:1:aten::neg", "backward:1:temporaries"))
    ['aten::neg, backward of step 1']
    """
    module, step, operator = frames[0].split(":", 2)
    phase = frames[1].partition(":")[0]
    where = "" if module == "step" else f" in {module}"
    when = f"{phase} of step {step}" if step != "0" else phase
    return [f"{operator}{where}, {when}"]


def _telling(frames: Iterable[str]) -> list[str]:
    """The innermost frames that say something about the job.

    >>> _telling(["??:0:malloc", "/x/site-packages/torch/nn/modules/module.py:9:_call_impl",
    ...           "/x/site-packages/torch/nn/modules/linear.py:9:forward", "train.py:3:main"])
    ['torch/nn/modules/linear.py:9:forward', 'train.py:3:main']
    """
    every = [_clean(frame).rpartition("site-packages/")[2] for frame in frames]
    told = [f for f in every if not f.startswith(_NOISE[0]) and _NOISE[1] not in f]
    return (told or every)[:_FRAMES]


def _clean(text: str) -> str:
    """Text of a file that somebody else made, without what a terminal would obey."""
    return "".join(c if c.isprintable() else "?" for c in text)


def _shorten(text: str, room: int) -> str:
    """The end of a long text: of a frame, the file's name, the line and the function.

    >>> _shorten("a/long/folder/train.py:3:main", 20)
    '...r/train.py:3:main'
    """
    return text if len(text) <= room else "..." + text[3 - room :]
