"""One request's state in the engine: tokens, phase, pages. Knows plain ints; refuses to know tensors, drafters and text.

Who writes what: the scheduler writes `phase`, pages and `num_kv` before a forward pass; `spec.commit` writes tokens and `num_kv`
after it; nobody writes during it.

Invariants between steps: a decoding sequence has `num_kv == len(token_ids) - 1` (the last token is the pending root); a waiting or
finished one holds no pages; `page_ids` covers exactly the committed keys.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from spec.errors import InvariantError
from spec.request import FinishReason, Request, TokenLogprob

if TYPE_CHECKING:
    from spec.grammar import GrammarState


class Phase(Enum):
    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


_NEXT = {
    Phase.WAITING: (Phase.PREFILL, Phase.FINISHED),
    Phase.PREFILL: (Phase.DECODE, Phase.WAITING, Phase.FINISHED),
    Phase.DECODE: (Phase.WAITING, Phase.FINISHED),
    Phase.FINISHED: (),
}


class Sequence:
    """Implements `spec.drafter.SequenceView`."""

    __slots__ = (
        "arrived_at",
        "cached_tokens",
        "finish_reason",
        "grammar",
        "max_length",
        "needs_logits",
        "num_kv",
        "num_published",
        "ordinal",
        "page_digests",
        "page_ids",
        "phase",
        "policy",
        "prompt_len",
        "prompt_logprobs",
        "recomputing",
        "request",
        "sampling",
        "scheduled_at",
        "seq_id",
        "started",
        "stop_ids",
        "tenant",
        "token_ids",
    )

    def __init__(self, request: Request, *, ordinal: int, context: int, end_ids: frozenset[int], arrived_at: float) -> None:
        """`context`: tokens a sequence may hold. `end_ids`: the model's own end tokens. `arrived_at`: engine clock, seconds."""
        sampling = request.sampling
        self.request = request
        self.seq_id = request.id
        self.ordinal = ordinal  # age: lower came first
        self.tenant = request.tenant
        self.sampling = sampling
        self.policy = request.speculation
        self.prompt_len = len(request.prompt_ids)
        self.token_ids = [*request.prompt_ids, *request.generated_ids]
        self.max_length = min(self.prompt_len + sampling.max_tokens, context)
        self.stop_ids = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else end_ids)
        self.needs_logits = True
        self.prompt_logprobs: list[TokenLogprob] = []  # of the prompt tokens computed so far, until they are said
        self.grammar: GrammarState | None = None  # at the last committed token
        self.phase = Phase.WAITING
        self.num_kv = 0
        self.page_ids: list[int] = []
        self.page_digests: list[bytes] = []
        self.num_published = 0  # leading pages that are shared or published
        self.cached_tokens = 0  # prompt tokens that were in the prefix cache at the first prefill
        self.recomputing = False  # preempted before: what it computes now was computed before
        self.arrived_at = arrived_at
        self.scheduled_at: float | None = None  # engine clock of the first admission
        self.started = False  # an event was delivered
        self.finish_reason: FinishReason | None = None

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.prompt_len

    @property
    def remaining(self) -> int:
        """Tokens it may still generate."""
        return self.max_length - len(self.token_ids)

    @property
    def scores_prompt(self) -> bool:
        """Log probabilities of the prompt are wanted and not said yet: all of it must be computed, whatever the cache holds."""
        return self.sampling.prompt_logprobs is not None and not self.started and not self.request.generated_ids

    def move_to(self, phase: Phase) -> None:
        if phase not in _NEXT[self.phase]:
            raise InvariantError(f"sequence {self.seq_id} cannot go from {self.phase.value} to {phase.value}")
        self.phase = phase

    def ends_with(self, length: int, token: int) -> FinishReason | None:
        """Why the answer ends when `token` makes the sequence `length` tokens long; None = it goes on.

        min_tokens is not asked here: sampling bans end tokens until then, so one that comes was allowed.
        """
        if token in self.stop_ids:
            return "stop"
        return "length" if length >= self.max_length else None
