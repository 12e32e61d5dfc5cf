"""A chat template that comes with a model file cannot run code, and is cut when it loops or grows without end (SE-03)."""

from __future__ import annotations

import resource
import threading
import time
from pathlib import Path

import pytest
from chat_templates import CHATML
from text_kit import byte_folder, byte_metadata, tokenizer_gguf

from server import template_limits
from server.template import ChatTemplate, TemplateError
from server.template_limits import TemplateStopped
from server.template_sandbox import BoundedTemplate
from server.tokenizer import load_tokenizer
from spec.errors import ModelFileError

HI = {"role": "user", "content": "hi"}


def render(source: str, **variables: object) -> str:
    return BoundedTemplate(source, {}, "test").render({"messages": [HI], **variables})


CODE = (
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.system('touch MARKER') }}",
    "{{ joiner.__init__.__globals__ }}{{ namespace.__init__.__globals__['os'].popen('touch MARKER').read() }}",
    "{{ self.__init__.__globals__.__builtins__.open('MARKER', 'w') }}",
    "{{ lipsum.__globals__['os'].system('touch MARKER') }}",
    "{{ raise_exception.__globals__['__builtins__']['open']('MARKER', 'w') }}",
    "{{ messages.__class__.__base__.__subclasses__()[0].__init__.__globals__ }}",
    "{{ (messages | map(attribute='__class__') | list)[0].__init__.__globals__ }}",
    "{{ messages[0]['content'].format.__globals__ }}",
    "{{ '{0.__class__.__init__.__globals__}'.format(raise_exception) }}",
    "{{ '{x.__class__}'.format_map({'x': raise_exception}) }}",
    "{% set f = ''.format %}{{ f.__globals__ }}",
    "{{ strftime_now.__func__.__globals__ }}",
    "{{ range.__self__ }}{{ (range(1) | list).__class__ }}",
    "{{ dict.__globals__['open']('MARKER', 'w') }}",
    "{{ tojson }}{{ ''|attr('__class__') }}",
    "{% include 'MARKER' %}",
    "{% import 'os' as os %}{{ os.system('touch MARKER') }}",
    "{% extends '/etc/passwd' %}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'role': 'x'}) }}",
    "{{ messages.sort() }}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}{{ ns.__class__.__init__.__globals__ }}",
    "{{ (1).to_bytes(9) }}",
    "{{ ''.encode() }}",
    "{{ 'x'.translate({120: 'y'}) }}",
    "{{ loop.__init__.__globals__ }}",
    "{% for m in messages %}{{ loop.__init__.__globals__ }}{% endfor %}",
    "{% macro m() %}{% endmacro %}{{ m.__init__.__globals__ }}{{ m._func.__globals__ }}",
    "{{ messages | map('attr', '__class__') | list }}",
    "{{ (messages | map('upper')).gi_frame.f_globals }}",
)


@pytest.mark.parametrize("source", CODE)
def test_se03_no_code_runs(tmp_path: Path, source: str) -> None:
    """Refused at start-up or at the request; nothing but text ever comes of it, and no file appears."""
    marker = tmp_path / "marker"
    before = dict(HI)
    try:
        shown = render(source.replace("MARKER", str(marker)))
    except (TemplateError, ModelFileError):
        shown = ""
    assert not marker.exists()
    assert before == HI
    assert not any(word in shown for word in ("class '", "<module", "<built-in", "root:", "function", "__main__"))


ENDLESS = (
    "{% for i in range(1000000000) %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{{ range(99999) | list | length }}{% endfor %}",
    "{% for i in range(99999) %}{{ range(99999) | map('string') | join('') | length }}{% endfor %}",
    "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% for x in [[[]]] recursive %}{{ loop([x]) }}{% endfor %}",
    "{% block b %}{{ self.b() }}{{ self.b() }}{% endblock %}",
    "{% set ns = namespace(n=3) %}{% for i in range(99999) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "{{ 9 ** 99999 }}",
    "{{ 7 ** 99999999 }}",
    "{% set ns = namespace(a=[1], b=[1]) %}{% for i in range(60) %}{% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}"
    "{% endfor %}{{ ns.a == ns.b }}",
    "{% set ns = namespace(a={}) %}{% for i in range(60) %}{% set ns.a = {'x': ns.a, 'y': ns.a} %}{% endfor %}{{ ns.a | tojson }}",
    "{% set ns = namespace(a=()) %}{% for i in range(60) %}{% set ns.a = (ns.a, ns.a) %}{% endfor %}{{ ns.a }}",
    "{% set ns = namespace(a=(1,), b=(1,)) %}{% for i in range(60) %}{% set ns.a = (ns.a, ns.a) %}{% set ns.b = (ns.b, ns.b) %}"
    "{% endfor %}{{ ns.a == ns.b }}",
    "{% set ns = namespace(a={}, b={}) %}{% for i in range(60) %}{% set ns.a = {1: ns.a, 2: ns.a} %}"
    "{% set ns.b = {1: ns.b, 2: ns.b} %}{% endfor %}{{ ns.a == ns.b }}",
    "{% set ns = namespace(a=[0]) %}{% for i in range(60) %}{% set ns.a = ns.a + ns.a %}{% endfor %}",
    "{% set ns = namespace(a={}) %}{% for i in range(60) %}{% set ns.a = dict(x=ns.a, y=ns.a) %}{% endfor %}{{ ns.a }}",
)

