"""Logits of a loaded model through the reference decoder, and of a checkpoint through transformers as the oracle."""

from __future__ import annotations

from pathlib import Path

import torch
from toy import Row, decoder, new_store, step_inputs

from spec.models import LoadedModel

TOLERANCE = 1e-4  # largest difference over largest logit, float32 sums in another order
PAGE = 16


def text(count: int, vocabulary: int = 512, seed: int = 0) -> list[int]:
    return torch.randint(0, vocabulary, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def logits(model: LoadedModel, tokens: list[int], native: bool = False) -> torch.Tensor:
    """[N, V] float32: one causal row, every node scored."""
    pages = list(range(-(-len(tokens) // PAGE)))
    store = new_store(model.shape, len(pages), PAGE)
    inputs = step_inputs([Row(tokens, pages)], PAGE)
    scores = decoder(model.shape, model.weights, native).forward(inputs, store, need_logits=True).logits
    assert scores is not None
    return scores


def oracle(folder: Path, tokens: list[int]) -> torch.Tensor:
    """The same from transformers in float32 with plain attention."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        scores: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return scores


def error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())
