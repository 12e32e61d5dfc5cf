"""How many bytes of a GPU keys and values may take. Knows sizes of one step; refuses to ask any device.

Everything on the device counts against the share that was asked for: weights, drafters, what other processes hold, and the largest
step's own tensors, which are counted from its shapes and not measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kernels.decoder import DecoderShape
from kernels.tree_attention.ordered import parts_of
from spec.errors import ConfigError
from spec.prompt_scores import SCORED_TOKENS

FLOAT = 4  # bytes; the residual stream and every activation are float32
SLACK = 1.25  # allocator rounding and short-lived copies
MOST_PARTS = (
    16  # partial results of the fast attention that are merged at long context; the ordered one's grow with the context
)


@dataclass(frozen=True, slots=True)
class LargestStep:
    """The most that one pass may carry."""

    nodes: int  # rows of all matrices
    scored: int  # rows of logits


def largest_step(chunk_tokens: int, max_sequences: int, max_tree_nodes: int) -> LargestStep:
    """Every sequence with a full tree, and a prefill chunk beside them of which as many tokens are scored as may be."""
    trees = max_sequences * (max_tree_nodes + 1)
    return LargestStep(chunk_tokens + trees, trees + min(chunk_tokens, SCORED_TOKENS))


def step_bytes(shape: DecoderShape, step: LargestStep, deterministic: bool = False) -> int:
    """Tensors of one pass that are alive at once, from above: the stream and its norm, q k v, attention and its parts (sums, and two
    numbers a head), gate and up with their product, and two copies of the logits (raw and processed). `deterministic`: attention in
    order, at the longest context that the shape has positions for."""
    q_width, kv_width = shape.q_heads * shape.head_dim, shape.kv_heads * shape.head_dim
    parts = parts_of(shape.max_position) if deterministic else MOST_PARTS
    attention = 2 * q_width + 2 * kv_width + parts * (q_width + 2 * shape.q_heads)
    row = 3 * shape.hidden + max(attention, 3 * shape.intermediate)
    return int(SLACK * FLOAT * (step.nodes * row + 2 * step.scored * shape.vocab_size))


def kv_bytes(share: float, step: int, free_and_total: Callable[[], tuple[int, int]]) -> int:
    """Bytes for keys and values, so that all of the device's memory in use stays within `share` of it.

    `free_and_total` says what the device has left after the weights, and what it has. Raises ConfigError with all the figures when
    nothing is left.
    """
    free, total = free_and_total()
    room = int(share * total) - (total - free) - step
    if room <= 0:
        raise ConfigError(
            f"--gpu-memory {share:g} of {_gib(total)} leaves nothing for the KV cache: {_gib(total - free)} are taken by weights "
            f"and others, a step needs {_gib(step)}; raise the share, or lower --max-sequences or --chunk-tokens"
        )
    return room


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