GROWING = (
    "{{ 'x' * 1000000000 }}",
    "{{ 1000000000 * 'x' }}",
    "{{ [0] * 1000000000 }}",
    "{% set ns = namespace(s='xxxxxxxx') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "{% set ns = namespace(s='xxxxxxxx') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "{% set ns = namespace(s='xxxxxxxx') %}{% for i in range(60) %}{% set ns.s = [ns.s, ns.s] | join %}{% endfor %}",
    "{% set ns = namespace(s='xxxxxxxx') %}{% for i in range(60) %}{% set ns.s = ns.s.join([ns.s, ns.s, ns.s]) %}{% endfor %}",
    "{% set ns = namespace(s='xxxxxxxx') %}{% for i in range(60) %}{% set ns.s = ns.s.replace('x', 'xx') %}{% endfor %}",
    "{% set ns = namespace(s='xxxxxxxx') %}{% for i in range(60) %}{% set ns.s = ns.s | replace('', ns.s) %}{% endfor %}",
    "{% set ns = namespace(s='xxxxxxxx') %}{% for i in range(60) %}{% set ns.s = '%s%s' % (ns.s, ns.s) %}{% endfor %}",
    "{% set ns = namespace(s='xxxxxxxx') %}{% for i in range(60) %}{% set ns.s = '%s%s' | format(ns.s, ns.s) %}{% endfor %}",
    "{% set ns = namespace(s='xxxxxxxx') %}{% for i in range(60) %}{% set ns.s = '{0}{0}'.format(ns.s) %}{% endfor %}",
    "{% set ns = namespace(s='xxxxxxxx') %}{% for i in range(60) %}{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}{% endfor %}",
    "{% macro f(s, n) %}{% if n %}{{ f(s + s, n - 1) }}{% endif %}{% endmacro %}{{ f('xxxxxxxx', 60) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*d' % (1000000000, 1) }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 1000000000) }}",
    "{{ 'x'.center(1000000000) }}",
    "{{ 'x'.ljust(1000000000) }}",
    "{{ 'x'.zfill(1000000000) }}",
    "{{ 'x\n' * 1000 | indent(1000000000) }}",
    "{{ ('x\n' * 100000) | indent('y' * 100000) }}",
    "{{ [[1, 2, 3]] | tojson(indent=1000000000) }}",
    "{% for i in range(100000) %}" + "x" * 100_000 + "{% endfor %}",
    "{% for i in range(100000) %}{% for j in range(1000) %}" + "x" * 1000 + "{% endfor %}{% endfor %}",
    "{% macro f() %}" + "x" * 100_000 + "{% endmacro %}{% for i in range(100000) %}{% set x = f() %}{% endfor %}",
    "{{ range(100000) | list | tojson * 1000 }}",
    "{{ strftime_now('%1000000000d') }}",
)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tighter limits, so that what they stop is stopped soon on a busy machine; the mechanism is the same."""
    defaults = template_limits.Budget.__init__.__defaults__
    assert defaults == (template_limits.MAX_STEPS, template_limits.MAX_SECONDS)
    monkeypatch.setattr(template_limits.Budget.__init__, "__defaults__", (100_000, 0.5))


@pytest.mark.parametrize("source", [*ENDLESS, *GROWING])
def test_se03_endless_and_growing_templates_are_cut(quick: None, source: str) -> None:
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.thread_time()
    with pytest.raises(TemplateError):
        render(source)
    assert time.thread_time() - start < 3
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 300_000  # KiB


def test_se03_a_namespace_that_holds_itself_has_no_text_of_its_own() -> None:
    source = "{% set ns = namespace() %}{% set ns.a = [ns] %}"
    with pytest.raises(TemplateStopped):
        render(source + "{{ ns }}")
    with pytest.raises(TemplateStopped):
        render(source + "{{ ns.a | string }}")


def test_se03_time_is_bounded_even_where_steps_are_slow(quick: None) -> None:
    template = BoundedTemplate("{% for i in range(99999) %}{{ messages | tojson | length }}{% endfor %}", {}, "test")
    start = time.thread_time()
    with pytest.raises(TemplateStopped):
        template.render({"messages": [{"content": ["x"] * 50_000}]})
    assert time.thread_time() - start < 3


def test_se03_a_stopped_template_leaves_other_threads_alone(quick: None) -> None:
    template = BoundedTemplate(ENDLESS[1], {}, "test")
    beats, done = [], threading.Event()

    def run() -> None:
        with pytest.raises(TemplateStopped):
            template.render({"messages": []})
        done.set()

    thread = threading.Thread(target=run)
    thread.start()
    while not done.wait(0.01):
        beats.append(time.perf_counter())
    thread.join()
    assert len(beats) > 1
    assert render(CHATML) == "<|im_start|>user\nhi<|im_end|>\n"


@pytest.mark.parametrize("source", [ENDLESS[1], GROWING[0], "{{ ''.__class__.__mro__ }}", "{{ ''.encode() }}"])
@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_se03_a_model_with_a_hostile_template_does_not_start(quick: None, tmp_path: Path, source: str, kind: str) -> None:
    if kind == "folder":
        path = byte_folder(tmp_path, tokenizer_config={"chat_template": source})
    else:
        path = tokenizer_gguf(tmp_path / "x.gguf", byte_metadata(chat_template=source))
    with pytest.raises(ModelFileError, match="was stopped") as caught:
        load_tokenizer(path, None)
    assert "\n" not in str(caught.value)


def test_se03_a_template_that_turns_hostile_on_a_keyword_costs_one_request(quick: None, tmp_path: Path) -> None:
    source = "{% if 'boom' in messages[0].content %}" + ENDLESS[1] + "{% endif %}" + CHATML
    template = ChatTemplate(load_tokenizer(byte_folder(tmp_path, tokenizer_config={"chat_template": source}), None))
    with pytest.raises(TemplateStopped) as caught:
        template.encode_chat([{"role": "user", "content": "boom"}])
    assert caught.value.param == "messages"
    assert template.encode_chat([HI])


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ 'a' * 3 }}{{ 'a' ~ 1 ~ none ~ 2.5 }}{{ [1, 'x', {'a': true}] }}", "aaaa1None2.5[1, 'x', {'a': True}]"),
        ("{{ '%s-%02d' % ('a', 7) }}{{ '%s' | format('z') }}{{ '{}:{:>3}'.format('a', 5) }}", "a-07za:  5"),
        ("{{ ' x '.strip().upper().join(['a', 'b']) }}{{ 'a-b'.split('-')[1] }}", "aXbb"),
        ("{{ [3, 1, 2] | sort | join(',') }}{{ [1, 2] | sum }}{{ 'a b' | title | replace(' ', '_') }}", "1,2,33A_B"),
        ("{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join }}", "hi"),
        (
            "{{ {'b': 1, 'a': [none, 'é<']} | tojson }}|{{ {'a': 1} | tojson(indent=2) }}",
            '{"b": 1, "a": [null, "é<"]}|{\n  "a": 1\n}',
        ),
        ("{{ 'a\nb' | indent(2) }}|{{ 'a\nb\n\nc' | indent(2, true) }}", "a\n  b|  a\n  b\n\n  c"),
        ("{{ missing }}{{ missing | default('d') }}{{ [missing] | join('-') }}{{ missing | trim }}", "d"),
        (
            "{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}{% for a, b in [(1, 2)] %}{{ a + b }}{% endfor %}",
            "a13",
        ),
        (
            "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}{% if i > 3 %}{% break %}{% endif %}{{ i }}{% endfor %}",
            "013",
        ),
        ("{% macro m(a, b=2) %}{{ a }}{{ b }}{{ caller() }}{% endmacro %}{% call m(1) %}c{% endcall %}", "12c"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "1"),
        ("{% filter upper %}a{% endfilter %}{% set x %}b{% endset %}{{ x }}{{ 'é' | e }}{{ '<' | safe }}", "Abé<"),
        ("{{ 7 // 2 }}{{ 7 % 4 }}{{ 2 ** 10 }}{{ -1 }}{{ 1 / 4 }}{{ true }}", "3310241-10.25True".replace("10241", "1024")),
        ("{%- generation -%}g{%- endgeneration -%}{% for c in 'ab' %}{{ loop.index }}{{ c }}{% endfor %}", "g1a2b"),
        ("{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{% set j = joiner(',') %}{{ j() }}{{ j() }}", "ab,"),
        ("{{ messages[0].content[::-1] }}{{ messages[-1]['role'][:2] }}{{ messages[0].get('x', 'd') }}", "ihusd"),
    ],
)
def test_ordinary_constructs_work(source: str, text: str) -> None:
    assert render(source) == text


def test_long_chats_fit_the_limits() -> None:
    chat = [{"role": "user", "content": "x" * 1000}] * 2000
    assert len(BoundedTemplate(CHATML, {}, "test").render({"messages": chat})) > 2_000_000


def test_an_enormous_template_is_refused() -> None:
    with pytest.raises(ModelFileError, match="characters"):
        BoundedTemplate("x" * 2_000_000, {}, "test")
