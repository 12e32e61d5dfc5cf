"""One chat template, compiled for a sandbox that bounds what a rendering can do and cost.

Knows Jinja, in the dialect of Hugging Face's chat templates. Refuses to know tokenizers and roles. No code of the template's
choosing runs: attributes are filtered by Jinja's immutable sandbox, built-in methods and filters by lists of allowed ones.
Time and memory are bounded without a watchdog: the syntax tree is rewritten (`template_rewrite`) so that every loop round, macro
call and operation that makes a value is charged to the rendering's `Budget`, which also bounds its time.
"""

from __future__ import annotations

import html
import threading
import types
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import wraps
from string import Formatter
from typing import Any, cast

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.filters import FILTERS
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Cycler, Joiner, Namespace

from server import template_limits as limits
from server.template_limits import Budget, LimitError, TemplateError, TemplateStopped, words
from server.template_rewrite import Rewriter
from spec.errors import ModelFileError

_MAX_SOURCE = 1 << 20
# Jinja's own filters whose results are no larger than a small multiple of what they are given.
_FILTERS = words(
    """abs count d default dictsort first float int items last length list map max min reject rejectattr reverse select
    selectattr sort unique"""
)
_TEXT_FILTERS = words("capitalize lower title trim upper urlencode wordcount")
_OUTSIDE = (
    jinja2.TemplateError,
    LimitError,
    ArithmeticError,
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    RecursionError,
    MemoryError,
)


class _Refusal(Exception):
    """The template called raise_exception."""


