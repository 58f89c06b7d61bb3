"""Bytes in, bytes out: parsing and printing of memory sizes.

Bytes are ints everywhere inside; GiB is 2**30, MiB 2**20, KiB 2**10 when shown.
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

from .errors import BudgetError

KIB = 2**10
MIB = 2**20
GIB = 2**30

_UNITS = {
    "": 1, "b": 1,
    "k": KIB, "kib": KIB, "kb": 10**3,
    "m": MIB, "mib": MIB, "mb": 10**6,
    "g": GIB, "gib": GIB, "gb": 10**9,
    "t": 2**40, "tib": 2**40, "tb": 10**12,
}  # fmt: skip
_SIZE = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([a-zA-Z]*)\s*")


def parse_bytes(text: str | int) -> int:
    """Read a size such as ``22GiB``, ``500 MB`` (10**6), ``8G`` (GiB) or a number of bytes.

    Raises:
        BudgetError: not a size, or negative.

    >>> parse_bytes("22GiB"), parse_bytes("1.5 MiB"), parse_bytes("80GB"), parse_bytes(512)
    (23622320128, 1572864, 80000000000, 512)
    """
    if isinstance(text, int) and not isinstance(text, bool):
        if text < 0:
            raise BudgetError(f"a size in bytes cannot be negative: {text}")
        return text
    match = _SIZE.fullmatch(str(text))
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise BudgetError(
            f"cannot read {text!r} as a memory size; write for example 22GiB or 500MiB"
        )
    try:
        return int(Decimal(match[1]) * unit)
    except InvalidOperation:  # pragma: no cover - the pattern admits only decimal numbers
        raise BudgetError(f"cannot read {text!r} as a memory size") from None


def format_bytes(size: int) -> str:
    """Print a size for people: the largest binary unit in which it is at least 1.

    >>> format_bytes(2907700224), format_bytes(8519680), format_bytes(512), format_bytes(-2**20)
    ('2.71 GiB', '8.12 MiB', '512 B', '-1.00 MiB')
    """
    sign, size = ("-", -size) if size < 0 else ("", size)
    for unit, name in ((2**40, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size >= unit:
            return f"{sign}{size / unit:.2f} {name}"
    return f"{sign}{size} B"
