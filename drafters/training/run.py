"""One training run from an order to a file of weights: answers, corpus, network, loop, export, card. The door of the package."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from drafters.training.answers import read_answers
from drafters.training.attention_head import AttentionHead
from drafters.training.checkpoint import Position
from drafters.training.corpus import Corpus, make_corpus
from drafters.training.export import write_weights
from drafters.training.frequent import Frequent, choose_tokens
from drafters.training.journal import Journal, read_journal
from drafters.training.loop import Loop, Progress
from drafters.training.order import Order, Places, identity
from drafters.training.recurrent_head import RecurrentHead
from drafters.training.report import report
from drafters.training.selfplay import Speaker, seed_of, write_answers
from drafters.training.student import Student
from drafters.training.teacher import Teacher
from kernels.decoder import Decoder
from spec.engine import Engine
from spec.models import LoadedModel


_LAST_LINES = 5  # of the log: the loss that the card gives is their mean, since it jumps with the batch


@dataclass(frozen=True, slots=True)
class Target:
    """The model that is learned from."""

    model: LoadedModel
    decoder: Decoder
    make_engine: Callable[[], Engine]  # for writing answers; called only when some are missing
    speaker: Callable[[], Speaker]
    kv_dtype: torch.dtype
    device: str
    always: Sequence[int]  # tokens every drafter can say
    licence: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    finished: bool  # False: stopped before the end of the budget
    steps: int
    size: int  # bytes of the weights
    figures: dict[str, list[float]]


def write(target: Target, order: Order, on_progress: Progress, stop: Callable[[], bool]) -> bool:
    """Have the target write or continue its answers, unless the order brings some. False: stopped. Raises ConfigError."""
    if order.data is None:
        write_answers(
            Places(order).answers,
            order,
            target.model.digest,
            target.make_engine,
            target.speaker(),
            lambda kept, wanted, tried: on_progress("writing answers", kept / wanted, {"kept": kept, "tried": tried}),
            stop,
        )
    return not stop()


def train(target: Target, order: Order, on_progress: Progress, stop: Callable[[], bool], restart: bool = False) -> Outcome:
    """Run or continue an order whose answers are there. Raises ConfigError."""
    places = Places(order)
    if restart:
        for path in (places.checkpoint, places.log):
            path.unlink(missing_ok=True)
    on_progress("reading answers", 0.0, {})
    model = target.model
    corpus = make_corpus(
        read_answers(places.answers).conversations,
        share=order.held_out,
        vocab_size=model.shape.vocab_size,
        context=min(model.context, model.shape.max_position),
    )
    frequent = choose_tokens(corpus.train, target.always, model.shape.vocab_size, order.vocabulary, order.coverage)
    dtype = precision(order, target.device)
    teacher = Teacher(
        target.decoder, model.weights, frequent.token_ids, kv_dtype=target.kv_dtype, device=target.device, dtype=dtype
    )
    network = build(order, teacher)
    known = identity(order) | {"answers": corpus.digest, "target": model.digest, "dtype": str(dtype)}
    journal = Journal(places.log)
    loop = Loop(network, teacher, corpus, order, journal, places.checkpoint, known)
    loop.resume()
    journal.begin(loop.position.step, facts_of(target, order, corpus, frequent, network, loop.position))
    finished = loop.advance(on_progress, stop)
    return _finish(target, order, places, loop, network, corpus, frequent, finished, on_progress)


def _finish(
    target: Target,
    order: Order,
    places: Places,
    loop: Loop,
    network: nn.Module,
    corpus: Corpus,
    frequent: Frequent,
    finished: bool,
    on_progress: Progress,
) -> Outcome:
    """Weights first, then figures, curves and the card."""
    size = write_weights(places.out, network, frequent.token_ids, target.model.name)  # type: ignore[arg-type]
    if finished:
        on_progress("judging", 0.0, {})
        loop.evaluate()
    facts = facts_of(target, order, corpus, frequent, network, loop.position)
    losses = [line["loss"] for line in read_journal(places.log) if "loss" in line]
    last = losses[-_LAST_LINES:]
    loop.journal.write(facts=facts | ({"loss": round(sum(last) / len(last), 4)} if last else {}))
    svg, text = report(places.log)
    places.curves.write_text(svg, encoding="utf-8")
    places.card.write_text(text, encoding="utf-8")
    return Outcome(finished, loop.position.step, size, loop.figures)


def precision(order: Order, device: str) -> torch.dtype:
    """bfloat16 products where the hardware has them: half the memory and twice the speed or more; sums stay in float32."""
    if order.precision != "auto":
        return torch.bfloat16 if order.precision == "bfloat16" else torch.float32
    fast = torch.cuda.is_bf16_supported() if device.startswith("cuda") else torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.bfloat16 if fast else torch.float32


def build(order: Order, teacher: Teacher) -> nn.Module:
    """A fresh network for the order; the same for the same seed."""
    generator = torch.Generator().manual_seed(seed_of(order.seed, 0, "weights"))
    network: nn.Module
    if order.what == "student":
        network = Student(teacher, order.layers, order.share_output)
    elif order.kind == "attention":
        network = AttentionHead(teacher, order.width, generator)
    else:
        network = RecurrentHead(teacher, order.width, generator)
    return network.to(teacher.device)


def facts_of(
    target: Target, order: Order, corpus: Corpus, frequent: Frequent, network: nn.Module, position: Position
) -> dict[str, Any]:
    """What the log begins with and the card says."""
    kind = f"{order.layers} layers of the target" if order.what == "student" else f"{order.kind} head"
    written = (
        f"written by the target itself, greedy and at temperature {order.temperature:g} in turn"
        if order.data is None
        else "given"
    )
    return {
        "what": order.what,
        "target": target.model.name,
        "date": datetime.date.today().isoformat(),
        "architecture": kind,
        "parameters": sum(p.numel() for p in network.parameters() if p.requires_grad),
        "vocabulary": len(frequent.token_ids),
        "coverage": round(frequent.coverage, 4),
        "data": f"answers {written}",
        "conversations": len(corpus.train),
        "held_out": len(corpus.held_out),
        "answer_tokens": corpus.answer_tokens,
        "dropped": f"{corpus.loops} answers that loop, {corpus.doubles} doubles",
        "steps": position.step,
        "tokens": position.tokens,
        "minutes": round(position.seconds / 60, 1),
        "device": f"{target.device}, {torch.get_num_threads()} threads, {platform.machine()}",
        "options": ", ".join(f"{name} {value}" for name, value in identity(order).items() if value is not None),
    } | ({"licence": target.licence} if target.licence else {})
