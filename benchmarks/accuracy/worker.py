"""One entry in a process of its own; the answers are lines of JSON on standard output.

python -m benchmarks.accuracy.worker estimate peaks/amp_recipe_fp32
python -m benchmarks.accuracy.worker peers peaks/amp_recipe_fp32 torchinfo,memtracker
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from typing import Any

from .entries import find, table


def estimate(entry_id: str) -> dict[str, Any]:
    """batchfit's answer."""
    entry = find(entry_id)
    began = time.perf_counter()
    answer = table(entry.table).solve(entry)
    return {**answer, "seconds": round(time.perf_counter() - began, 2)}


def main(arguments: list[str]) -> int:
    warnings.simplefilter("ignore")  # of old libraries on a new torch
    kind, entry_id, *names = arguments
    if kind == "estimate":
        print(json.dumps(estimate(entry_id)), flush=True)
        return 0
    from .peers import ask

    for name in names[0].split(","):
        print(json.dumps({"peer": name, **ask(name, find(entry_id))}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
