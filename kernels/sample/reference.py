"""The processed distribution and one draw from it, a row at a time. Knows logits; refuses to know penalties and seeds."""

from __future__ import annotations

import torch


def probabilities(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """The processed distribution [R, V] float32; the contract is the package's."""
    rows = [
        _row(logits[r], float(temperature[r]), int(top_k[r]), float(top_p[r]), float(min_p[r])) for r in range(logits.shape[0])
    ]
    masses = torch.stack(rows) if rows else logits.new_zeros(logits.shape)
    total = masses.double().sum(dim=-1, keepdim=True)
    return (masses.double() / total).float()


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniforms: torch.Tensor,
) -> torch.Tensor:
    """Token ids [R] int32; the contract is the package's."""
    ids = torch.empty(logits.shape[0], dtype=torch.int32)
    for r in range(logits.shape[0]):
        mass = _row(logits[r], float(temperature[r]), int(top_k[r]), float(top_p[r]), float(min_p[r]))
        ids[r] = _draw(mass, float(uniforms[r]))
    return ids


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """Highest logit of each row, lowest id on ties: [R, V] -> [R] int32."""
    return torch.argmax(logits, dim=-1).to(torch.int32)


def is_greedy(temperature: float) -> bool:
    """True where 1 / temperature is not finite in float32 (0 included): such a row takes the argmax."""
    return bool(torch.isinf(1.0 / torch.tensor(temperature, dtype=torch.float32)))


def _row(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """Unnormalised masses [V] float32, largest 1; zero where a filter removed the token."""
    if is_greedy(temperature):
        mass = torch.zeros_like(logits)
        mass[torch.argmax(logits)] = 1.0
        return mass
    # Shifting by the maximum first keeps a tiny temperature from making infinities of opposite sign.
    mass = torch.exp((logits - logits.max()) / temperature)  # max(p) stands for 1
    mass = torch.where(mass >= min_p, mass, 0.0)
    best = torch.argsort(mass, descending=True, stable=True)  # ties: lower id first
    kept = best[:top_k] if top_k > 0 else best
    if top_p < 1.0:
        cumulative = mass[kept].double().cumsum(0)
        reached = cumulative >= top_p * cumulative[-1]
        kept = kept[: int(torch.argmax(reached.int())) + 1]  # the first True; at least one token stays
    filtered = torch.zeros_like(mass)
    filtered[kept] = mass[kept]
    return filtered


def _draw(mass: torch.Tensor, uniform: float) -> int:
    cumulative = mass.double().cumsum(0)
    over = torch.nonzero(cumulative > uniform * cumulative[-1])
    if over.numel() == 0:  # uniform * total rounded up to total: the last token with any mass
        over = torch.nonzero(mass > 0)[-1:]
    return int(over[0])
