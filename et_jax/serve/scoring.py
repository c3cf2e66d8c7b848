"""The log-probability and the entropy of every token of given texts, without generation."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np
from jaxtyping import Bool, Float

from et_jax.control.controller import Controller
from et_jax.decode.config import DecoderConfig
from et_jax.decode.decoder import Decoder
from et_jax.decode.plant import Weights
from et_jax.errors import UsageError
from et_jax.serve.chunks import next_call, pack
from et_jax.serve.prompts import prompt_ids
from et_jax.text import Tokenizer

_SLOTS = 8  # texts side by side
_TOKENS = 128  # per call; their logits are in memory at once
_PREFIX = 0  # the slot of the common prefix


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score:
    """The log-probabilities and entropies of a text. Arrays have one value for each token of `token_ids`.

    `log_probs` (nats) are of each token given those before it. `entropy` (nats) and `varentropy` (nats^2) are those of
    the raw distribution that predicted it. `greedy` is True for tokens that are the most probable ones. A first token
    without a predecessor has NaN and is not greedy. `num_bytes` is the length of the text.
    """

    token_ids: tuple[int, ...]
    num_bytes: int
    log_probs: Float[np.ndarray, " t"]
    entropy: Float[np.ndarray, " t"]
    varentropy: Float[np.ndarray, " t"]
    greedy: Bool[np.ndarray, " t"]

    @property
    def num_scored(self) -> int:
        """The number of tokens with a predecessor."""
        return int((~np.isnan(self.log_probs)).sum())

    @property
    def log_prob(self) -> float:
        """The log-probability of all tokens with a predecessor, in nats."""
        return float(np.nansum(self.log_probs))

    @property
    def perplexity(self) -> float:
        """The exponential of the mean negative log-probability; NaN if no token is scored."""
        return float(np.exp(-self.log_prob / self.num_scored)) if self.num_scored else math.nan

    @property
    def bits_per_byte(self) -> float:
        """The negative log-probability in bits, over the bytes of the text; NaN if it is empty."""
        return -self.log_prob / math.log(2) / self.num_bytes if self.num_bytes else math.nan


@dataclasses.dataclass
class _Row:
    """A text in progress: `ids` include the token before its first scored one; `done` of them were read."""

    index: int
    ids: list[int]
    done: int = 0


def scoring_config(config: DecoderConfig, longest: int, prefix: int) -> DecoderConfig:
    """Return the decoder that scores texts of at most `longest` tokens after a prefix: dense, without drafts.

    Its pool has pages for the prefix once, a text of that length, and the tokens of a call, because texts are read in
    sequence. The number of pages is rounded up, so that few programs are compiled.
    """
    needed = prefix + longest + _TOKENS + config.page_size * (_SLOTS + 1)
    rounded = 1 << (-(-needed // config.page_size)).bit_length()
    batch = max(config.chunk, _TOKENS // config.chunk * config.chunk)
    plain = {"draft": None, "others": (), "lazy": False, "audit": False, "compression": None, "penalties": False}
    sizes = {"num_slots": _SLOTS, "batch": _SLOTS, "num_pages": rounded, "prefill_batch": batch}
    return dataclasses.replace(config, controller=Controller(), keep=frozenset(), trace_reads=False, **plain, **sizes)


def scored(
    texts: Sequence[str | tuple[int, ...]],
    prefix: str | tuple[int, ...],
    *,
    tokenizer: Tokenizer,
    config: DecoderConfig,
    name: str,
    weights: Weights,
    compiled: Callable[[DecoderConfig], Decoder],
) -> list[Score]:
    """Return the scores of texts, given as texts or token ids, in order. All follow `prefix`, which is read once.

    `config` is that of model `name`; `compiled` returns the decoder of a configuration. Raises UsageError for a text
    that is empty or, with the prefix, too long for the model.
    """
    before = prompt_ids(prefix, tokenizer, config, name) if prefix else []
    every = [prompt_ids(text, tokenizer, config, name, opening=not before) for text in texts]
    longest = max(map(len, every), default=0)
    if len(before) + longest > config.max_length:
        raise UsageError(
            f"A text of {longest} tokens behind {len(before)} does not fit {name}, which reads {config.max_length}; "
            "shorten it, or raise max_model_len if the model allows it."
        )
    if not every:
        return []
    bound = compiled(scoring_config(config, longest, len(before)))
    rows = [_Row(index, [*before[-1:], *ids]) for index, ids in enumerate(every)]
    found = dict(_read(bound, weights, before[:-1], rows))
    sizes = [len((text if isinstance(text, str) else tokenizer.decode(text)).encode()) for text in texts]
    return [_score(ids, size, found[index]) for index, (ids, size) in enumerate(zip(every, sizes, strict=True))]


def _score(ids: list[int], num_bytes: int, columns: Float[np.ndarray, "4 _"]) -> Score:
    """Return the score of a text from its columns; a first token without a predecessor has none."""
    if np.isnan(columns).any():
        raise UsageError("The model's numbers for this text overflow; load it with dtype float32, or fix the weights.")
    unread = len(ids) - columns.shape[1]
    log_probs, entropies, varentropies, likeliest = np.pad(columns, ((0, 0), (unread, 0)), constant_values=np.nan)
    return Score(
        token_ids=tuple(ids),
        num_bytes=num_bytes,
        log_probs=log_probs,
        entropy=entropies,
        varentropy=varentropies,
        greedy=likeliest == np.asarray(ids),
    )


def _read(
    bound: Decoder, weights: Weights, prefix: list[int], waiting: list[_Row]
) -> Iterator[tuple[int, Float[np.ndarray, "4 t"]]]:
    """Yield for every row the scores of all its tokens but the first, with the fields of `TokenScores` as rows."""
    config, state = bound.config, bound.empty()
    for at in range(0, len(prefix), config.prefill_batch):
        part = next_call(config, [(_PREFIX, prefix[at : at + config.prefill_batch])])
        slot, tokens, count, last = pack(config, part)
        state, _ = bound.prefill(weights, state, slot, tokens, count, last)
    free = list(range(1, config.num_slots))
    rows: dict[int, _Row] = {}
    found: dict[int, list[np.ndarray]] = {}

    waiting = sorted(waiting, key=lambda row: len(row.ids))
    while waiting or rows:
        while waiting and free:
            slot = free.pop()
            rows[slot], found[slot] = waiting.pop(), []
            if prefix:
                state, _ = bound.fork(state, _PREFIX, slot)
        chunks = next_call(config, ((slot, row.ids[row.done : -1]) for slot, row in rows.items()))
        taken = dict.fromkeys((slot for slot, _ in chunks), 0)
        following = []
        for slot, chunk in chunks:
            begin = rows[slot].done + taken[slot] + 1
            following.append((slot, rows[slot].ids[begin : begin + len(chunk)]))
            taken[slot] += len(chunk)
        index, tokens, count, last = pack(config, chunks)
        state, scores = bound.score(weights, state, index, tokens, count, last, pack(config, following)[1])
        got = np.stack([np.asarray(each, np.float64) for each in jax.device_get(jax.tree.leaves(scores))])
        for number, (slot, chunk) in enumerate(chunks):
            found[slot].append(got[:, number, : len(chunk)])
        for slot in list(rows):
            row = rows[slot]
            row.done += taken.get(slot, 0)
            if row.done == len(row.ids) - 1:
                yield row.index, np.concatenate([np.zeros((4, 0)), *found.pop(slot)], axis=1)
                state = bound.release(state, slot)
                del rows[slot]
                free.append(slot)
