"""Log probabilities of prompt tokens, chunk by chunk. Knows rows and logits; refuses to know who asked and what becomes of them.

The node of token i speaks about token i + 1: a chunk's last node about the next chunk's first token, the prompt's last node about
the answer, which is not a prompt token and is left to `spec.accept`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence

import torch

from spec.logprobs import raw_logprobs
from spec.plan import PlanRow
from spec.request import TokenLogprob
from spec.sequence import Sequence as EngineSequence
from spec.target import TargetScores
from spec.tree import DraftTree

log = logging.getLogger(__name__)

PromptScores = Mapping[int, list[TokenLogprob] | None]  # by sequence id; None: what the target said cannot be read

# Scored prompt tokens a step may carry, all prompts together: what bounds the logits it holds (64 x 49152 float32 = 12 MiB).
SCORED_TOKENS = 64


def prompt_scores(
    rows: Sequence[PlanRow], sequences: Sequence[EngineSequence], trees: Sequence[DraftTree], scores: TargetScores
) -> PromptScores:
    """The entries of each scored prompt chunk, for the prompt tokens behind its nodes. One row's failure is that row's alone."""
    found: dict[int, list[TokenLogprob] | None] = {}
    first = 0  # the row's first scored node
    for row, sequence, tree in zip(rows, sequences, trees, strict=True):
        if row.prompt_scored:
            behind = sequence.token_ids[row.num_kv + 1 : row.num_kv + 1 + len(row.token_ids)]
            best = sequence.sampling.prompt_logprobs or 0
            assert scores.logits is not None
            logits = scores.logits[first : first + len(behind)]
            found[row.seq_id] = _entries(row, logits, behind, best)
            first += len(row.token_ids)
        elif row.scored:
            first += len(tree) + 1
    return found


def _entries(row: PlanRow, logits: torch.Tensor, behind: Sequence[int], best: int) -> list[TokenLogprob] | None:
    try:
        entries = raw_logprobs(logits, behind, [best] * len(behind))
    except Exception:
        log.exception("request %d is ended: its prompt could not be scored", row.seq_id)
        return None
    return None if any(math.isnan(entry.chosen) for entry in entries) else entries


def keep(sequence: EngineSequence, row: PlanRow, entries: list[TokenLogprob]) -> None:
    """Part of the commit. A prompt that began anew (preempted) replaces what it had."""
    del sequence.prompt_logprobs[row.num_kv :]
    sequence.prompt_logprobs += entries
