"""Snapshot files are read like pickles, but nothing in them is imported or called."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchfit.estimator import BatchfitError
from batchfit.estimator.snapshot import SnapshotError, load_snapshot, write_snapshot
from batchfit.estimator.snapshot_replay import real_peak

from .snapshots import BATCH, Snapshot, small, snapshot_of


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write_snapshot(small(), BATCH, tmp_path / "file")
    assert load_snapshot(tmp_path / "file") == snapshot_of()


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**100), 2**100) | st.floats(allow_nan=False)
    | st.text(max_size=300) | st.binary(max_size=300),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
)  # fmt: skip


@settings(deadline=None, max_examples=50)
@given(value=plain, protocol=st.integers(3, 5))
def test_reads_like_pickle(value: Any, protocol: int, tmp_path_factory: Any) -> None:
    whole = {"segments": [], "device_traces": [[], [value, value]], "more": value}
    path = tmp_path_factory.getbasetemp() / "file"
    path.write_bytes(pickle.dumps(whole, protocol))
    assert load_snapshot(path) == whole


class Call:
    """Pickles as a call of a function."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


def with_call(tmp_path: Path) -> Call:
    return Call(os.system, f"touch {tmp_path / 'harm'}")


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("place", ["root", "list", "dict", "deep", "key"])
def test_nothing_is_called(place: str, protocol: int, tmp_path: Path) -> None:
    harm: Any = with_call(tmp_path)
    made = {
        "root": harm,
        "list": {"segments": [harm], "device_traces": []},
        "dict": {"segments": [], "device_traces": [], "allocator_settings": {"x": harm}},
        "deep": {"segments": [], "device_traces": [[{"frames": [{"name": (1, [harm])}]}]]},
        "key": {"segments": [], "device_traces": [], "x": {"a": harm}},
    }[place]
    (tmp_path / "file").write_bytes(pickle.dumps(made, protocol))
    with pytest.raises(SnapshotError) as caught:
        load_snapshot(tmp_path / "file")
    assert not (tmp_path / "harm").exists()
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, BatchfitError)


BASE = b"\x80\x04}(\x8c\x08segments]\x8c\x0ddevice_traces]\x8c\x01x%su."
HOSTILE = {
    "global": b"cos\nsystem\n",
    "stack global": b"\x8c\x02os\x8c\x06system\x93",
    "inst": b"(S'echo'\nios\nsystem\n",
    "extension": b"\x82\x01",
    "persistent id": b"Pname\n",
    "new object": b"))\x81",
    "build": b"}}b",
    "set": b"\x8f",
    "byte array": b"\x96" + (8).to_bytes(8, "little") + b"12345678",
    "out-of-band buffer": b"\x97",
    "long text": b"\x8d" + (2**62).to_bytes(8, "little") + b"x",
    "long number": b"\x8b" + (2**20).to_bytes(4, "little") + b"x" * 2**20,
    "key of numbers": b"}K\x01K\x02s",
    "key of tuples": b"})K\x02s",
    "list as key": b"}]K\x02s",
    "append to a number": b"K\x01K\x02a",
    "items without keys": b"}(K\x01u",
    "unknown memory": b"h\xff",
    "mark of nothing": b"e",
    "protocol 9": b"\x80\x09N",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_opcodes(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(BASE % HOSTILE[name])
    with pytest.raises(SnapshotError, match="cannot read the snapshot"):
        load_snapshot(tmp_path / "file")


def test_harmless_oddities(tmp_path: Path) -> None:
    """A far memo index costs nothing, deep and circular data neither."""
    for odd in (b"Nr\xff\xff\xff\xff", b"]" * 100_000 + b"a" * 99_999, b"]q\x00h\x00a"):
        (tmp_path / "file").write_bytes(BASE % odd)
        assert set(load_snapshot(tmp_path / "file")) == {"segments", "device_traces", "x"}


def test_cut_off_files(tmp_path: Path) -> None:
    write_snapshot(small(), BATCH, tmp_path / "file")
    whole = (tmp_path / "file").read_bytes()
    for length in [0, 1, 2, 3, 50, *range(100, len(whole), len(whole) // 50)]:
        (tmp_path / "file").write_bytes(whole[:length])
        with pytest.raises(SnapshotError):
            load_snapshot(tmp_path / "file")


def test_files_that_are_no_snapshots(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match="No such file"):
        load_snapshot(tmp_path / "absent")
    for other in ([], {"segments": 1, "device_traces": []}, {"a": 1}, {"segments": []}, "text"):
        (tmp_path / "file").write_bytes(pickle.dumps(other))
        with pytest.raises(SnapshotError, match="not a memory snapshot"):
            load_snapshot(tmp_path / "file")
    (tmp_path / "file").write_bytes(b'{"json": 1}')
    with pytest.raises(SnapshotError):
        load_snapshot(tmp_path / "file")


def segment(**changes: Any) -> Snapshot:
    block = {"address": 4096, "size": 512, "requested_size": 1, "state": "active_allocated"}
    whole = {"device": 0, "address": 4096, "total_size": 512, "blocks": [block], **changes}
    return {"segments": [whole], "device_traces": [[]]}


@pytest.mark.parametrize(
    "wrong",
    [
        {"segments": [1], "device_traces": []},
        {"segments": segment()["segments"] * 2, "device_traces": []},
        segment(total_size=-1),
        segment(total_size="1"),
        segment(blocks=[{"size": 1}]),
        segment(blocks=None),
        {"segments": [], "device_traces": [[{"action": "alloc", "addr": 0}]]},
        {"segments": [], "device_traces": [[{"action": "alloc", "addr": -1, "size": 1}]]},
        {"segments": [], "device_traces": [[["alloc"]]]},
        {"segments": [], "device_traces": [[{}]]},
    ],
)
def test_snapshots_that_contradict_themselves(wrong: Snapshot) -> None:
    with pytest.raises(SnapshotError):
        real_peak(wrong)


def test_a_snapshot_without_events() -> None:
    peak = real_peak(segment())
    assert (peak.allocated, peak.reserved, peak.older, peak.events) == (512, 512, 1, 0)
