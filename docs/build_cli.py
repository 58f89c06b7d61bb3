"""Fill in what is printed by batchfit itself in the documents.

    python docs/build_cli.py            run the commands and write their output
    python docs/build_cli.py --check    compare only; status 1 if something is out of date

A document says ``<!-- run: batchfit ... -->`` above a fenced block; the block becomes the output.
Help must agree to the letter. Of results only the form is compared: the figures depend on the
versions of torch and of the model libraries.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import shlex
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = ("README.md", "docs/cli.md", "docs/json.md")
_BLOCK = re.compile(
    r"(<!-- run: batchfit (?P<args>[^\n]*) -->\n```\w*\n)(?P<body>.*?)(\n```)", re.S
)


def output(args: str) -> str:
    """What a command prints, 80 columns wide."""
    from batchfit.cli import main

    stream = io.StringIO()
    with contextlib.redirect_stdout(stream):
        status = main(shlex.split(args))
    if status not in (0, 1):
        raise SystemExit(f"batchfit {args} failed; nothing was written to its document")
    return "\n".join(line.rstrip() for line in stream.getvalue().strip("\n").splitlines())


def form(text: str) -> str:
    """Output without its figures: numbers and their units become #, any space one blank."""
    text = re.sub(r"\d[\d.,]*( [KMGT]?i?B)?", "#", text)
    return re.sub(r"[ \n-]+", " ", text)


def blocks(text: str) -> list[tuple[str, str]]:
    """(arguments, output as written) of every block."""
    return [(match["args"], match["body"]) for match in _BLOCK.finditer(text)]


def stale(document: str) -> list[str]:
    """The commands whose output in a document is out of date."""
    found = []
    for args, written in blocks((ROOT / document).read_text(encoding="utf-8")):
        now = output(args)
        same = written == now if "--help" in args else form(written) == form(now)
        if not same:
            found.append(args)
    return found


def main() -> int:
    """Write or check all documents."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare only")
    check = parser.parse_args().check
    os.environ["COLUMNS"] = "80"
    outdated = 0
    for document in DOCUMENTS:
        if check:
            for args in stale(document):
                print(f"{document}: the output of `batchfit {args}` is out of date")
                outdated += 1
            continue
        path = ROOT / document
        text = path.read_text(encoding="utf-8")
        path.write_text(
            _BLOCK.sub(lambda m: m[1] + output(m["args"]) + m[4], text), encoding="utf-8"
        )
    return 1 if outdated else 0


if __name__ == "__main__":
    sys.exit(main())
