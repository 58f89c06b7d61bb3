"""Other tools, asked about the same jobs: what peak do they predict, or which batch?"""

from __future__ import annotations

import time
from typing import Any

from benchmarks.accuracy.entries import Answer, Entry, compared, table
from benchmarks.accuracy.tables.largest import budget_of, gpu_of
from benchmarks.accuracy.tables.timm import BUDGET

from .base import CannotAnswer, Peer
from .packages import PACKAGES
from .rules import RULES

PEERS: dict[str, Peer] = {peer.name: peer for peer in (*PACKAGES, *RULES)}


def ask(name: str, entry: Entry) -> dict[str, Any]:
    """One tool's answer on one entry, in the terms of batchfit's; or why it has none."""
    began = time.perf_counter()
    try:
        answer = _answer(PEERS[name], entry)
    except CannotAnswer as reason:
        answer = {"cannot": str(reason)}
    except Exception as error:  # whatever a tool or its model raises is its answer
        said = (str(error).splitlines() or [""])[0][:160]
        answer = {"cannot": f"{type(error).__name__}: {said}"}
    return {**answer, "seconds": round(time.perf_counter() - began, 2)}


def _answer(peer: Peer, entry: Entry) -> Answer:
    asked = table(entry.table).questions(entry)
    if entry.table in ("largest", "timm", "timm-all"):
        job = asked[0].job
        if peer.largest is not None:
            return _by_batch(peer.largest(gpu_of(job).total_bytes), entry)
        return _by_bytes(peer, entry)
    if peer.peak is None:
        raise CannotAnswer("names a batch, not bytes")
    if entry.metric.startswith(("memory_allocated", "memory_reserved")):
        raise CannotAnswer("knows peaks, not moments")
    predicted = sum(q.sign * peer.peak(q.job, q.batch) for q in asked)
    return compared(entry.facts["measured"], predicted)


def _by_batch(largest: int, entry: Entry) -> Answer:
    """A rule that names the batch is right if it ran and the batch that failed is above it."""
    fitted, failed = int(entry.facts["fitted"] or 0), int(entry.facts["failed"] or 0)
    right = largest >= fitted and (not failed or largest < failed)
    return {"predicted_largest": largest, "right": right}


def _by_bytes(peer: Peer, entry: Entry) -> Answer:
    """A tool that names bytes is right if they lie on the right side of the budget."""
    assert peer.peak is not None
    right = True
    answer: Answer = {}
    budget = BUDGET if entry.table.startswith("timm") else budget_of(entry)
    for question, runs in zip(table(entry.table).questions(entry), (True, False), strict=True):
        if question.batch:
            need = peer.peak(question.job, question.batch)
            answer["need_fitted" if runs else "need_failed"] = need
            right = right and (need <= budget) is runs
    return {**answer, "right": right}