class _Generation(Extension):
    """`{% generation %}` marks the assistant's part for training; here its body is just printed."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class _ClosedNamespace(Namespace):
    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"the namespace attribute {name!r} is private")
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"  # never its values: namespaces can hold each other


class _Formatter(SandboxedFormatter):
    """str.format with bounded fields."""

    def __init__(self, environment: _Environment) -> None:
        super().__init__(environment)
        self._environment = environment

    def convert_field(self, value: Any, conversion: Any) -> Any:
        limits.text_size(value)
        return super().convert_field(value, conversion)

    def format_field(self, value: Any, spec: str) -> Any:
        limits.check_field(spec)
        limits.text_size(value)
        text = Formatter.format_field(self, value, spec)
        self._environment.budget.print(len(text))
        return text


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox of one template. `budget` is the account of the rendering under way."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, now: Callable[[], datetime]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # constants would be computed while compiling, outside any budget
            finalize=jinja2.pass_context(lambda context, value: self._printed(value)),
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
        )
        self.budget = Budget()
        self.globals = {
            "range": self.globals["range"],  # the sandbox's own, at most 100 000 long
            "dict": lambda *args, **kwargs: dict(*args, **kwargs),
            "namespace": _ClosedNamespace,
            "cycler": Cycler,
            "joiner": Joiner,
            "raise_exception": self._refuse,
            "strftime_now": lambda form: _clock(now(), form),
        }
        own: dict[str, Callable[..., Any]] = {
            "e": lambda text: html.escape(limits.as_text(text)),
            "escape": lambda text: html.escape(limits.as_text(text)),
            "format": lambda text, *args: self.call_binop(None, "%", text, args),
            "indent": limits.indented,
            "join": lambda values, d="", attribute=None: limits.joined(
                limits.as_text(d), map(self._as_text, _attributes(values, attribute))
            ),
            "replace": lambda text, *args: limits.replaced(self._as_text(text), *args),
            "safe": limits.as_text,
            "string": limits.as_text,
            "sum": limits.summed,
            "tojson": limits.to_json,
        }
        self.filters = {name: self._guarded(FILTERS[name]) for name in _FILTERS}
        self.filters.update({name: self._guarded(self._on_text(FILTERS[name])) for name in _TEXT_FILTERS})
        self.filters.update({name: self._guarded(function) for name, function in own.items()})

    def tick(self, static: int) -> None:
        """One loop round or macro call, which prints `static` characters of the template's own text."""
        self.budget.print(static)

    def made(self, value: Any) -> Any:
        """A list, tuple or mapping written in the template."""
        return limits.measured(self.budget, value)

    def concatenated(self, *values: Any) -> str:
        return limits.joined("", [self._as_text(value) for value in values])

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.budget.charge()
        if isinstance(obj, types.BuiltinMethodType):
            obj = _allowed_method(obj)
        return limits.measured(self.budget, super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Context | None, operator: str, left: Any, right: Any) -> Any:
        self.budget.charge()
        limits.check_binary(operator, left, right)
        return limits.measured(self.budget, self.binop_table[operator](left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if not isinstance(value, types.BuiltinMethodType) or value.__name__ not in ("format", "format_map"):
            return None
        text = value.__self__
        if not isinstance(text, str):
            return None
        formatter, by_map = _Formatter(self), value.__name__ == "format_map"

        def run(*args: Any, **kwargs: Any) -> str:
            return formatter.vformat(text, () if by_map else args, args[0] if by_map else kwargs)

        return run

    def _guarded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            self.budget.charge()
            return limits.measured(self.budget, function(*args, **kwargs))

        return run

    def _on_text(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter that makes text of its first argument, given text."""
        return lambda value, *args, **kwargs: function(self._as_text(value), *args, **kwargs)

    def _refuse(self, message: Any = "") -> None:
        raise _Refusal(self._as_text(message)[:1000])

    def _as_text(self, value: Any) -> str:
        return str(value) if isinstance(value, jinja2.Undefined) else limits.as_text(value)

    def _printed(self, value: Any) -> str:
        text = self._as_text(value)
        self.budget.print(len(text))
        return text


class BoundedTemplate:
    """A compiled template. `render` may be called from any thread; renderings of one template take turns.

    `literals` replaces strings in what the template itself writes (never in what it is given): this is how control tokens
    become marks. Raises ModelFileError, naming `where`, for a template that does not compile.
    """

    def __init__(
        self, source: str, literals: Mapping[str, str], where: str, now: Callable[[], datetime] = datetime.now
    ) -> None:
        if len(source) > _MAX_SOURCE:
            raise ModelFileError(f"{where}: the chat template has {len(source)} characters; at most {_MAX_SOURCE} are read")
        self._environment = _Environment(now)
        self._lock = threading.Lock()
        try:
            tree = self._environment.parse(source)
            self.names = frozenset(node.name for node in tree.find_all(nodes.Name) if node.ctx == "load")
            self.strings = frozenset(
                node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)
            ) | frozenset(node.data for node in tree.find_all(nodes.TemplateData))
            tree = Rewriter(literals).visit(tree)
            self._template = self._environment.from_string(cast(nodes.Template, tree))
        except jinja2.TemplateSyntaxError as error:
            raise ModelFileError(f"{where}: the chat template does not compile: line {error.lineno}: {error.message}") from None
        except (jinja2.TemplateError, RecursionError, MemoryError, SyntaxError, ValueError) as error:
            raise ModelFileError(f"{where}: the chat template does not compile: {error}") from None

    def render(self, variables: Mapping[str, Any]) -> str:
        """The text. Raises TemplateError with the template's own message, or saying what it could not do."""
        with self._lock:
            self._environment.budget = Budget()
            try:
                return self._template.render(**variables)
            except _Refusal as error:
                raise TemplateError(str(error)) from None
            except (LimitError, SecurityError) as error:
                raise TemplateStopped(f"the model's chat template was stopped: {error}") from None
            except _OUTSIDE as error:
                problem = str(error)[:300] or type(error).__name__
                raise TemplateError(f"the model's chat template cannot render these messages: {problem}") from None


def _clock(now: datetime, form: str) -> str:
    if len(form) > 100 or any(character.isdigit() for character in form):
        raise LimitError("such a date format is not available")
    return now.strftime(form)


def _attributes(values: Any, attribute: Any) -> Any:
    return values if attribute is None else [value[attribute] for value in values]


def _allowed_method(method: types.BuiltinMethodType) -> Callable[..., Any]:
    owner = method.__self__
    for kind, methods in limits.METHODS.items():
        if isinstance(owner, kind) and method.__name__ in methods:
            run = methods[method.__name__]
            return lambda *args, **kwargs: run(owner, *args, **kwargs)
    raise SecurityError(f"{type(owner).__name__}.{method.__name__} is not available in chat templates")
