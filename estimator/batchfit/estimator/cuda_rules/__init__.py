"""What CUDA would run: the operator choices that differ from those of meta tensors."""

from .attention import BACKENDS, AttentionRules, Backend
from .autocast import Autocast
from .dispatch import cuda_rules

__all__ = ["BACKENDS", "AttentionRules", "Autocast", "Backend", "cuda_rules"]
