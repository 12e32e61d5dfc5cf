"""What is to be trained, on what, for how long. Plain checked values; refuses to know how any of it is done."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from spec.errors import ConfigError


class Order(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One training run. Files of a run stand beside `out`: see `Places`."""

    what: Literal["heads", "student"]
    out: str
    # what is built
    kind: Literal["attention", "recurrent"] = "attention"  # heads only
    layers: int = 2  # student only: layers taken from the target
    share_output: bool = False  # student only: score with the target's own vocabulary rows, which saves a third of the file
    width: int = 0  # inner width of the MLP, 0 = the target's own (recurrent: twice the hidden size)
    vocabulary: int = 0  # tokens the drafter can say, 0 = as many as `coverage` needs
    coverage: float = 0.975  # share of the answers' tokens that the vocabulary must hold
    # what it learns from
    data: str | None = None  # a file of answers; None = the target writes one
    answers: int = 3000  # conversations to write
    answer_tokens: int = 200  # longest answer to write
    user_tokens: int = 64  # longest user turn to write
    temperature: float = 0.8  # of every other answer, the rest is greedy
    writers: int = 32  # conversations written at once
    held_out: float = 0.04  # share of conversations that are never trained on
    # how it learns
    minutes: float | None = None  # budgets: whichever ends first
    tokens: int | None = None  # answer tokens trained on
    steps: int | None = None
    depths: int = 4  # tokens guessed in a row while training heads
    anchors: float = 0.5  # share of positions from which heads guess further than one token
    hidden_loss: float = 0.0  # student only: weight of the distance to the target's hidden states
    batch_tokens: int = 4096  # padded tokens of a step
    learning_rate: float = 1e-3
    weight_decay: float = 0.02
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    seed: int = 0
    checkpoint_steps: int = 50
    evaluate_steps: int = 200

    @property
    def chain(self) -> int:
        """Tokens guessed in a row while training. A student's guesses all look alike: it sees its own past only."""
        return self.depths if self.what == "heads" else 1


_LIMITS: dict[str, tuple[float, float]] = {
    "layers": (1, 256),
    "width": (0, 1 << 20),
    "vocabulary": (0, 1 << 22),
    "coverage": (0.01, 1.0),
    "answers": (2, 1 << 24),
    "answer_tokens": (8, 1 << 16),
    "user_tokens": (1, 1 << 14),
    "temperature": (0.0, 2.0),
    "writers": (1, 4096),
    "held_out": (0.001, 0.5),
    "minutes": (0.0, 1e6),
    "tokens": (1, 1e15),
    "steps": (1, 1e9),
    "depths": (1, 16),
    "anchors": (0.01, 1.0),
    "hidden_loss": (0.0, 1e3),
    "batch_tokens": (64, 1 << 24),
    "learning_rate": (1e-8, 1.0),
    "weight_decay": (0.0, 1.0),
    "seed": (0, 2**62),
    "checkpoint_steps": (1, 1e9),
    "evaluate_steps": (1, 1e9),
}
# What may change between a run and its continuation: everything else would make it another run.
_BUDGETS = ("minutes", "tokens", "steps", "out", "data", "writers", "checkpoint_steps", "evaluate_steps")


def parse_order(flags: Mapping[str, Any]) -> Order:
    """Raises ConfigError naming the option at fault. Without any budget a run takes an hour."""
    values = {name: value for name, value in flags.items() if value is not None}
    if not any(name in values for name in ("minutes", "tokens", "steps")):
        values["minutes"] = 60.0
    try:
        order = msgspec.convert(values, Order)
    except msgspec.ValidationError as error:
        raise ConfigError(f"bad training option: {error}") from error
    for name, (low, high) in _LIMITS.items():
        value = getattr(order, name)
        if value is not None and not low <= value <= high:
            option = name.replace("_", "-")
            raise ConfigError(f"--{option} is {value:g}; it must be between {low:g} and {high:g}")
    if Path(order.out).suffix != ".safetensors":
        raise ConfigError(f"--out is {order.out!r}; the file's name must end in .safetensors")
    return order


def identity(order: Order) -> dict[str, Any]:
    """The options that a continued run must share with its beginning."""
    fields = msgspec.structs.asdict(order)
    return {name: value for name, value in fields.items() if name not in _BUDGETS}


class Places:
    """The files of one run."""

    def __init__(self, order: Order) -> None:
        out = Path(order.out)
        self.out = out
        self.answers = Path(order.data) if order.data else out.with_name(f"{out.stem}.answers.jsonl.gz")
        self.checkpoint = out.with_name(f"{out.stem}.checkpoint.safetensors")
        self.log = out.with_name(f"{out.stem}.log.jsonl")
        self.curves = out.with_name(f"{out.stem}.svg")
        self.card = out.with_name(f"{out.stem}.md")
