"""Chat templates, which are programs of strangers: endless, huge, recursive, or reaching into Python."""

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from et_jax.text import load_tokenizer
from scripts.fuzzing.edits import listed
from scripts.fuzzing.small_folder import LENGTH, overlay, write_model
from scripts.fuzzing.watch import ACCEPTED, Fault

_MARK = "ESCAPED"  # a file that no template can make
_PLAIN = listed("messages[0]['content']  messages|length  bos_token  'a'  1  messages[0].role  range(3)|list")
_VALUES = listed(r"""
    messages  messages[0]  eos_token  nothing  none  true  ''  -1  0  1.5  10**9  'é'  '\ud800'  []  {}  range
    range(9)  namespace(a=1)  messages[9]  messages[0].content  messages.append  raise_exception  strftime_now  loop
    self  cycler  joiner()  lipsum  caller  tools  documents  add_generation_prompt  10**5000
""")
_HUGE = listed(r"""
    range(10**9)  range(99999)|list  'a' * 10**10  'a' * 10**8  [0] * 10**9  10 ** 10 ** 8  9**9**9  messages * 10**8
    '%01000000000d' % 1  '{:>1000000000}'.format(1)  'a'.rjust(10**10)  'a'.center(10**9)  'a'|center(10**9)
    'a' * 10**7 * 100  ('a' * 10**6).replace('a', 'b' * 10**5)  lipsum(10**6)  'a'.zfill(10**10)  1|round(10**9)
    range(10**6)|map('string')|join  'x'|indent(10**10)  'ab'|batch(0)|list  (messages|tojson(indent=10**9))
    '%s' % ('a' * 10**9)  dict(a='b' * 10**9)  'a'.join(['b' * 10**5] * 10**5)
""")
_CURIOUS = listed(r"""
    ''.__class__  ''.__class__.__mro__[1].__subclasses__()  messages.__class__  cycler.__init__.__globals__.os
    lipsum.__globals__['os'].popen('touch MARK').read()  self._TemplateReference__context  raise_exception.__code__
    namespace.__init__.__globals__['__builtins__']  raise_exception.__globals__  '{0.__class__}'.format(1)
    strftime_now.__globals__['__builtins__']['open']('MARK', 'w')  '{0.__init__.__globals__}'.format(joiner)
    ''|attr('__class__')  messages|map(attribute='__class__')|list  ('%s' % ''.__class__)
    '{a.__class__}'.format_map({'a': 1})  messages[0].update({'role': 'x'})  messages.append(1)  messages.clear()
    messages.sort()  strftime_now('%999999999d')  strftime_now('\ud800')  strftime_now('')  strftime_now(1)
    strftime_now()
""")
_FILTERS = listed(r"""
    |trim  |length  |tojson  |upper  |list  |first  |last  |join  |string  |int  |tojson(indent=4)  |selectattr('role')
    |sort  |unique  |reverse  |dictsort  |safe  |e  |nofilter  |map('upper')  |replace('a','b')  |format  |batch(2)
    |slice(3)  |sum  |wordwrap(0)  |truncate(1)
""")
_USUAL = listed(r"""
    {% for m in messages %}{{ m['role'] }}: {{ BODY }}{% endfor %}REST
    {% for m in messages if m.role == 'user' %}{{ loop.index }}{{ m.content | trim }}{% else %}-{% endfor %}REST
    {%- if messages[0]['role'] == 'system' -%}{% set system = messages[0].content %}{%- endif %}REST
    {% if BODY is defined and BODY is string %}{{ BODY }}{% endif %}REST
    {% set n = namespace(seen=false) %}{% for m in messages %}{% set n.seen = true %}{% endfor %}{{ n.seen }}REST
    {% macro say(m) %}<{{ m.content }}>{% endmacro %}{{ say(messages[0]) }}REST
    {{ strftime_now('%Y') }}{{ messages | tojson }}{{ bos_token }}REST
    {% if add_generation_prompt %}assistant: {% endif %}REST
""")
_HOSTILE = [
    *listed(r"""
    {% for i in BODY %}REST{% endfor %}  {% for m in messages %}{{ BODY }}REST{% endfor %}  {{ BODY(BODY) }}REST
    {% for i in range(99999) %}{% for j in range(99999) %}{{ BODY }}{% endfor %}{% endfor %}REST
    {% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}REST  {{ BODY ~ BODY }}REST
    {% for i in messages recursive %}{{ loop(messages) }}{% endfor %}REST  {{ BODY[BODY] }}REST
    {% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(BODY) }}REST  {% set a = BODY %}{{ a }}REST
    {% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}REST
    {% set n = namespace(s='a') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}{{ n.s }}REST
    {% set n = namespace(l=[]) %}{% for i in range(9000) %}{% set n.l = [n.l] %}{% endfor %}{{ n.l }}REST
    {% set n = namespace(a=1) %}{% set n.me = n %}{{ n.me.me }}REST  {% if BODY %}REST{% else %}x{% endif %}
    {% while true %}REST{% endwhile %}  {% generation %}{{ BODY }}{% endgeneration %}REST  {% include BODY %}REST
    {% call(x) BODY %}REST{% endcall %}  {% filter upper %}{{ BODY }}REST{% endfilter %}  {% extends BODY %}REST
    {% import 'os' as os %}REST  {% block a %}{{ self.a() }}{% endblock %}REST  {% raw %}{{ BODY }}{% endraw %}REST
    {{ raise_exception(BODY) }}REST  {{ BODY + BODY }}REST  {# REST  {{ REST  {% break %}REST
    """),
    *("a\ud800REST", "a\0b\u2028REST", "{{ '(' }}" + "(" * 3000 + "REST", "{{ " + "-" * 5000 + "1 }}REST"),
    *("{{ " + "[" * 200 + "]" * 200 + " }}REST", "{% if 1 %}" * 90 + "{% endif %}" * 90 + "REST"),
    "{{ 'a' if " * 60 + "REST",
]
_ROLES = ("user", "assistant", "tool", "", "a\nb", "x" * 500, "{{ 1 }}")
_CONTENTS = ("Hello", "", "{{ 7 * 7 }}", "<|endoftext|>", "x" * 20_000, "\0", "🙂", "' or 1")
_SHOWN = ("<module", "site-packages", "__builtins__", "subprocess", "<frame", "<code object")


