"""How near are the tokens and the logits of a GGUF file here to those of llama.cpp?

Token ids are compared of lines of the text and of as many lines of letters, digits, signs, Chinese, emoji and control
characters drawn at random. Logits are compared at every position of prompts cut from the text. llama.cpp then continues
each prompt greedily, and the tokens that et_jax would have chosen after the same ones are counted up to the first that
differs. Both read the file as it is stored, for which llama.cpp rounds activations to 8 bits, and a copy of it decoded
to float32, with a cache in float32. et_jax computes in float32 throughout. ggml's GELU is a table of float16
(`GGML_GELU_FP16`): where a model has a GELU, another arm computes it so.
"""

import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from gguf import GGUFReader, GGUFValueType, GGUFWriter, dequantize
from jaxtyping import Array, Float

from et_jax.errors import UsageError
from et_jax.io.gguf import is_gguf
from et_jax.io.texts import read_text
from et_jax.models.checkpoint import load
from et_jax.models.hub import resolve
from et_jax.models.model import forward
from et_jax.models.sensitivity import causal_attend
from et_jax.text import load_tokenizer
from scripts.measuring import experiment
from scripts.measuring.experiment import Base, Figure, Group, setting
from scripts.peers import Engine
from scripts.peers.gguf_file import close

GELU = jax.nn.gelu


def gelu_of_ggml(x: Float[Array, "..."], approximate: bool = True) -> Float[Array, "..."]:
    """Return the GELU of numbers rounded to float16, rounded to float16; beyond 10 it is the identity or 0."""
    found = GELU(x.astype(jnp.float16).astype(jnp.float32), approximate).astype(jnp.float16).astype(x.dtype)
    return jnp.where(jnp.abs(x) < 10.0, found, jnp.maximum(x, 0.0))


class Settings(Base):
    """Flags of the experiment."""

    model: str = experiment.model("smollm2")
    text: Path = experiment.text()
    llama_python: str = setting(..., "a Python with llama-cpp-python")
    lines: int = setting(5000, "lines of the text, and lines drawn", least=1, quick=100)
    prompts: int = setting(20, "prompts", least=2, quick=2)
    prompt_tokens: int = setting(24, "tokens of each prompt", least=2)
    tokens: int = setting(40, "new ones after each prompt", least=1, quick=4)


def drawn_lines(count: int, seed: int = 0) -> list[str]:
    """Return lines of characters of many kinds."""
    ranges = [(0x4E00, 0x9FFF), (0x1F300, 0x1F6FF), (1, 10), (14, 28)]
    ranges += [(0xA1, 0x24F), (0x370, 0x52F), (0x620, 0x6FF), (0xAC00, 0xD7A3)]
    kinds = ["abcdefghijklmnopqrstuvwxyzABCDEFG  ", "0123456789", " \t.,;:!?()[]{}'\"-_/\\@#$%^&*+=<>|~`"]
    kinds += ["".join(map(chr, range(*ends))) for ends in ranges]
    draw = random.Random(seed)
    return ["".join(draw.choice(draw.choice(kinds)) for _ in range(draw.randint(1, 60))) for _ in range(count)]


def decoded_copy(file: Path, copy: Path) -> None:
    """Write a GGUF file with all its tensors in float32."""
    reader = GGUFReader(file)
    writer = GGUFWriter(copy, reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key in ("general.architecture", "general.file_type"):
            continue
        if field.types[0] == GGUFValueType.ARRAY:
            writer.add_array(key, field.contents())
        else:
            writer.add_key_value(key, field.contents(), field.types[0])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), np.float32))
    close(writer)


def groups(settings: Settings) -> Iterator[Group]:
    """Yield a group for the file as it is stored, and one for its copy in float32."""
    file = resolve(settings.model)
    if not is_gguf(file):
        raise UsageError(f"--model is {settings.model}, which is no GGUF file; name one.")
    tokenizer, engine = load_tokenizer(file), Engine("llama.cpp", settings.llama_python)
    print(engine.versions, file=sys.stderr)
    lines = [line for line in read_text(settings.text, "The text").splitlines() if line.strip()][: settings.lines]
    stream, length = tokenizer.backend.encode_plain("\n".join(lines), opens=True), settings.prompt_tokens
    lines += drawn_lines(settings.lines)
    starts = np.linspace(0, len(stream) - length, settings.prompts).astype(int)
    prompts = [stream[start : start + length] for start in starts]
    config, params = load(file, "float32")

    def logits(params: Any, ids: Any) -> Any:
        positions = jnp.arange(ids.shape[0], dtype=jnp.int32)[None]
        return forward(params, config, ids[None], positions, causal_attend, None)[0][0]

    def compared(read: Path, form: str, gelu: Callable[..., Any] = GELU) -> dict[str, Any]:
        jax.clear_caches()  # else the layers that were traced with another GELU are found again
        with mock.patch.object(jax.nn, "gelu", gelu):
            return compared_by(jax.jit(logits), read, form)

    def compared_by(logits: Callable[..., Any], read: Path, form: str) -> dict[str, Any]:
        engine.load(str(read), form, 1, length + settings.tokens)
        theirs = engine.tokens(lines)
        same_ids = [one == tokenizer.backend.encode_plain(line, True) for line, one in zip(lines, theirs, strict=True)]
        rows = []
        for prompt in prompts:
            [written] = engine.generate([prompt], settings.tokens)["ids"]
            found = np.asarray(logits(params, jnp.asarray(prompt + written[:-1])))
            wanted = engine.logits(prompt)
            same = found[length - 1 :].argmax(axis=-1) == written
            own, their = (np.asarray(jax.nn.log_softmax(one)) for one in (found[:length], wanted))
            rows.append(
                {
                    "same_ids": np.mean(same_ids),
                    "difference": np.abs(found[:length] - wanted).max(),
                    "divergence": np.sum(np.exp(their) * (their - own), axis=-1).mean(),
                    "same_argmax": np.mean(own.argmax(axis=-1) == their.argmax(axis=-1)),
                    "greedy": len(same) if same.all() else int(same.argmin()),
                }
            )
        return {name: np.array([row[name] for row in rows], np.float64) for name in rows[0]}

    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "float32.gguf"
        decoded_copy(file, copy)
        for what, read, form in (("as stored", file, "stored"), ("float32", copy, "float32")):
            arms = {"et_jax": partial(compared, read, form)}
            if form == "float32" and config.activation == "gelu_tanh":
                arms["et_jax, ggml's GELU"] = partial(compared, read, form, gelu_of_ggml)
            yield Group(labels={"llama.cpp reads": what}, arms=arms)
    engine.end()


FIGURES = {
    "same_ids": Figure(header="lines of the same ids"),
    "difference": Figure(header="largest difference of a logit"),
    "divergence": Figure(header="KL from llama.cpp, nats"),
    "same_argmax": Figure(header="same likeliest token"),
    "greedy": Figure(header="greedy tokens to the first that differs"),
}
