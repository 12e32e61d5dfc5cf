"""Checkpoints to decoder weights: GGUF files and safetensors folders. Knows files, shapes and families; refuses to know text.

Nothing here imports transformers, unpickles, or runs code from a checkpoint.
"""

from spec.models.loader import LoadedModel, load_model

__all__ = ["LoadedModel", "load_model"]