def draw(random: Random) -> dict[str, Any]:
    """Return a case: a template of one to three nested tags, its place in the folder, and a conversation."""
    text = ""
    for _ in range(random.randint(1, 3)):
        tag = random.choice(random.choice((_USUAL, _USUAL, _HOSTILE)))
        body = random.choice(random.choice((_PLAIN, _VALUES, _VALUES, _HUGE, _CURIOUS)))
        text = tag.replace("REST", text).replace("BODY", body + random.choice(("", *_FILTERS)))
    pairs = [(random.choice(_ROLES), random.choice(_CONTENTS)) for _ in range(random.randint(1, 3))]
    place = random.choice(("jinja", "jinja", "jinja", "setting", "setting", "list", "named", "number"))
    return {"text": text, "place": place, "messages": pairs}


def prepare(folder: Path) -> Callable[..., str]:
    """Write a model folder, and return the function that runs a case."""
    base = write_model(folder / "base")
    settings = json.loads((base / "tokenizer_config.json").read_text())

    def run(text: str, place: str, messages: list[tuple[str, str]]) -> str:
        files = _files(text.replace("MARK", str(folder / _MARK)), place, settings)
        changed = overlay(folder / "changed", base, files)
        given = [{"role": role, "content": content} for role, content in messages]
        before = json.dumps(given)
        tokenizer = load_tokenizer(changed)
        try:
            rendered = tokenizer.render(given)
            tokenizer.chat(given)[:LENGTH]
            rendered.encode()
        finally:
            if (folder / _MARK).exists() or json.dumps(given) != before:
                (folder / _MARK).unlink(missing_ok=True)
                raise Fault("escape", f"the template changed what is outside: {text}")
        if shown := [each for each in _SHOWN if each in rendered]:
            raise Fault("escape", f"the text shows {shown}: {rendered[:200]}")
        return ACCEPTED

    return run


def _files(text: str, place: str, settings: dict[str, Any]) -> dict[str, bytes | None]:
    if place == "jinja":
        return {"chat_template.jinja": text.encode("utf-8", "surrogatepass")}
    named = [{"name": "default", "template": text}, {"name": "tools", "template": "x"}]
    values = {"setting": text, "list": named, "named": {"default": text}, "number": [text, 7]}
    return {"tokenizer_config.json": json.dumps(settings | {"chat_template": values[place]}).encode()}
