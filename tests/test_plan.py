"""`forespeak plan`: known figures of known models, the arithmetic behind them, and what the command prints and refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_rand_checkpoint, write_rand_gguf
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from server.cli import app
from server.planning.facts import LayerCache, ModelFacts, from_config
from server.planning.library import SHIPPED, read_facts, shipped_names
from server.planning.memory import KV_TYPES, chat_bytes, chats, devices_for, growing_bytes, token_bytes, weight_bytes
from spec.errors import ForespeakError, ModelFileError

KIB, MB, GB = 1024, 10**6, 10**9

# Parameters in billions, as the models' own cards and reports give them.
PUBLISHED = {
    "smollm2-135m": 0.1345, "smollm2-360m": 0.3618, "smollm2-1.7b": 1.711, "llama-2-7b": 6.738, "llama-2-13b": 13.016,
    "llama-3.2-1b": 1.236, "llama-3.2-3b": 3.213, "llama-3.1-8b": 8.030, "llama-3.3-70b": 70.554, "llama-3.1-405b": 405.85,
    "mistral-7b-v0.1": 7.242, "mistral-7b": 7.248, "mistral-small-24b": 23.572, "mixtral-8x7b": 46.703, "qwen2.5-0.5b": 0.494,
    "qwen2.5-7b": 7.616, "qwen2.5-72b": 72.706, "qwen3-0.6b": 0.596, "qwen3-8b": 8.191, "qwen3-32b": 32.762,
    "qwen3-30b-a3b": 30.53, "qwen3-235b-a22b": 235.09, "gemma-2-9b": 9.242, "gemma-3-1b": 1.000, "gemma-3-4b": 3.88,
    "gemma-3-27b": 27.01, "phi-4": 14.660, "gpt-oss-20b": 20.91, "gpt-oss-120b": 116.83, "deepseek-v3": 671.03,
    "kimi-k2": 1026.4, "glm-4.5-air": 106.85, "llama-4-scout": 107.77,
}  # fmt: skip
ACTIVE = {"mixtral-8x7b": 12.8, "gpt-oss-20b": 3.61, "gpt-oss-120b": 5.13, "deepseek-v3": 36.6, "qwen3-30b-a3b": 3.04}


def facts(name: str) -> ModelFacts:
    return read_facts(name, Path("/nowhere"))


def run(*arguments: str) -> Any:
    result = CliRunner().invoke(app, ["plan", *arguments, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_every_shipped_config_counts_the_parameters_its_model_card_gives() -> None:
    assert set(shipped_names()) == set(PUBLISHED)
    for name, billions in PUBLISHED.items():
        assert facts(name).total / GB == pytest.approx(billions, rel=1e-3), name
    for name, billions in ACTIVE.items():
        assert facts(name).active / GB == pytest.approx(billions, rel=1e-2), name


def test_gpt_oss_120b_takes_72_kib_a_token_of_which_36_grow() -> None:
    model = facts("gpt-oss-120b")
    assert token_bytes(model, "bf16") == 72 * KIB
    assert growing_bytes(model, "bf16") == 36 * KIB
    assert sum(layer.window == 128 for layer in model.layers) == 18
    # what grows, and what the windows add to it once
    windows = 128 * 36 * KIB
    for length, about in ((2048, 75 * MB), (8192, 300 * MB), (32768, 1.2 * GB), (131072, 4.8 * GB)):
        assert length * growing_bytes(model, "bf16") == pytest.approx(about, rel=0.01)
        assert chat_bytes([model], "bf16", length) == length * 36 * KIB + windows
    assert weight_bytes(model, "mxfp4") == pytest.approx(65.2 * GB, rel=0.01)
    assert weight_bytes(model, "bf16") == pytest.approx(233.7 * GB, rel=0.01)


def test_llama_3_3_70b_takes_320_kib_a_token() -> None:
    model = facts("llama-3.3-70b")
    assert token_bytes(model, "bf16") == growing_bytes(model, "bf16") == 320 * KIB
    assert chat_bytes([model], "bf16", 8192) == 2.5 * 2**30
    assert weight_bytes(model, "bf16") == pytest.approx(141.1 * GB, rel=0.001)


@pytest.mark.parametrize("memory", ["15.5GB", "17GB", "18GB"])
def test_three_chats_reserved_against_fifty_to_sixty_paged(memory: str) -> None:
    """gpt-oss-120b beside its weights on one 80 GB device: chats may reach 128k and hold 8k on average."""
    report = run("gpt-oss-120b", "--kv-memory", memory, "--context", "128k", "--mean-chat", "8k")
    assert report["chats"]["reserved"] == 3
    assert 50 <= report["chats"]["paged"] <= 60
    assert report["chats"]["shared"] > report["chats"]["paged"]
    # a sixteenth is also the default
    assert run("gpt-oss-120b", "--kv-memory", memory)["chats"] == report["chats"]


def test_sliding_windows_and_latents_of_the_families() -> None:
    assert growing_bytes(facts("mistral-7b-v0.1"), "bf16") == 0
    assert chat_bytes([facts("mistral-7b-v0.1")], "bf16", 32768) == 4096 * 128 * KIB
    assert [layer.window for layer in facts("gemma-3-27b").layers[:7]] == [1024] * 5 + [None, 1024]
    assert [layer.window for layer in facts("gemma-2-9b").layers[:2]] == [4096, None]
    assert sum(layer.window is None for layer in facts("llama-4-scout").layers) == 12
    assert token_bytes(facts("deepseek-v3"), "bf16") == 61 * (512 + 64) * 2
    assert token_bytes(facts("deepseek-v3"), "fp8") == 61 * (512 + 64)


def test_kv_types_and_their_scales() -> None:
    model = facts("llama-3.1-8b")  # 32 layers, 8 heads of 128: 65,536 numbers a token in rows of 128
    per_token = {kv: token_bytes(model, kv) for kv in KV_TYPES}
    assert per_token == {
        "float32": 262144, "bf16": 131072, "fp8": 65536, "int8": 65536 + 4 * 512, "int4": 32768 + 4 * 512
    }  # fmt: skip


def test_weight_types_leave_what_is_small_in_16_bits() -> None:
    model = facts("llama-3.1-8b")
    layers, vocabulary = model.parameters["layers"], model.parameters["embedding"] + model.parameters["output"]
    small = model.parameters["small"]
    assert weight_bytes(model, "int4") == layers * 18 / 32 + 2 * (vocabulary + small)
    assert weight_bytes(model, "q4") == layers * 20 / 32 + vocabulary * 34 / 32 + 2 * small
    mixture = facts("mixtral-8x7b")
    rest = mixture.total - mixture.parameters["experts"]
    assert weight_bytes(mixture, "mxfp4") == mixture.parameters["experts"] * 17 / 32 + 2 * rest


def test_draft_models_add_their_weights_and_their_tokens() -> None:
    alone = run("llama-3.3-70b", "--weights", "fp8", "--memory", "192GB")
    both = run("llama-3.3-70b", "--weights", "fp8", "--memory", "192GB", "--draft", "llama-3.2-1b")
    draft = facts("llama-3.2-1b")
    assert both["weight_bytes"] - alone["weight_bytes"] == weight_bytes(draft, "fp8")
    assert both["kv"]["bf16"]["bytes_per_token"] == (320 + 32) * KIB
    assert both["chats"]["paged"] < alone["chats"]["paged"]


def test_a_draft_model_is_counted_as_it_is_published_beside_a_target_of_another_type(tmp_path: Path) -> None:
    draft = facts("llama-3.2-1b")
    alone, both = run("gpt-oss-120b"), run("gpt-oss-120b", "--draft", "llama-3.2-1b")
    assert (both["weights"], both["draft_weights"]) == ("mxfp4", {draft.name: "bf16"})
    assert both["weight_bytes"] - alone["weight_bytes"] == weight_bytes(draft, "bf16")
    # one whose files are here is counted as they are, though the target's are not
    folder = write_rand_checkpoint(tmp_path / "rand")
    stored = read_facts(str(folder), tmp_path).stored_bytes
    beside = run("llama-3.3-70b", "--draft", str(folder))
    assert list(beside["draft_weights"].values()) == ["stored"]
    assert beside["weight_bytes"] - run("llama-3.3-70b")["weight_bytes"] == stored


@given(
    tokens=st.integers(1, 4000),
    window=st.integers(1, 300),
    page=st.integers(1, 64),
    memory=st.integers(0, 10**8),
    prefix=st.integers(0, 2000),
)
def test_paging_and_sharing_never_hold_fewer_chats_than_they_should(
    tokens: int, window: int, page: int, memory: int, prefix: int
) -> None:
    parameters = dict.fromkeys(("embedding", "output", "layers", "experts", "small"), 1)
    model = ModelFacts("x", "llama", 4096, (LayerCache(128, 64), LayerCache(128, 64, window)), parameters, 1)
    prefix = min(prefix, tokens - 1)
    found = chats([model], "bf16", memory, longest=tokens, mean=tokens, prefix=prefix, page=page)
    # at full length paging can lose only its half page and its window's page; sharing never loses but to the first copy
    assert found.paged <= found.reserved
    assert found.shared >= found.paged
    each = chat_bytes([model], "bf16", tokens, page)
    assert found.paged * each <= memory < (found.paged + 1) * each
    # the last chat in shared memory: one prefix and all that is each one's own
    own = each - 256 * (prefix // page * page)
    assert found.shared * own + (each - own) <= memory or found.shared == found.paged


def test_a_device_count_is_chosen_and_can_be_given() -> None:
    assert devices_for(65 * GB, 80 * GB) == 1
    assert devices_for(141 * GB, 80 * GB) == 2
    assert devices_for(145 * GB, 80 * GB) == 4
    assert run("llama-3.3-70b")["devices"] == 2
    given_one = run("llama-3.3-70b", "--devices", "1")
    assert given_one["kv_memory"] == 0
    assert given_one["chats"] == {"reserved": 0, "paged": 0, "shared": 0}


def test_a_checkpoint_folder_and_a_gguf_file_are_read_without_loading_them(tmp_path: Path) -> None:
    folder = write_rand_checkpoint(tmp_path / "rand")
    report = run(str(folder))
    assert report["weights"] == "stored"
    assert report["weight_bytes"] == sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert run(str(folder / "config.json"))["kv"] == report["kv"]


def test_the_default_models_file_has_the_sizes_of_its_config() -> None:
    file = Path.home() / ".cache/forespeak/models/smollm2-135m/SmolLM2-135M-Instruct.Q4_1.gguf"
    if not file.exists():
        pytest.skip("the default model is not here")
    stored, shipped = read_facts(str(file), Path("/nowhere")), facts("smollm2-135m")
    assert (stored.layers, stored.parameters, stored.active) == (shipped.layers, shipped.parameters, shipped.active)
    assert stored.stored_bytes is not None
    assert 0 < file.stat().st_size - stored.stored_bytes < 3 * MB  # the rest is the tokenizer


def test_the_table_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    result = CliRunner().invoke(app, ["plan", "gpt-oss-120b"])
    assert result.exit_code == 0
    for word in ("72 KiB", "36 KiB", "307 MB", "4.84 GB", "65.2 GB", "18 with a window"):
        assert word in result.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["no-such-model"], ["no-such-model", "gpt-oss-120b"]),
        (["llama-3.1-8b", "--kv-type", "fp3"], ["fp3", "fp8"]),
        (["llama-3.1-8b", "--weights", "stored"], ["stored", "llama-3.1-8b"]),
        (["llama-3.1-8b", "--context", "4k", "--mean-chat", "8k"], ["8192", "4096"]),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(arguments: list[str], words: list[str]) -> None:
    result = CliRunner().invoke(app, ["plan", *arguments])
    assert isinstance(result.exception, ForespeakError)
    message = str(result.exception)
    assert "\n" not in message
    assert all(word in message for word in words)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"model_type": "mamba"}, "model_type"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"hidden_size": "big"}, "hidden_size"),
        ({"layer_types": ["linear_attention"] * 32}, "layer_types"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"num_attention_heads": 8192, "head_dim": None}, "num_attention_heads: 8192; hidden_size is only 4096"),
    ],
)
def test_a_config_that_cannot_be_right_is_refused_by_field(change: dict[str, Any], word: str) -> None:
    config = json.loads((SHIPPED / "llama-3.1-8b.json").read_text()) | change
    with pytest.raises(ModelFileError, match=word):
        from_config("x", "config.json", config)


def test_a_gguf_file_with_more_heads_than_numbers_is_refused_by_field(tmp_path: Path) -> None:
    """Its key length has lost its name, and the head count after the name, a 32-bit number behind its type, is made 4096."""
    data = write_rand_gguf(tmp_path / "rand.gguf").read_bytes().replace(b"attention.key_length", b"attention.key_lengtH")
    name = b"llama.attention.head_count" + (4).to_bytes(4, "little")
    assert data.count(name) == 1
    at = data.index(name) + len(name)
    (tmp_path / "wrong.gguf").write_bytes(data[:at] + (4096).to_bytes(4, "little") + data[at + 4 :])
    with pytest.raises(ModelFileError, match=r"attention\.head_count: 4096; embedding_length is only"):
        read_facts(str(tmp_path / "wrong.gguf"), tmp_path)
