"""Snapshot files: pickles, read without unpickling anything.

A file of ``torch.cuda.memory._dump_snapshot`` comes from somewhere else and may be hostile: a
pickle can name any function and have it called, and even without calls it can ask for more memory
than there is. So it is not unpickled. `load_snapshot` reads the few opcodes (Lib/pickletools.py)
that lists, tuples, dicts, text, bytes and numbers need, and refuses all others.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .errors import BatchfitError

MAX_BYTES = 2**31
"""Bytes of the largest file that is read; snapshots of a million events have a few hundred MiB."""
MAX_OBJECTS = 60_000_000
"""Opcodes of the longest pickle that is read: more would take over 10 GiB of memory."""
_MAX_INT = 16  # bytes of an integer; addresses have 8
_PROTOCOL = 5
_STOP, _GET, _MEMOIZE = ord("."), ord("h"), 0x94


class SnapshotError(BatchfitError):
    """The file or object is not a memory snapshot that can be read; the message says why."""


class _Reader:
    """A stack machine for the plain part of pickle protocols 2 to 5."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.position = 0
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}

    def take(self, count: int) -> bytes:
        """The next bytes of the file."""
        end = self.position + count
        if end > len(self.data):
            raise SnapshotError("the file is cut off")
        part = self.data[self.position : end]
        self.position = end
        return part

    def number(self, count: int) -> int:
        """The next bytes as an unsigned integer."""
        return int.from_bytes(self.take(count), "little")

    def run(self) -> Any:
        """Read opcodes until the one that says stop; returns the object made."""
        data, memo = self.data, self.memo
        for _ in range(MAX_OBJECTS):
            code = data[self.position]
            self.position += 1
            if code == _GET:  # the two most frequent ones, without a call
                self.stack.append(memo[data[self.position]])
                self.position += 1
            elif code == _MEMOIZE:
                memo[len(memo)] = self.stack[-1]
            elif code == _STOP:
                return self.stack.pop()
            else:
                step = _OPCODES.get(code)
                if step is None:
                    raise SnapshotError(
                        f"it holds more than plain data (pickle opcode {bytes([code])!r} at byte "
                        f"{self.position - 1}); such a file can run code, so it is not read"
                    )
                step(self)
        raise SnapshotError(f"it has more than {MAX_OBJECTS} objects")

    def protocol(self) -> None:
        if self.number(1) > _PROTOCOL:
            raise SnapshotError(f"it is of a pickle protocol above {_PROTOCOL}")

    def skip(self, count: int) -> None:
        self.position += count

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def mark(self) -> None:
        self.marks.append(self.stack)
        self.stack = []

    def since_mark(self) -> list[Any]:
        """The objects pushed since the last mark, which is taken back."""
        items = self.stack
        self.stack = self.marks.pop()
        return items

    def extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not list:
            raise SnapshotError("it is damaged: items for something that is no list")
        target.extend(items)

    def update(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not dict or len(items) % 2:
            raise SnapshotError("it is damaged: keys for something that is no dict")
        for name, value in zip(items[::2], items[1::2], strict=True):
            # Hashes of text are salted; those of numbers and tuples can be made to collide.
            if type(name) is not str:
                raise SnapshotError("it has a dict whose keys are not text")
            target[name] = value

    def remember(self, index: int) -> None:
        self.memo[index] = self.stack[-1]

    def integer(self, count: int) -> int:
        """The next bytes as a signed integer."""
        if count > _MAX_INT:
            raise SnapshotError(f"it has an integer of {count} bytes")
        return int.from_bytes(self.take(count), "little", signed=True)

    def dict_of(self, items: list[Any]) -> None:
        self.push({})
        self.update(items)

    def tuple_of(self, count: int) -> None:
        self.stack[-count:] = [tuple(self.stack[-count:])]


def _text(width: int) -> Callable[[_Reader], None]:
    return lambda r: r.push(r.take(r.number(width)).decode("utf-8", "surrogatepass"))


def _bytes(width: int) -> Callable[[_Reader], None]:
    return lambda r: r.push(r.take(r.number(width)))


_OPCODES: dict[int, Callable[[_Reader], None]] = {
    0x80: _Reader.protocol,
    0x95: lambda r: r.skip(8),  # FRAME: a length that nobody needs
    ord("("): _Reader.mark,
    ord("N"): lambda r: r.push(None),
    0x88: lambda r: r.push(True),
    0x89: lambda r: r.push(False),
    ord("K"): lambda r: r.push(r.number(1)),
    ord("M"): lambda r: r.push(r.number(2)),
    ord("J"): lambda r: r.push(r.integer(4)),
    0x8A: lambda r: r.push(r.integer(r.number(1))),
    0x8B: lambda r: r.push(r.integer(r.number(4))),
    ord("G"): lambda r: r.push(struct.unpack(">d", r.take(8))[0]),
    0x8C: _text(1),
    ord("X"): _text(4),
    0x8D: _text(8),
    ord("C"): _bytes(1),
    ord("B"): _bytes(4),
    0x8E: _bytes(8),
    ord("]"): lambda r: r.push([]),
    ord("a"): lambda r: r.extend([r.stack.pop()]),
    ord("e"): lambda r: r.extend(r.since_mark()),
    ord("l"): lambda r: r.push(r.since_mark()),
    ord("}"): lambda r: r.push({}),
    ord("d"): lambda r: r.dict_of(r.since_mark()),
    ord("s"): lambda r: r.update([r.stack.pop(-2), r.stack.pop()]),
    ord("u"): lambda r: r.update(r.since_mark()),
    ord(")"): lambda r: r.push(()),
    ord("t"): lambda r: r.push(tuple(r.since_mark())),
    0x85: lambda r: r.tuple_of(1),
    0x86: lambda r: r.tuple_of(2),
    0x87: lambda r: r.tuple_of(3),
    ord("q"): lambda r: r.remember(r.number(1)),
    ord("r"): lambda r: r.remember(r.number(4)),
    ord("j"): lambda r: r.push(r.memo[r.number(4)]),
}


def load_snapshot(path: str | Path) -> dict[str, Any]:
    """Read a file of ``torch.cuda.memory._dump_snapshot``, which may be hostile.

    Only plain data is read (dict with text keys, list, tuple, str, bytes, int, float, bool, None);
    nothing in the file is imported or called.

    Raises:
        SnapshotError: the file cannot be read, is larger than 2 GiB, cut off, holds anything but
            plain data, or is no snapshot. One line, with the path.
    """
    path = Path(path)
    try:
        if path.stat().st_size > MAX_BYTES:
            raise SnapshotError(f"it is larger than {MAX_BYTES >> 30} GiB")
        snapshot = _Reader(path.read_bytes()).run()
        return check_snapshot(snapshot)
    except OSError as error:
        raise SnapshotError(
            f"cannot read the snapshot {path}: {error.strerror or error}"
        ) from error
    except SnapshotError as error:
        raise SnapshotError(f"cannot read the snapshot {path}: {error}") from None
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise SnapshotError(f"cannot read the snapshot {path}: it is damaged") from error


def check_snapshot(snapshot: Any) -> dict[str, Any]:
    """The snapshot itself if its outer form is right: segments, and one list of events per device.

    Raises:
        SnapshotError: it is not a snapshot.
    """
    if isinstance(snapshot, dict) and isinstance(snapshot.get("segments"), list):
        traces = snapshot.get("device_traces")
        if isinstance(traces, list) and all(isinstance(trace, list) for trace in traces):
            return snapshot
    raise SnapshotError(
        "it is not a memory snapshot (a dict with 'segments' and 'device_traces'); write one with "
        "torch.cuda.memory._record_memory_history() and ._dump_snapshot(path)"
    )
