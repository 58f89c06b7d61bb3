"""The command line: ``batchfit estimate``, ``batchfit snapshot``, ``batchfit gpus``.

Only :func:`main` prints and turns errors into exit statuses; everything else returns or raises.
"""

from .main import main

__all__ = ["main"]
