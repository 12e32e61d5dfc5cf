"""Settings of one engine. Validated once; nothing below reads the environment or a file."""

from __future__ import annotations

from dataclasses import dataclass

from spec.errors import ConfigError


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes and limits. `num_pages * page_size` tokens of KV are shared by all sequences, target and draft stores alike."""

    num_pages: int
    page_size: int = 16
    context: int = 8192  # tokens a sequence may hold, prompt and answer together
    max_sequences: int = 64  # sequences decoding or prefilling at once
    chunk_tokens: int = 256  # prompt tokens a step may carry besides the decoding rows
    max_tree_nodes: int = 16  # drafted nodes a sequence may verify in one step, at most spec.tree.MAX_NODES
    prefix_cache: bool = True
    model_salt: str = ""  # identity of model, weights and KV type; part of every prefix hash

    def __post_init__(self) -> None:
        for name, low in (("num_pages", 1), ("page_size", 1), ("context", 2), ("max_sequences", 1), ("chunk_tokens", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < low:
                raise ConfigError(f"{name} is {value!r}; it must be an integer of at least {low}")
        if not 0 <= self.max_tree_nodes <= 63:
            raise ConfigError(f"max_tree_nodes is {self.max_tree_nodes}; it must be 0 to 63")
