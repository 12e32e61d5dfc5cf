"""The arithmetic of a memory plan: bytes of weights, of a token, of a chat, and how many chats fit. Pure; knows no file and no
command.

A chat of n tokens keeps, in every layer, the keys and values of min(n, window) tokens. Reserved means that every chat holds what
the longest allowed chat would; paged means that a chat holds whole pages for what it has said so far; shared means that the full
pages of a common prefix are held once (Kwon et al. 2023, PagedAttention).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from server.planning.facts import ModelFacts


@dataclass(frozen=True, slots=True)
class WeightType:
    """Bits a parameter takes, scales included, by kind of matrix. Norms, biases and routers stay in 16 bits."""

    about: str
    layers: float
    experts: float
    vocabulary: float = 16.0  # embedding and output matrix


WEIGHTS: Mapping[str, WeightType] = {
    "bf16": WeightType("16 bits", 16, 16),
    "fp8": WeightType("8 bits, a 32-bit scale per 128 x 128 block", 8 + 32 / 128**2, 8 + 32 / 128**2),
    "int8": WeightType("8 bits, a 16-bit scale per 32 weights", 8.5, 8.5),
    "int4": WeightType("4 bits, a 16-bit scale per 32 weights", 4.5, 4.5),
    "mxfp4": WeightType("4 bits, an 8-bit scale per 32 weights", 4.25, 4.25),
    "q8": WeightType("Forespeak's --quantise q8", 8.5, 8.5, 8.5),
    "q4": WeightType("Forespeak's --quantise q4: scale and minimum per 32 weights, vocabulary in 8 bits", 5.0, 5.0, 8.5),
}


@dataclass(frozen=True, slots=True)
class KVType:
    """Bytes of a number in the cache, and of the scale that a row of them (one head of one token) shares."""

    number: float
    scale: float = 0.0


KV_TYPES: Mapping[str, KVType] = {
    "float32": KVType(4),
    "bf16": KVType(2),
    "fp8": KVType(1),
    "int8": KVType(1, 4),  # as `--kv-type int8` keeps them
    "int4": KVType(0.5, 4),
}


def weight_bytes(facts: ModelFacts, weights: str) -> int:
    """Bytes of all weights in this type; "stored" is the size of the files that are here, else of the published checkpoint.

    mxfp4 is a format of experts: a mixture's other matrices stay in 16 bits, as its published checkpoints have it.
    """
    if weights == "stored":
        return weight_bytes(facts, facts.stored_type) if facts.stored_bytes is None else facts.stored_bytes
    kind = WEIGHTS[weights]
    layers = 16.0 if weights == "mxfp4" and facts.parameters["experts"] else kind.layers
    bits = {"embedding": kind.vocabulary, "output": kind.vocabulary, "layers": layers, "experts": kind.experts, "small": 16.0}
    return round(sum(count * bits[group] for group, count in facts.parameters.items()) / 8)


def token_bytes(facts: ModelFacts, kv: str) -> float:
    """Bytes one token writes, all layers together."""
    return sum(_layer_bytes(facts, kv))


def growing_bytes(facts: ModelFacts, kv: str) -> float:
    """Of these, the bytes that stay for as long as the chat does: those of layers without a window."""
    return sum(each for each, layer in zip(_layer_bytes(facts, kv), facts.layers, strict=True) if layer.window is None)


def _layer_bytes(facts: ModelFacts, kv: str) -> list[float]:
    kind = KV_TYPES[kv]
    return [layer.elements * kind.number + layer.elements / layer.row * kind.scale for layer in facts.layers]


def chat_bytes(models: Sequence[ModelFacts], kv: str, tokens: float, page: int = 1) -> float:
    """Bytes a chat of `tokens` keeps in the caches of target and drafts, in whole pages.

    A chat's last page is half empty on average, and a window that slides over pages touches one page more than it fills.
    """
    held = tokens + (page - 1) / 2
    total = 0.0
    for facts in models:
        for each, layer in zip(_layer_bytes(facts, kv), facts.layers, strict=True):
            total += each * (held if layer.window is None else min(held, layer.window + page - 1))
    return total


@dataclass(frozen=True, slots=True)
class Chats:
    """How many chats fit into one amount of memory."""

    reserved: int  # every chat holds room for the longest
    paged: int  # every chat holds its mean length
    shared: int  # the same, with the common prefix held once


def chats(models: Sequence[ModelFacts], kv: str, memory: float, *, longest: int, mean: int, prefix: int, page: int) -> Chats:
    """`models`: target and draft models, which share pages. Lengths are in tokens; `mean` includes the prefix.

    Only layers without a window gain from a shared prefix: in the others it has slid out of sight once the chat is a window longer.
    """
    if memory <= 0:
        return Chats(0, 0, 0)
    each = chat_bytes(models, kv, mean, page)
    common = sum(growing_bytes(facts, kv) for facts in models) * (prefix // page * page)
    return Chats(
        reserved=int(memory // chat_bytes(models, kv, longest)),
        paged=int(memory // each),
        shared=int(max(0.0, memory - common) // (each - common)),
    )


def devices_for(need: float, device: float) -> int:
    """The smallest power of two of devices that hold `need` bytes and have at least a tenth of their memory left for the cache."""
    count = 1
    while need > 0.9 * device * count and count < 1 << 16:
        count *= 2
    return count
