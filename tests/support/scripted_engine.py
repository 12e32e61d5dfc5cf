"""The toy engine, told what to say: control tokens included, and so many tokens a step as the request's seed says.

What stands between the bytes 14 and 15 of the prompt is the answer, token by token; the bytes 1 to 7 in it stand for the tokens
of CONTROLS, 16 and 17 for the first two bytes of a character and its last. A prompt without them is answered with its own ids, as text.
"""

from __future__ import annotations

from checkpoint_tokenizer import VOCABULARY, token_id
from toy_engine import END, ToyEngine, _Answer
from toy_engine import build as build_toy

from server.settings import Settings
from server.wire import Ready
from spec.request import Request, TokenEvent

OPEN, CLOSE = 14, 15
CONTROLS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<think>", "</think>")
HALVES = {16: token_id(b"\xe4\xbd"), 17: token_id(b"\xa0")}
FIRST_CONTROL = VOCABULARY  # its id; the others follow


def script_of(prompt_ids: tuple[int, ...]) -> list[int]:
    """Ids of what a prompt asks to be said."""
    if OPEN not in prompt_ids:
        return list(" ".join(map(str, prompt_ids)).encode())
    end = len(prompt_ids) - 1 - prompt_ids[::-1].index(CLOSE)
    start = end - prompt_ids[:end][::-1].index(OPEN)
    stand_for = dict(enumerate(range(FIRST_CONTROL, FIRST_CONTROL + len(CONTROLS)), 1)) | HALVES
    return [stand_for.get(token, token) for token in prompt_ids[start:end]]


class ScriptedEngine(ToyEngine):
    def _next(self, request: Request, position: int, last: int) -> int:
        script = script_of(request.prompt_ids)
        return script[position] if position < len(script) else END

    def _advance(self, answer: _Answer) -> TokenEvent:
        self._options["run"] = 1 + (answer.request.sampling.seed - 1) % 9
        return super()._advance(answer)


def build(settings: Settings) -> tuple[ToyEngine, Ready]:
    engine, ready = build_toy(settings)
    return ScriptedEngine(engine._options), ready
