"""The words of the tasks, split into training and test words.

Short common words, so that most tokenizers have a token for each. The split is by hash of the
word, so adding words moves none to the other side.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Iterable
from typing import Literal

Split = Literal["train", "test"]
TEST_SHARE = 0.25

_NAMES = """
Mary George Will John Charles Harry Robert Tom Richard Philip Dick Paul Molly Peter Laura Alice Margaret Jane
Edward William Rachel James Ethel Sylvia Anne Helen Rose Julia Pierre Guy Leon Jack Florence Elizabeth Henry
Kate Amy Lucy Ken Anna Emma Clara Ruth Grace Ellen Susan Sarah Martha Edith Agnes Nora Ida Eva Ada Rosa Flora
Stella Vera Irene Louis Oscar Hugo Frank Fred Simon Samuel David Daniel Joseph Jacob Adam Oliver Arthur Albert
Walter Ralph Roger Martin Andrew Stephen Francis Max Victor Felix Owen Hugh Neil Mark Luke Matthew Nathan Aaron
Isaac Caleb Dora Nell Polly Betty Nancy Fanny Bella Cora Olive Violet Lily Iris Hazel Daisy Maud Mabel Hilda Greta
"""
_WORDS = """
head friend love house mind child heart mother door night light voice place work hair money table letter book
field foot stone river garden water paper glass gold ship horse road church street window fire tree moon snow rain
wind rock sand hill wood grass iron silver bread wine dinner supper breakfast kitchen chair room roof floor wall
gate stairs hall tower castle village town city farm cottage prison school court station bank shop mill camp board
boat train carriage wheel sword shot bell book map picture song music dance story tale game ball crown king queen
lord lady captain doctor nurse soldier servant master uncle aunt cousin sister brother daughter husband wife baby
girl woman gentleman squire stranger neighbour enemy lover poet artist parent army battle war peace storm cloud
star earth heaven desert mountain forest island shore lake mist dust smoke shadow dream sleep morning evening
afternoon summer winter spring week month year hour minute moment youth age birth death grave ghost devil angel
spirit soul god faith hope truth honour duty shame pride anger fear joy sorrow grief pain fever wound blood brain
neck cheek breast shoulder arms hand finger lips mouth nose eyes ears teeth face back coat dress cloak hat pocket
ring chain cross flag sign mark line page word name number price gift prize fortune property wealth office trade
business profession study language question answer reason proof secret promise plan advice order law crime judge
victim witness danger escape journey travel passage market crowd company party marriage family kindness beauty
fashion custom habit temper manner charm talent genius wisdom knowledge memory thought idea opinion doubt trust
quarter pair piece pound hundred thousand dozen couple circle square corner edge point step turn end top
white black blue green grey brown yellow golden tall short broad narrow thick thin deep flat sharp blind dumb calm
cool warm cold soft hard heavy light bright dark pale dull fresh sweet bitter clean pure wild tender brave noble
gentle cruel proud vain honest wicked clever foolish stupid curious nervous eager tired sick lame young ancient
"""
VERBS = ("met", "saw", "left", "found", "kept", "took", "held", "lost", "heard", "knew", "passed", "followed")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """The names and words that a task may use as keys and answers, and the words of passages to copy."""

    names: tuple[str, ...]
    words: tuple[str, ...]
    copied: tuple[str, ...]


def belongs(item: str, split: Split) -> bool:
    """Return whether `item` is in that split: its SHA-256, as a fraction of its range, is below TEST_SHARE or not."""
    share = int.from_bytes(hashlib.sha256(item.encode()).digest()[:8], "big") / 2**64
    return (share < TEST_SHARE) == (split == "test")


@functools.cache
def vocabulary(split: Split) -> Vocabulary:
    """Return the names and words of one split; the splits are disjoint."""
    words = side(_WORDS.split(), split)
    return Vocabulary(names=side(_NAMES.split(), split), words=words, copied=words)


def side(items: Iterable[str], split: Split) -> tuple[str, ...]:
    """Return those of `items` that belong to a split, each once, in order."""
    return tuple(item for item in dict.fromkeys(items) if belongs(item, split))
