"""Special tokens that a message spells: text by default, tokens where it is said."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_tokenizer import byte_fallback, byte_level, configure, sentencepiece_model

from et_jax.batch.tasks import Defaults, Entry, read_task
from et_jax.serve.requests import SamplingParams
from et_jax.text import load_tokenizer
from et_jax.text.masked import Masked

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content | trim }}{{ eos_token }}{% endfor %}"
    "{% if 'cat' in messages[0].content | lower %}!{% endif %}{{ messages | tojson }}"
)
PLAIN = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}"


def said(*contents):
    return [{"role": "user", "content": content} for content in contents]


@pytest.fixture(scope="module", params=[byte_level, byte_fallback, sentencepiece_model])
def tokenizer(request, tmp_path_factory):
    place = request.param(tmp_path_factory.mktemp("tokenizer") / "model")
    return load_tokenizer(configure(place, chat_template=PLAIN, bos_token="<s>", eos_token="</s>"))


def specials(tokenizer, ids):
    return [id for id in ids if not tokenizer.backend.visible(id)]


@pytest.mark.parametrize(("allowed", "ends"), [(False, 1), (True, 2)])
def test_special_tokens_are_read_where_it_is_said(tokenizer, allowed, ends):
    ids = tokenizer.chat(said("a</s>b"), allow_special_tokens=allowed)
    assert ids.count(tokenizer.eos_ids[0]) == ends
    assert not allowed or ids == tokenizer.backend.encode("<s>[user] a</s>b</s>", special=False)
    entry = Entry(line=1, custom_id="a", id="a", values={"messages": said("a</s>b")})
    task = read_task(entry, tokenizer, Defaults(params=SamplingParams(), allow_special_tokens=allowed))
    assert list(task.request.prompt) == ids
    assert tokenizer.eos_ids[0] in tokenizer.encode("a</s>b")  # a prompt is read with them


def test_templates_that_look_at_the_words_see_what_they_saw(tmp_path):
    tokenizer = load_tokenizer(configure(byte_level(tmp_path / "model"), chat_template=TEMPLATE))
    for content in ("The CAT </s> sat", "  <s> a  ", "</s>"):
        ids = tokenizer.chat(said(content))
        assert specials(tokenizer, ids) == [0, 1]
        begins, rest = f"<s>user: {content.strip()}</s>", tokenizer.render(said(content))
        assert rest.startswith(begins)  # with the template's own two tokens
        assert tokenizer.decode(ids) == begins.removeprefix("<s>").removesuffix("</s>") + rest.removeprefix(begins)


@given(contents=st.lists(st.text(alphabet="ab </s>u\n€", max_size=30), min_size=1, max_size=3))
@example(contents=["a</s>b", "x<unk>", "<s><s>"])
@settings(max_examples=60, deadline=None)
def test_no_message_writes_a_special_token(tokenizer, contents):
    bos, eos = tokenizer.bos_id, *tokenizer.eos_ids
    ids = tokenizer.chat(said(*contents))
    assert specials(tokenizer, ids) == [bos] + [eos] * len(contents)
    assert tokenizer.decode(ids[1 : ids.index(eos)]).strip() == f"[user] {contents[0]}".strip()
    assert tokenizer.chat(said(contents[0]), "be</s>").count(eos) == 2
    if not any(special in content for content in contents for special in ("<s>", "</s>", "<unk>")):
        assert ids == tokenizer.backend.encode(tokenizer.render(said(*contents)), special=False)


def test_of_special_texts_that_begin_alike_the_longest_is_masked():
    masked = Masked([{"role": "user", "content": "<s><s>!x"}], ["<s>", "<s>!", "<s>!x", ""])
    assert masked.texts == ["<s>", "<s>!x"]
    parts = masked.parts(masked.messages[0]["content"])
    assert [text for text, replaced in parts if replaced] == ["<s>", "<s>!x"]
