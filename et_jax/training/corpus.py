"""From text to token files: the split by work, the tokenizer, the cached tokens, the order of the windows."""

import dataclasses
import hashlib
import json
import lzma
import tarfile
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Int32, Int64, UInt16
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from et_jax.errors import UsageError

END_OF_TEXT = "<|endoftext|>"
END_ID = 0  # begins and ends every work; fixed, since special tokens are numbered first
HELD_OUT_SHARE = 0.025  # of the works
WINDOW = 2048  # tokens: the longest row, and the unit in which the corpus is shuffled


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows of input tokens, the token that follows each, and which of those count."""

    inputs: Int32[np.ndarray, "b t"]
    targets: Int32[np.ndarray, "b t"]
    target_mask: Bool[np.ndarray, "b t"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokens:
    """The tokens of one side of the split, works end to end, each closed by END_ID.

    `starts` has the first index of every work and, last, the number of tokens; `num_bytes` the UTF-8
    bytes of their text.
    """

    ids: UInt16[np.ndarray, " n"]
    starts: tuple[int, ...]
    num_bytes: int


def read_works(path: Path) -> dict[str, str]:
    """Return the text of every `.txt` member of a tar archive, by file name."""
    try:
        with tarfile.open(path) as archive:
            members = sorted((m for m in archive if m.isfile() and m.name.endswith(".txt")), key=lambda m: m.name)
            works = {Path(m.name).name: archive.extractfile(m).read().decode("utf-8") for m in members}  # type: ignore[union-attr]
    except (OSError, EOFError, zlib.error, tarfile.TarError, lzma.LZMAError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise UsageError(
            f"The corpus {path} cannot be read ({why}); give a tar archive of UTF-8 .txt files."
        ) from error
    if len(works) < 2:
        raise UsageError(f"The corpus {path} holds {len(works)} .txt files; at least two are needed to hold one out.")
    return works


def split(names: Iterable[str], share: float = HELD_OUT_SHARE) -> tuple[list[str], list[str]]:
    """Return the names of the training works and of the held-out works, each sorted.

    The works with the smallest SHA-256 of their names are held out: a rule independent of the texts, which stays valid
    when works are added.
    """
    ranked = sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())
    count = max(1, round(share * len(ranked)))
    return sorted(ranked[count:]), sorted(ranked[:count])


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Return a byte-level BPE of `vocab_size` tokens that puts END_OF_TEXT before every text it encodes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
        single=f"{END_OF_TEXT} $A", pair=f"{END_OF_TEXT} $A $B", special_tokens=[(END_OF_TEXT, END_ID)]
    )
    return tokenizer


def read_tokenizer(folder: Path) -> Tokenizer:
    """Return the tokenizer of a model's folder."""
    try:
        return Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises nothing narrower
        raise UsageError(f"{folder} has no readable tokenizer.json ({error}); name a model that has one.") from error


def encode(tokenizer: Tokenizer, texts: Sequence[str]) -> Tokens:
    """Return the tokens of the works `texts`, in order."""
    parts, starts = [], [0]
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        parts.append(np.array([*ids, END_ID], np.uint16))
        starts.append(starts[-1] + len(parts[-1]))
    num_bytes = sum(len(text.encode()) for text in texts)
    return Tokens(ids=np.concatenate(parts), starts=tuple(starts), num_bytes=num_bytes)


def prepare(
    corpus: Path, folder: Path, vocab_size: int, tokenizer: Tokenizer | None = None
) -> tuple[Tokenizer, Tokens, Tokens]:
    """Return the tokenizer, the training tokens and the held-out tokens, created once and stored in `folder`.

    Without a `tokenizer` one of `vocab_size` tokens is trained on the training works.
    """
    tokenizer_file = folder / "tokenizer.json"
    if not tokenizer_file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        works = read_works(corpus)
        sides = dict(zip(("train", "held_out"), split(works), strict=True))
        tokenizer = tokenizer or train_tokenizer((works[name] for name in sides["train"]), vocab_size)
        for side, names in sides.items():
            _save(encode(tokenizer, [works[name] for name in names]), names, folder / side)
        tokenizer.save(str(tokenizer_file))  # last: its presence means that all files are complete
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    if tokenizer.get_vocab_size() != vocab_size:
        raise UsageError(
            f"{folder} was made with {tokenizer.get_vocab_size()} tokens, not {vocab_size}; remove it or name another."
        )
    return tokenizer, _load(folder / "train"), _load(folder / "held_out")


