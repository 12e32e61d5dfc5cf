"""SD-10: target and draft model share a tokenizer, but their vocabularies are padded to different sizes.

Real files through the real composition. The padding rows have output weights a hundred times those of tokens, so wherever one
could win it does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from checkpoint_tokenizer import VOCABULARY
from checkpoints import write_rand_checkpoint
from engine_kit import Answer, greedy_request, has_native, prompts_of, run

from server.compose import Parts, load_parts, make_engine
from server.settings import Settings
from spec.drafter import Budget, SequenceView
from spec.engine import Engine
from spec.models import LoadedModel
from spec.shapes import ShapeSpeculator
from spec.tree import DraftTree, Proposal

SIZES = [(640, 576), (576, 640), (640, VOCABULARY), (VOCABULARY, 640)]
PROMPTS = prompts_of([3, 17, 9], seed=2, vocab=256)
COUNT = 32


class Watching(ShapeSpeculator):
    """A fixed shape that keeps the tokens it was offered. It is not told the vocabulary, so nothing is filtered here."""

    def __init__(self) -> None:
        super().__init__("4x3")
        self.offered: list[int] = []

    def admit(
        self, views: Sequence[SequenceView], budgets: Sequence[Budget], proposals: Mapping[str, Sequence[Proposal]]
    ) -> list[DraftTree]:
        for offers in proposals.values():
            for offer in offers:
                self.offered += offer.token_ids
        return super().admit(views, budgets, proposals)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("padded")


@cache
def checkpoint(folder: Path, rows: int, noise: float) -> Path:
    """One model in every size: padding aside the weights are the same. With noise it is the draft model."""
    return write_rand_checkpoint(folder / f"{rows}-{noise}", padding_rows=rows - VOCABULARY, noise=noise, lm_head_gain=2.0)


def parts(folder: Path, target: int, draft: int | None) -> Parts:
    settings = Settings(
        model=str(checkpoint(folder, target, 0.0)), backend="native" if has_native() else "reference", weights="float32",
        kv_memory=2**22, threads=1, cache_dir=str(folder / "cache"),
        drafters="none" if draft is None else f"model:{checkpoint(folder, draft, 0.02)}",
    )  # fmt: skip
    return load_parts(settings)


def engine(made: Parts) -> tuple[Engine, Watching]:
    watching = Watching()
    return make_engine(made, speculator=lambda *_: watching), watching


def answers(made: Engine) -> list[Answer]:
    """Greedy and seeded answers, side by side, with log probabilities of enough tokens that padding would be among them."""
    settings: tuple[dict[str, Any], ...] = ({}, {"temperature": 1.0, "seed": 5, "top_k": 40}, {"temperature": 1.3, "seed": 6})
    cases = [(prompt, options) for prompt in PROMPTS for options in settings]
    requests = [greedy_request(i, p, COUNT, ignore_eos=True, logprobs=8, **options) for i, (p, options) in enumerate(cases)]
    return list(run(made, requests).values())


@cache
def unpadded(folder: Path) -> list[Answer]:
    return answers(engine(parts(folder, VOCABULARY, None))[0])


@pytest.mark.parametrize(("target", "draft"), SIZES)
def test_differently_padded_vocabularies_change_no_id(folder: Path, target: int, draft: int) -> None:
    made, watching = engine(parts(folder, target, draft))
    drafted = answers(made)
    for on, off, true in zip(drafted, answers(engine(parts(folder, target, None))[0]), unpadded(folder), strict=True):
        assert (on.token_ids, on.logprobs) == (off.token_ids, off.logprobs) == (true.token_ids, true.logprobs)
        assert max(on.token_ids) < VOCABULARY
        assert all(token < VOCABULARY for entry in on.logprobs for token, _ in entry.top)
        assert on.drafted > 0
    assert sum(answer.accepted for answer in drafted) > 2 * COUNT, "the twins agree often"
    assert max(watching.offered) < VOCABULARY
    assert made.stats()["drafter_faults"]["model"] == 0


@pytest.mark.parametrize("left", ["in the target", "in the draft model"])
def test_padding_would_show_if_it_were_left(folder: Path, monkeypatch: pytest.MonkeyPatch, left: str) -> None:
    """The mutants: rows past the tokenizer's are not cut off."""
    loaded = parts(folder, 640, 576) if left == "in the draft model" else None  # its target is cut already
    monkeypatch.setattr(LoadedModel, "trimmed", lambda model, vocab_size: model)
    made, _ = engine(loaded or parts(folder, 640, None))
    emitted = [token for answer in answers(made) for token in answer.token_ids]
    assert (max(emitted) >= VOCABULARY) == (left == "in the target")
    assert (made.stats()["drafter_faults"].get("model", 0) > 0) == (left == "in the draft model"), (
        "the engine refuses such nodes"
    )
