"""Tokenizers of models that think aloud, for tests: the checkpoints' 512 entries and seven more, under a template of each kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from checkpoint_tokenizer import build_tokenizer, write_tokenizer
from scripted_engine import CLOSE, CONTROLS, OPEN
from serving import SUPPORT
from tokenizers import AddedToken

from server.ports import TextTools
from server.serve import ServeOptions
from server.template import ChatTemplate
from server.tokenizer import load_tokenizer

SCRIPTED = ServeOptions(factory="scripted_engine:build", factory_paths=(str(SUPPORT), str(Path(__file__).parent)))
START, CHANNEL, MESSAGE, END, CALL, THINK, ANSWER = map(chr, range(1, 8))
CHANNELS = (
    "{% for m in messages %}<|start|>{{ m.role }}{% if m.role == 'assistant' %}<|channel|>final{% endif %}<|message|>{{ m.content }}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKING_OPEN = THINKING.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")


def text_tools(folder: Path, template: str, **config: Any) -> TextTools:
    """`config` are further fields of tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder)
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in CONTROLS[:5]])
    tokenizer.add_tokens([AddedToken(name, special=False, normalized=False) for name in CONTROLS[5:]])
    tokenizer.save(str(folder / "tokenizer.json"))
    written = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(written | {"chat_template": template} | config))
    loaded = load_tokenizer(folder, None)
    return TextTools.of(loaded, ChatTemplate(loaded))


def told(script: str) -> str:
    """The message that makes the engine say `script`."""
    return chr(OPEN) + script + chr(CLOSE)


def in_channels(*parts: tuple[str, str]) -> str:
    """A script of (channel, text) parts, behind a prompt that ends with the header's role."""
    return f"{END}{START}assistant".join(f"{CHANNEL}{name}{MESSAGE}{text}" for name, text in parts)
