"""A run on disk between two steps: weights, optimiser moments, position. Safetensors, replaced as a whole or not at all.

Everything random in training is drawn from (seed, step), so a position is all the state a generator needs.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from spec.errors import ConfigError

FORMAT = "forespeak.checkpoint/1"


@dataclass(slots=True)
class Position:
    """How far a run is. `epoch` and `place` name the next batch."""

    step: int = 0
    epoch: int = 0
    place: int = 0
    tokens: int = 0  # answer tokens trained on, once an epoch each
    seconds: float = 0.0
    recent: list[float] = field(default_factory=list)  # losses not yet in the log


def save(path: Path, network: nn.Module, optimiser: torch.optim.AdamW, position: Position, identity: dict[str, Any]) -> None:
    """`identity`: what a continued run must have in common with this one."""
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in network.named_parameters():
        tensors[f"weight.{name}"] = parameter.detach()
        for key, value in optimiser.state.get(parameter, {}).items():
            tensors[f"{key}.{name}"] = value
    facts = {"format": FORMAT, "position": json.dumps(asdict(position)), "identity": json.dumps(identity, sort_keys=True)}
    draft = path.with_name(f"{path.name}.new")
    save_file({name: value.cpu().contiguous() for name, value in tensors.items()}, draft, metadata=facts)
    with draft.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(draft, path)


def restore(path: Path, network: nn.Module, optimiser: torch.optim.AdamW, identity: dict[str, Any]) -> Position:
    """Put a run back where it was. Raises ConfigError when the file is broken or belongs to another run."""
    try:
        with safe_open(path, framework="pt") as file:
            facts = file.metadata() or {}
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path}: not a readable checkpoint: {error}") from error
    if facts.get("format") != FORMAT:
        raise ConfigError(f"{path}: not a checkpoint of this trainer")
    theirs, ours = json.loads(facts["identity"]), json.loads(json.dumps(identity))
    other = sorted(name for name in {*theirs, *ours} if theirs.get(name) != ours.get(name))
    if other:
        raise ConfigError(
            f"{path} belongs to a run with another {', '.join(other)}; give the same options to continue it, "
            "another --out for a new run, or --restart to begin again"
        )
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            parameter.copy_(tensors[f"weight.{name}"])
            moments = {key: tensors.get(f"{key}.{name}") for key in ("step", "exp_avg", "exp_avg_sq")}
            if moments["step"] is not None:
                there = parameter.device
                optimiser.state[parameter] = {
                    key: value if key == "step" else value.to(there) for key, value in moments.items() if value is not None
                }
    return Position(**json.loads(facts["position"]))
