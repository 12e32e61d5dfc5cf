"""Trained weights to the file that drafts. Knows tensors by name and safetensors; refuses to know what they compute."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import save_file

from spec.errors import ConfigError


class Exported(Protocol):
    """What a network says of its file."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """By their names in the file, the tokens of the output rows not among them."""

    def metadata(self) -> dict[str, str]: ...


def write_weights(path: Path, network: Exported, token_ids: torch.Tensor, target: str) -> int:
    """float16, replaced as a whole; returns its bytes. Raises ConfigError for weights that float16 cannot hold."""
    tensors: dict[str, torch.Tensor] = {}
    for name, values in network.tensors().items():
        half = values.detach().to("cpu", torch.float16).contiguous()
        if not bool(torch.isfinite(half).all()):
            raise ConfigError(
                f"the trained tensor {name} holds values that float16 cannot: the run has diverged, lower the rate"
            )
        tensors[name] = half.clone()
    tensors["token_ids"] = token_ids.to("cpu", torch.int32).contiguous()
    draft = path.with_name(f"{path.name}.new")
    draft.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, draft, metadata=network.metadata() | {"target": target})
    os.replace(draft, path)
    os.chmod(path, 0o644)  # the library makes it readable by its owner alone
    return path.stat().st_size
