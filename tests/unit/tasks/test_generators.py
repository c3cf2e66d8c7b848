"""Tasks: solved anew from their text, laid out as asked, the same for the same seed, and split without overlap."""

import collections
import hashlib
import re

import pytest

from et_jax.tasks import words
from et_jax.tasks.base import Example, right, sentences
from et_jax.tasks.generators import TASKS, document, example


def count(text: str) -> int:
    """Words, and all that stands between them but spaces, as a tokenizer would count them."""
    return len(re.findall(r"\w+|[^\w\s]", text))


def solve(task: str, prompt: str) -> str:
    """Answer a prompt by reading it, without the generator."""
    if asked := re.search(r"(The word of \w+ is|The passkey is|Line \w+ \w+:|The verse of \w+:)$", prompt):
        [answer] = re.findall(rf"{asked[0]}( [\w ]+)\.", prompt)
        return answer  # which stands behind the words of the question
    if task == "multi_needle":
        [name] = re.findall(r"The first word of (\w+) is$", prompt)
        first, second, third = (
            re.findall(rf"The {n} word of {name} is (\w+)\.", prompt)[0] for n in ("first", "second", "third")
        )
        return f" {first}. The second word of {name} is {second}. The third word of {name} is {third}"
    if task == "tracing":
        after, held = (dict(re.findall(rf"(\w+) {said} (\w+)\.", prompt)) for said in ("follows", "holds"))
        name = re.findall(r"(\w+) follows$", prompt)[0]
        one, two = after[name], after[after[name]]
        return f" {one}. {one} follows {two}. {two} holds {held[two]}"
    [listed] = re.findall(r"List: ([\w ]+)\.", prompt)
    (word, most), (_, next_most) = collections.Counter(listed.split()).most_common(2)
    assert task == "counting" and most == 2 * next_most
    return f" {word}"


@pytest.mark.parametrize("task", TASKS)
def test_a_reader_finds_every_answer_in_a_text_of_the_length_asked_for(task):
    answers = set()
    for seed in range(30):
        length = (128, 300, 1000)[seed % 3]
        asked = dict(count=count, depth=seed / 29, seed=seed)
        found = example(task, length=length, **asked)
        assert solve(task, found.prompt) == found.answer
        assert right(found, found.answer + ". The") and not right(found, found.answer + "s")
        assert found.length == 1 + count(found.prompt + found.answer)
        assert length - 30 < found.length <= length and example(task, length=length, **asked) == found
        answers.add(found.answer)
        made = document(task, length=400, split="train", num_turns=6, num_pairs=5, **asked)
        for turn in made.turns:
            assert solve(task, made.context + turn.question) == turn.answer
        assert 1 + count(made.context + "".join(f"{turn.question}{turn.answer}." for turn in made.turns)) <= 400
    assert len(answers) > 20


@pytest.mark.parametrize("length", range(100, 107))
def test_a_list_fits_though_it_has_more_tokens_than_its_pieces(length):
    def joined(text: str) -> int:
        return count(text) + 2 * (" List: " in text)

    found = document("counting", count=joined, length=length, depth=0.0, seed=0)
    assert joined(found.context) + joined(f"{found.turns[0].question}{found.turns[0].answer}.") < length


@pytest.mark.parametrize("task", [task for task in TASKS if task != "counting"])
@pytest.mark.parametrize("depth", [0.0, 0.25, 1.0])
def test_the_answer_sits_at_its_depth(task, depth):
    made = document(task, count=count, length=1000, depth=depth, seed=3)
    context, [turn] = made.context, made.turns
    word = turn.answer.split()[-1 if task == "tracing" else 0].strip(".")
    others = {"tracing": f" holds {word}.", "copying": f"{turn.question} {word} "}
    statement = others.get(task, f"{turn.question} {word}.")
    place = count(context[: context.index(statement)]) / count(context)
    assert place == pytest.approx(depth, abs=0.08)  # a sentence, and the statements of the other keys
    assert turn.depth == pytest.approx(depth, abs=0.01)


def test_needles_are_hidden_in_the_sentences_given():
    hay = sentences("It was late.  The fire was low!\nWho could tell? “No one.” He sat down.")
    assert hay == [" It was late.", " The fire was low!", " Who could tell?", " “No one.” He sat down."]
    found = example("passkey", count=count, length=200, depth=0.5, seed=0, haystack=hay * 20)
    rest = re.sub(r" The passkey is \d+\.", "", found.prompt).removesuffix(" The passkey is")
    pieces = sentences(rest)
    start = hay.index(pieces[0])
    assert pieces == (hay * 50)[start : start + len(pieces)]


def test_the_splits_share_no_word_no_key_and_no_passage():
    train, test = words.vocabulary("train"), words.vocabulary("test")
    assert not {*train.names, *train.words} & {*test.names, *test.words}
    assert len(test.names) >= 20

    def hashes(split, seeds):
        return {
            hashlib.sha256(item.encode()).digest()
            for task in TASKS
            for seed in seeds
            for item in document(task, count=count, length=200, depth=0.5, seed=seed, split=split, num_pairs=3).items
        }

    trained, tested = hashes("train", range(50)), hashes("test", range(50))
    assert len(trained) > 500 and len(tested) > 500 and not trained & tested


@pytest.mark.parametrize(
    ("match", "answer", "text", "wanted"),
    [
        ("number", "1450", "So 3 of them make $1,450.\n", True),
        ("number", "1450", "So 1450 less 1 is 1449.", False),
        ("number", "3", "none", False),
        ("contains", "The Sea", "It was the sea, I think", True),
        ("contains", "sea", "It was", False),
    ],
)
def test_numbers_and_contained_answers_are_matched_as_they_say(match, answer, text, wanted):
    made = Example(task="t", prompt="p", answer=answer, depth=0.0, length=1, match=match)
    assert right(made, text) == wanted