def _save(tokens: Tokens, names: Sequence[str], path: Path) -> None:
    np.save(path.with_suffix(".npy"), tokens.ids)
    facts = {"works": list(names), "starts": tokens.starts, "num_bytes": tokens.num_bytes}
    path.with_suffix(".json").write_text(json.dumps(facts, indent=1))


def _load(path: Path) -> Tokens:
    facts = json.loads(path.with_suffix(".json").read_text())
    ids = np.load(path.with_suffix(".npy"), mmap_mode="r")
    return Tokens(ids=ids, starts=tuple(facts["starts"]), num_bytes=facts["num_bytes"])


def window_starts(tokens: Tokens, seed: int, epoch: int, window: int = WINDOW) -> Int64[np.ndarray, " n"]:
    """Return the first index of every window of one epoch, shuffled; no window crosses a work's border.

    Each work is cut at a random phase, so that epochs cut it differently.
    """
    random = np.random.default_rng((seed, epoch))
    starts = []
    for begin, end in zip(tokens.starts, tokens.starts[1:], strict=False):
        spare = (end - begin) % window if end - begin >= window else 0
        starts.append(np.arange(begin + random.integers(spare + 1), end - window + 1, window))
    return random.permutation(np.concatenate(starts))


def training_rows(tokens: Tokens, seed: int, step: int, num_windows: int, length: int, window: int = WINDOW) -> Rows:
    """Return the rows of training step `step`: `num_windows` windows, each cut into rows of `length` tokens.

    The windows depend only on `seed` and `step`: a resumed run continues in the same order, and a change
    of `length` changes no window.
    """
    per_epoch = len(window_starts(tokens, seed, 0, window)) // num_windows
    if per_epoch == 0:
        raise UsageError(f"The corpus has fewer than {num_windows} windows of {window} tokens; give more text.")
    epoch, index = divmod(step, per_epoch)
    starts = window_starts(tokens, seed, epoch, window)[index * num_windows : (index + 1) * num_windows]
    targets = tokens.ids[starts[:, None] + np.arange(window)].reshape(-1, length)
    return _rows(targets, np.ones_like(targets, bool))


def held_out_rows(tokens: Tokens, length: int) -> Rows:
    """Return every token once, each work cut from its first token on into rows of `length`, the last one padded."""
    works = [tokens.ids[begin:end] for begin, end in zip(tokens.starts, tokens.starts[1:], strict=False)]
    padded = [np.pad(work, (0, -len(work) % length), constant_values=END_ID) for work in works]
    masks = [np.arange(len(rows)) < len(work) for rows, work in zip(padded, works, strict=True)]
    return _rows(np.concatenate(padded).reshape(-1, length), np.concatenate(masks).reshape(-1, length))


def spread(rows: Rows, count: int) -> Rows:
    """Return `count` of the rows, spread evenly from the first to the last."""
    selected = np.linspace(0, len(rows.inputs) - 1, count).astype(int)
    return Rows(inputs=rows.inputs[selected], targets=rows.targets[selected], target_mask=rows.target_mask[selected])


def _rows(targets: np.ndarray, mask: np.ndarray) -> Rows:
    """Return rows that begin with END_ID, like a prompt."""
    targets = targets.astype(np.int32)
    inputs = np.pad(targets[:, :-1], ((0, 0), (1, 0)), constant_values=END_ID)
    return Rows(inputs=inputs, targets=targets, target_mask=mask)
