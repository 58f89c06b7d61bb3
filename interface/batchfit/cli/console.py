"""Tables and lines as text: coloured on a terminal, plain elsewhere."""

from __future__ import annotations

import io
import os
import shutil
import sys
from collections.abc import Sequence

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

#: Width where there is no terminal.
_WIDTH = 80
_KIB, _MIB, _GIB = 2**10, 2**20, 2**30


def plain_bytes(size: int) -> str:
    """A size for people, in at most four figures.

    >>> plain_bytes(24610670592), plain_bytes(390856704), plain_bytes(8519680), plain_bytes(512)
    ('22.92 GiB', '373 MiB', '8.1 MiB', '512 B')
    """
    if size < 0:
        return f"-{plain_bytes(-size)}"
    for unit, name in ((_GIB, "GiB"), (_MIB, "MiB"), (_KIB, "KiB")):
        if size >= unit:
            value = size / unit
            digits = 2 if unit == _GIB and value < 1000 else 1 if value < 10 else 0
            return f"{value:.{digits}f} {name}"
    return f"{size} B"


def width() -> int:
    """Columns to fill: the terminal's, at most 100; 80 elsewhere; ``COLUMNS`` decides if set."""
    if os.environ.get("COLUMNS", "").isdigit():
        return max(40, int(os.environ["COLUMNS"]))
    if not sys.stdout.isatty():
        return _WIDTH
    return max(40, min(100, shutil.get_terminal_size((_WIDTH, 24)).columns))


class Table:
    """Rows of text under a header; numbers to the right.

    Args:
        header: column titles.
        left: numbers of the columns that are set to the left.
    """

    def __init__(self, header: Sequence[str], left: Sequence[int] = (0,)) -> None:
        self.header = list(header)
        self._left = set(left)
        self._rows: list[tuple[tuple[str, ...], str]] = []

    def row(self, *cells: str, style: str = "") -> None:
        """Add a row."""
        self._rows.append((cells, style))

    def rich(self) -> RichTable:
        """The table for rich."""
        lines = box.SIMPLE_HEAD if sys.stdout.isatty() else None
        table = RichTable(
            box=lines, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold"
        )
        for i, title in enumerate(self.header):
            table.add_column(
                title,
                justify="left" if i in self._left else "right",
                no_wrap=True,
                overflow="ellipsis" if i in self._left else "fold",
            )
        for cells, style in self._rows:
            table.add_row(*(Text(cell) for cell in cells), style=style)
        return table


def facts(rows: Sequence[tuple[str, str | Text]]) -> RichTable:
    """Labels and what is said of them, wrapped below themselves."""
    table = RichTable.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="bold")
    table.add_column()
    for label, text in rows:
        table.add_row(Text(label), text if isinstance(text, Text) else Text(text))
    return table


def render(*parts: RenderableType, at_least: int = 0) -> str:
    """Everything below each other, as text for stdout, without blanks at line ends.

    Args:
        parts: text and tables.
        at_least: columns to take even where the terminal has fewer.
    """
    buffer = io.StringIO()
    terminal = sys.stdout.isatty()
    console = Console(
        file=buffer, width=max(width(), at_least), force_terminal=terminal, highlight=False,
        markup=False, no_color=None if terminal else True, legacy_windows=False,
    )  # fmt: skip
    for part in parts:
        console.print(part)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()).strip("\n")


class Progress:
    """One line on stderr that says what is being done; only on a terminal."""

    def __init__(self) -> None:
        self._shown = sys.stderr.isatty()

    def __call__(self, text: str) -> None:
        """Replace the line."""
        if self._shown:
            sys.stderr.write(f"\r\x1b[K{text} ...")
            sys.stderr.flush()

    def clear(self) -> None:
        """Take the line away."""
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
