"""Settings as a TOML file that `serve --config` takes. Knows the settings' names; writes those that are not the default."""

from __future__ import annotations

import json
from collections.abc import Sequence

import msgspec

from server.settings import Settings

TUNED = (
    "drafters",
    "max_tree_nodes",
    "draft_vocabulary",
    "tree_shape",
    "page_size",
    "chunk_tokens",
)  # always written, default or not


def config_text(settings: Settings, comments: Sequence[str]) -> str:
    """The file: comments, then a line a setting. Loading it gives these settings again."""
    usual = msgspec.to_builtins(Settings())
    lines = [f"# {comment}" for comment in comments]
    for name, value in msgspec.to_builtins(settings).items():
        if value is not None and (name in TUNED or value != usual[name]):
            lines.append(f"{name} = {_toml(value)}")
    return "\n".join(lines) + "\n"


def _toml(value: object) -> str:
    """Strings, numbers, booleans and lists of them: where JSON's spelling is TOML's."""
    return json.dumps(value, ensure_ascii=False)
