"""What ``benchmarks/cuda_truth.py`` is made of: jobs, measurements on a GPU, and their table."""
