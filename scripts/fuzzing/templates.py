"""Chat templates, which are a stranger's programs: endless, huge, recursive, curious about Python."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fuzzing.cases import ACCEPTED, Fault, Surface
from fuzzing.small_folder import LENGTH, overlay, write_model
from hypothesis import strategies as st

from et_jax.text import load_tokenizer

_MARK = "ESCAPED"  # a file that no template can make
_VALUES = (
    *("messages", "messages[0]", "messages[0]['content']", "bos_token", "eos_token", "nothing", "none", "true", "''"),
    *("1", "-1", "0", "1.5", "10**9", "'a'", "'\\ud800'", "'é'", "[]", "{}", "range", "range(9)", "namespace(a=1)"),
    *("messages[9]", "messages[0].content", "messages.append", "raise_exception", "strftime_now", "loop", "self"),
    *("cycler", "joiner()", "lipsum", "caller", "tools", "documents", "add_generation_prompt", "10**5000"),
)
_PLAIN = ("messages[0]['content']", "messages|length", "bos_token", "'a'", "1", "messages[0].role", "range(3)|list")
_HUGE = (
    *("range(10**9)", "range(99999)|list", "'a' * 10**10", "'a' * 10**8", "[0] * 10**9", "10 ** 10 ** 8", "9**9**9"),
    *(
        "'%01000000000d' % 1",
        "'{:>1000000000}'.format(1)",
        "'a'.rjust(10**10)",
        "'a'.center(10**9)",
        "'a'|center(10**9)",
    ),
    *("'a' * 10**7 * 100", "('a' * 10**6).replace('a', 'b' * 10**5)", "lipsum(10**6)", "'a'.zfill(10**10)"),
    *(
        "messages * 10**8",
        "range(10**6)|map('string')|join",
        "'x'|indent(10**10)",
        "1|round(10**9)",
        "'ab'|batch(0)|list",
    ),
    *(
        "(messages|tojson(indent=10**9))",
        "'%s' % ('a' * 10**9)",
        "dict(a='b' * 10**9)",
        "'a'.join(['b' * 10**5] * 10**5)",
    ),
)
_CURIOUS = (
    *("''.__class__", "''.__class__.__mro__[1].__subclasses__()", "messages.__class__", "().__class__.__base__"),
    *(
        "cycler.__init__.__globals__.os",
        "lipsum.__globals__['os'].popen('touch MARK').read()",
        "self._TemplateReference__context",
    ),
    *("namespace.__init__.__globals__['__builtins__']", "raise_exception.__globals__", "raise_exception.__code__"),
    *(
        "strftime_now.__globals__['__builtins__']['open']('MARK', 'w')",
        "'{0.__class__}'.format(1)",
        "'{0.__init__.__globals__}'.format(joiner)",
    ),
    *(
        "''|attr('__class__')",
        "messages|map(attribute='__class__')|list",
        "('%s' % ''.__class__)",
        "'{a.__class__}'.format_map({'a': 1})",
    ),
    *(
        "get_flashed_messages.__globals__",
        "messages[0].update({'role': 'x'})",
        "messages.append(1)",
        "messages.clear()",
        "messages.sort()",
    ),
    *(
        "strftime_now('%999999999d')",
        "strftime_now('\\ud800')",
        "strftime_now('')",
        "strftime_now(1)",
        "strftime_now()",
    ),
)
_FILTERS = (
    *("", "", "", "|trim", "|length", "|tojson", "|upper", "|list", "|first", "|last", "|join", "|string", "|int"),
    *(
        "|tojson(indent=4)",
        "|selectattr('role')",
        "|sort",
        "|unique",
        "|reverse",
        "|dictsort",
        "|safe",
        "|e",
        "|nofilter",
    ),
    *(
        "|map('upper')",
        "|replace('a', 'b')",
        "|format",
        "|batch(2)",
        "|slice(3)",
        "|sum",
        "|wordwrap(0)",
        "|truncate(1)",
    ),
)
_USUAL = (
    "{% for m in messages %}{{ m['role'] }}: {{ BODY }}\n{% endfor %}REST",
    "{% for m in messages if m.role == 'user' %}{{ loop.index }}{{ m.content | trim }}{% else %}-{% endfor %}REST",
    "{%- if messages[0]['role'] == 'system' -%}{% set system = messages[0].content %}{%- endif %}REST",
    "{% if BODY is defined and BODY is string %}{{ BODY }}{% endif %}REST",
    "{% set n = namespace(seen=false) %}{% for m in messages %}{% set n.seen = true %}{% endfor %}{{ n.seen }}REST",
    "{% macro say(m) %}<{{ m.content }}>{% endmacro %}{{ say(messages[0]) }}REST",
    "{{ strftime_now('%Y') }}{{ messages | tojson }}{{ bos_token }}REST",
    "{% if add_generation_prompt %}assistant: {% endif %}REST",
)
_HOSTILE = (
    "{% for i in BODY %}REST{% endfor %}",
    "{% for m in messages %}{{ BODY }}REST{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{{ BODY }}{% endfor %}{% endfor %}REST",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}REST",
    "{% for i in messages recursive %}{{ loop(messages) }}{% endfor %}REST",
    "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(BODY) }}REST",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}REST",
    "{% set a = BODY %}{{ a }}REST",
    "{% set n = namespace(s='a') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}{{ n.s }}REST",
    "{% set n = namespace(l=[]) %}{% for i in range(9000) %}{% set n.l = [n.l] %}{% endfor %}{{ n.l }}REST",
    "{% set n = namespace(a=1) %}{% set n.me = n %}{{ n.me.me }}REST",
    "{% if BODY %}REST{% else %}x{% endif %}",
    "{% while true %}REST{% endwhile %}",
    "{% generation %}{{ BODY }}{% endgeneration %}REST",
    "{% call(x) BODY %}REST{% endcall %}",
    "{% filter upper %}{{ BODY }}REST{% endfilter %}",
    "{% include BODY %}REST",
    "{% import 'os' as os %}REST",
    "{% extends BODY %}REST",
    "{% block a %}{{ self.a() }}{% endblock %}REST",
    "{% raw %}{{ BODY }}{% endraw %}REST",
    "{{ raise_exception(BODY) }}REST",
    "{{ BODY(BODY) }}REST",
    "{{ BODY ~ BODY }}REST",
    "{{ BODY[BODY] }}REST",
    "{{ BODY + BODY }}REST",
    "{# REST",
    "{{ REST",
    "{% break %}REST",
    "a\ud800REST",
    "a\0b\u2028REST",
    "{{ '(' }}" + "(" * 3000 + "REST",
    "{{ " + "-" * 5000 + "1 }}REST",
    "{{ " + "[" * 200 + "]" * 200 + " }}REST",
    "{% if 1 %}" * 90 + "{% endif %}" * 90 + "REST",
    "{{ 'a' if " * 60 + "REST",
)
_ROLES = ("user", "assistant", "tool", "", "a\nb", "x" * 500, "{{ 1 }}")
_CONTENTS = ("Hello", "", "{{ 7 * 7 }}", "<|endoftext|>", "x" * 20_000, "\0", "🙂", "' or 1")
_PLACES = ("jinja", "jinja", "jinja", "setting", "setting", "list", "named", "number")
_SHOWN = ("<module", "site-packages", "__builtins__", "subprocess", "<frame", "<code object")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A template, where it stands, and the conversation it is given."""

    template: str
    place: str
    messages: tuple[tuple[str, str], ...]


