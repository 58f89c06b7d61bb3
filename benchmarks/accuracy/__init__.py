"""The accuracy suite: every public measurement predicted, compared, and set beside other tools.

``python -m benchmarks.accuracy`` from the root of the repository; ``--help`` says the rest.
"""
