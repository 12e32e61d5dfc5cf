"""Do two models speak the same tokens? Knows sizes and digests; refuses to know tokenizers."""

from __future__ import annotations

from spec.errors import ConfigError


def check_vocabulary(target_name: str, target_size: int, target_digest: str, name: str, size: int, digest: str) -> None:
    """Raise ConfigError unless a draft model speaks the target's tokens. Sizes count real tokens, without padding rows.

    A digest stands for the tokenizer's contents ("" = not known, then only sizes are compared).
    """
    if size == target_size and (not digest or not target_digest or digest == target_digest):
        return
    why = f"{size} tokens against {target_size}" if size != target_size else "the same size, but other tokens"
    raise ConfigError(
        f"draft model {name!r} and target {target_name!r} have different tokenizers ({why}); a draft model must share the target's"
    )
