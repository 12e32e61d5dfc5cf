"""The supported families as one table: how they differ in shape. Refuses to know files; readers and the assembler ask here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Family:
    """How one family departs from plain Llama. `tied_default` is what an absent tie_word_embeddings means."""

    name: str
    qkv_bias: bool | None  # None: the config's attention_bias decides, for o too
    mlp_bias_field: bool  # the config may ask for mlp_bias
    qk_norm: bool  # per-head RMSNorm of q and k before rotation
    window: Literal["none", "field", "switched"]  # sliding_window: not read / read / read when use_sliding_window says so
    default_window: int | None
    default_head_dim: int | None  # when the config has no head_dim at all; None: hidden / heads
    gguf_rows_interleaved: bool  # GGUF stores q and k rows of a head as interleaved rotary pairs
    tied_default: bool = False


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        # Llama 2 and 3, SmolLM2; GGUF files of Mistral name this family too
        Family("llama", None, True, False, "none", None, None, True),
        Family("mistral", False, False, False, "field", 4096, None, True),
        Family("qwen2", True, False, False, "switched", 4096, None, False),
        Family("qwen3", None, False, True, "switched", 4096, 128, False),
    )
}


def supported() -> str:
    return ", ".join(FAMILIES)