def _filled(tags: list[str], bodies: list[str]) -> str:
    """Nest tags into one another, each with a body of its own."""
    text = ""
    for tag, body in zip(tags, bodies, strict=False):
        text = tag.replace("REST", text).replace("BODY", body)
    return text


_EXPRESSIONS = st.builds(
    lambda value, applied: f"{value}{applied}",
    st.sampled_from((_PLAIN, _VALUES, _VALUES, _HUGE, _CURIOUS)).flatmap(st.sampled_from),
    st.sampled_from(_FILTERS),
)
TEMPLATES = st.builds(
    _filled,
    st.lists(st.sampled_from((_USUAL, _USUAL, _HOSTILE)).flatmap(st.sampled_from), min_size=1, max_size=3),
    st.lists(_EXPRESSIONS, min_size=3, max_size=3),
)


def prepare(folder: Path) -> Callable[[Case], str]:
    """Write a model folder, and return what runs a case."""
    base = write_model(folder / "base")
    settings = json.loads((base / "tokenizer_config.json").read_text())

    def run(case: Case) -> str:
        template = case.template.replace("MARK", str(folder / _MARK))
        changed = overlay(folder / "changed", base, _files(template, case.place, settings))
        messages: list[dict[str, Any]] = [{"role": role, "content": content} for role, content in case.messages]
        before = json.dumps(messages)
        tokenizer = load_tokenizer(changed)
        try:
            text = tokenizer.render(messages)
            tokenizer.chat(messages)[:LENGTH]
            text.encode()
        finally:
            if (folder / _MARK).exists() or json.dumps(messages) != before:
                (folder / _MARK).unlink(missing_ok=True)
                raise Fault("escape", f"the template changed what is outside: {case.template}")
        inside = [shown for shown in _SHOWN if shown in text]
        if inside:
            raise Fault("escape", f"the text shows {inside[0]}: {text[:200]}")
        return ACCEPTED

    return run


def _files(template: str, place: str, settings: dict[str, Any]) -> dict[str, bytes | None]:
    named = [{"name": "default", "template": template}, {"name": "tools", "template": "x"}]
    values: dict[str, Any] = {
        "setting": template,
        "list": named,
        "named": {"default": template},
        "number": [template, 7],
    }
    if place == "jinja":
        return {"chat_template.jinja": template.encode("utf-8", "surrogatepass")}
    return {"tokenizer_config.json": json.dumps(settings | {"chat_template": values[place]}).encode()}


SURFACE = Surface(
    cases=st.builds(
        Case,
        template=TEMPLATES,
        place=st.sampled_from(_PLACES),
        messages=st.lists(st.tuples(st.sampled_from(_ROLES), st.sampled_from(_CONTENTS)), min_size=1, max_size=3).map(
            tuple
        ),
    ),
    prepare=prepare,
)
