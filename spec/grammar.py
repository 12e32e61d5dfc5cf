"""Grammar constraints: which tokens may stand at a node. Knows bytes of tokens and matcher states; draws nothing.

A sequence owns one `GrammarState`, advanced only by committed tokens. A walk over a draft tree takes a cursor, a fork of
the state, and moves the fork; whatever it tries, the state stays where the committed text is. Forks share the compiled
grammar, so one costs microseconds.

The parser is llguidance (Earley over a derivative-based lexer; token masks from a trie of the vocabulary). End tokens are
allowed only where the text so far is complete, and nothing but them once it cannot be longer. When a matcher runs into one
of its limits it would go on with a mask of end tokens alone, which reads like a finished answer: here that is an error.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from threading import Lock

import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from spec.errors import RequestError
from spec.request import GrammarSpec

MAX_SOURCE = 65_536  # characters of a schema, expression or grammar
CACHED = 8  # compiled grammars kept for requests that ask for the same again
WHITESPACE = r"[ \t\n\r]{0,20}"  # between JSON tokens; unbounded, a small model can pad for ever and never finish

_PARAM = "response_format"  # the request field every kind comes in


class GrammarCursor:
    """One node's grammar state, moved down one path. See spec.sampling.GrammarCursor."""

    def __init__(self, matcher: LLMatcher, eos_ids: frozenset[int], vocab_size: int) -> None:
        self._matcher = matcher
        self._eos_ids = eos_ids
        self._vocab_size = vocab_size
        self._allowed: np.ndarray[tuple[int], np.dtype[np.bool_]] | None = None

    def mask(self, vocab_size: int) -> torch.Tensor:
        """Bool [vocab_size], True where the token may come next. Raises RequestError when the grammar ran into a limit."""
        allowed = np.zeros(vocab_size, dtype=np.bool_)
        known = self.allowed()[:vocab_size]
        allowed[: known.shape[0]] = known
        return torch.from_numpy(allowed)

    @property
    def must_end(self) -> bool:
        """True when the text is complete and cannot go on: only end tokens are allowed."""
        ids = np.flatnonzero(self.allowed())
        return ids.size <= len(self._eos_ids) and self._eos_ids.issuperset(ids.tolist())

    def extend(self, token: int) -> None:
        """Go to the node of `token`. A token the grammar forbids is an error at the next `mask`."""
        self._allowed = None
        if not self._matcher.is_stopped():  # a complete grammar repeats its end token (ignore_eos, min_tokens)
            self._matcher.consume_token(token)

    def allowed(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        if self._allowed is None:
            words = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
            self._allowed = np.unpackbits(words, count=self._vocab_size, bitorder="little").astype(np.bool_)
            check(self._matcher)
        return self._allowed


class GrammarState:
    """The grammar of one sequence at its last committed token. Only `advance` changes it."""

    def __init__(self, matcher: LLMatcher, eos_ids: frozenset[int], vocab_size: int) -> None:
        self._matcher = matcher
        self._eos_ids = eos_ids
        self._vocab_size = vocab_size

    def cursor(self) -> GrammarCursor:
        """A fork at the committed text; moving it never moves the state."""
        return GrammarCursor(self._matcher.deep_copy(), self._eos_ids, self._vocab_size)

    def advance(self, token_ids: Sequence[int]) -> None:
        """Committed tokens. Raises RequestError on a token the grammar forbids (a resumed answer of another grammar)."""
        for token in token_ids:
            if self._matcher.is_stopped():
                break
            self._matcher.consume_token(token)
        check(self._matcher)

    def forced(self) -> tuple[int, ...]:
        """The tokens that must come next whatever the model says, a sole end token included; () where there is a choice."""
        fork = self._matcher.deep_copy()
        chain = tuple(fork.compute_ff_tokens())
        fork.consume_tokens(list(chain))
        ends = fork.is_stopped() and not fork.is_error() and len(self._eos_ids) == 1
        return chain + tuple(self._eos_ids) if ends else chain

    @property
    def may_end(self) -> bool:
        """True when the committed text satisfies the grammar, longer or not."""
        return bool(self._matcher.is_accepting())

    @property
    def is_complete(self) -> bool:
        """True when the committed text satisfies the grammar and cannot go on."""
        return bool(self._matcher.is_stopped() and not self._matcher.is_error())


class GrammarCompiler:
    """Compiles a request's grammar for one vocabulary. Thread-safe; compiling releases the interpreter lock.

    Cost is bounded by the source's length and the parser's own limits (well under 0.1 s for large sources; a token mask a few
    milliseconds at most), so no grammar can hold up the other requests.
    """

    def __init__(
        self,
        tokenizer: str | LLTokenizer,
        eos_ids: Collection[int],
        vocab_size: int,
        limits: LLParserLimits | None = None,
    ) -> None:
        """`tokenizer`: the text of a tokenizer.json. The vocabulary trie (0.4 s for 49 k tokens) is built at first use."""
        self._tokenizer = tokenizer
        self._eos_ids = frozenset(eos_ids)
        self._vocab_size = vocab_size
        self._lock = Lock()
        self._compiled: OrderedDict[GrammarSpec, LLMatcher] = OrderedDict()
        self._limits = limits or LLParserLimits(
            initial_lexer_fuel=1_000_000,
            step_lexer_fuel=50_000,
            step_max_items=20_000,
            max_lexer_states=10_000,  # about 15 MB
            max_grammar_size=200_000,
            verbose_errors=False,
        )

    def warm(self) -> None:
        """Build the vocabulary trie now instead of at the first request with a grammar."""
        with self._lock:
            self._vocabulary()

    def compile(self, spec: GrammarSpec) -> GrammarState:
        """The state before the answer's first token. Raises RequestError for a source that is wrong, too large or too hard."""
        with self._lock:
            matcher = self._compiled.get(spec)
            if matcher is None or not _begins(matcher):
                matcher = self._build(spec)
                self._compiled[spec] = matcher
                if len(self._compiled) > CACHED:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(spec)
            return GrammarState(matcher.deep_copy(), self._eos_ids, self._vocab_size)

    def _vocabulary(self) -> LLTokenizer:
        if isinstance(self._tokenizer, str):
            text, ends = self._tokenizer, sorted(self._eos_ids)
            try:
                self._tokenizer = LLTokenizer(text, n_vocab=self._vocab_size, eos_token=ends)
            except ValueError:  # the tokenizer names more tokens than the model scores; masks are cut to what it scores
                self._tokenizer = LLTokenizer(text, eos_token=ends)
        return self._tokenizer

    def _build(self, spec: GrammarSpec) -> LLMatcher:
        if len(spec.source) > MAX_SOURCE:
            raise RequestError(
                f"the {spec.kind} source has {len(spec.source)} characters; at most {MAX_SOURCE} are taken",
                code="grammar_too_large",
                param=_PARAM,
            )
        try:
            grammar = _translate(spec)
        except ValueError as error:
            raise _refused(spec, str(error)) from None
        matcher = LLMatcher(self._vocabulary(), grammar, log_level=0, limits=self._limits)
        if not matcher.is_error():
            probe = _first_mask(matcher)  # some faults (a schema that only refers to itself) show at the first mask
            matcher = probe if probe.is_error() else matcher
        if matcher.is_error():
            raise _refused(spec, matcher.get_error())
        return matcher


def _first_mask(matcher: LLMatcher) -> LLMatcher:
    probe = matcher.deep_copy()
    probe.compute_bitmask()
    return probe


def _begins(matcher: LLMatcher) -> bool:
    """Whether a kept grammar still works. All its forks share one automaton, built as texts need it: when requests together have
    brought it to its limit, a new one is due."""
    return not _first_mask(matcher).is_error()


def check(matcher: LLMatcher) -> None:
    """Raises RequestError when the matcher is in its error state, from which it never returns."""
    if matcher.is_error():
        raise RequestError(f"the grammar cannot go on: {_line(matcher.get_error())}", code="grammar_failed")


def _translate(spec: GrammarSpec) -> str:
    """The source in the parser's own form. Raises ValueError for text that is not JSON where JSON is due."""
    if spec.kind == "regex":
        return str(LLMatcher.grammar_from_regex(spec.source))
    if spec.kind == "grammar":
        return str(LLMatcher.grammar_from_lark(spec.source))
    schema = spec.source if spec.kind == "json_schema" else '{"type": "object"}'
    return str(LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_pattern": WHITESPACE}))


def _refused(spec: GrammarSpec, reason: str) -> RequestError:
    code = "invalid_json_schema" if spec.kind.startswith("json") else "invalid_grammar"
    return RequestError(f"the {spec.kind} cannot be used: {_line(reason)}", code=code, param=_PARAM)


def _line(text: str) -> str:
    """A parser's message as one line of at most 300 characters, without the dump of its state."""
    return " ".join(text.split("<state>")[0].split())[:300] or "unknown reason"
