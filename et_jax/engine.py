"""The engine: loads a model, keeps the slots busy, turns tokens into text. The only loop with side effects."""

import collections
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from et_jax import cost
from et_jax.attend import serving_backend
from et_jax.continuation import Continuation
from et_jax.decode import Decoder, decoder
from et_jax.models.bundled import bundled_folder
from et_jax.models.calibration import read_calibration
from et_jax.models.checkpoint import load as load_checkpoint
from et_jax.models.checkpoint import resolve
from et_jax.models.config import ModelConfig
from et_jax.models.transformer import Params
from et_jax.presets import preset
from et_jax.requests import MAX_STOP_IDS, Completion, SamplingParams, TokenEvent, TokenTrace
from et_jax.state import Controller, DecoderConfig, DecodeState, Request, StepOutput, request
from et_jax.tokenizer import Tokenizer, load_tokenizer
from et_jax.types import UsageError

DEFAULT_PAGE_SIZE = {"cpu": 16, "gpu": 64, "tpu": 128}
_MAX_STEPS = 32  # tokens the device may produce before the host looks at them
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed")
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_EOS_SLOTS = 8  # end tokens of a model kept beside a request's own stop ids


Control = str | Controller
"""A preset by name, see `presets.preset`, or a controller of one's own."""

Prompts = str | Sequence[int] | Sequence[str | Sequence[int]]
"""One prompt or several, each a text or a list of token ids."""


def load(
    name: str = "bundled",
    *,
    dtype: str = "auto",
    page_size: int | None = None,
    max_model_len: int | None = None,
    num_pages: int | None = None,
    max_num_seqs: int = 8,
    chunk: int = 64,
    control: Control = "off",
    backend: str | None = None,
    compilation_cache: str | Path | None = "~/.cache/et_jax/programs",
    progress: Callable[[str], None] | None = None,
) -> "Model":
    """Return a model ready to generate: "bundled", a Hugging Face folder, or a hub name "owner/model".

    `dtype` is "auto", "bfloat16" or "float32". `page_size` tokens share a page (16 on CPU, 64 on GPU,
    128 on TPU). `max_model_len` caps prompt plus text, at most what the model was made for.
    `max_num_seqs` sequences are decoded together, always as that many rows: the same number gives the
    same text, alone or in company. `num_pages` bounds the cache; by default every sequence can reach
    `max_model_len`. `control` is a preset's name or a Controller (see `presets.preset`).
    `compilation_cache` keeps compiled programs between runs; None keeps none.

    Raises UsageError, one sentence, for a name, a file or a size that cannot work.
    """
    tell = progress or (lambda _: None)
    if compilation_cache is not None:
        _keep_programs(Path(compilation_cache).expanduser())
    tell(f"loading {name}")
    folder = bundled_folder() if name == "bundled" else resolve(name)
    config, params = load_checkpoint(folder, dtype)
    tokenizer = load_tokenizer(folder)
    return Model(
        name=name,
        config=config,
        params=params,
        tokenizer=tokenizer,
        page_size=page_size,
        max_model_len=max_model_len,
        num_pages=num_pages,
        max_num_seqs=max_num_seqs,
        chunk=chunk,
        control=control,
        calibration=read_calibration(folder),
        backend=backend,
        progress=progress,
    )


def _controller(control: Control) -> Controller:
    return preset(control) if isinstance(control, str) else control


def _keep_programs(folder: Path) -> None:
    """Keep compiled programs between runs, unless the caller has chosen a folder already."""
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


class Model:
    """Weights, a tokenizer, and the decoders compiled for them so far."""

    def __init__(
        self,
        *,
        name: str,
        config: ModelConfig,
        params: Params,
        tokenizer: Tokenizer,
        page_size: int | None = None,
        max_model_len: int | None = None,
        num_pages: int | None = None,
        max_num_seqs: int = 8,
        chunk: int = 64,
        control: Control = "off",
        calibration: float = 1.0,
        backend: str | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        self.name, self.config, self.params, self.tokenizer = name, config, params, tokenizer
        self.max_model_len = config.max_positions if max_model_len is None else max_model_len
        if not 2 <= self.max_model_len <= config.max_positions:
            raise UsageError(
                f"max_model_len is {max_model_len}; {name} was made for {config.max_positions} tokens, "
                "so choose from 2 to that."
            )
        self.page_size = DEFAULT_PAGE_SIZE.get(jax.default_backend(), 64) if page_size is None else page_size
        if max_num_seqs < 1 or self.page_size < 1:
            raise UsageError("max_num_seqs and page_size must be at least 1.")
        if num_pages is not None and num_pages < 2:
            raise UsageError(f"num_pages is {num_pages}; it must be at least 2, for page 0 holds no text.")
        self.num_slots = max(2, max_num_seqs)
        everything = self.num_slots * self._blocks(self.max_model_len) + 1
        self.num_pages = everything if num_pages is None else num_pages
        self.chunk = self._blocks(min(chunk, self.max_model_len)) * self.page_size
        self.control, self.calibration = _controller(control), calibration
        dtype = params.embedding.dtype
        found, self._refusals = serving_backend(config, self.page_size, dtype) if backend is None else (backend, ())
        self.backend = found
        self.num_multiplied = cost.num_multiplied(params)
        self._tell = progress or (lambda _: None)
        self._decoders: dict[tuple[bool, int, Controller], Decoder] = {}

    def generate(self, prompts: Prompts, params: SamplingParams | None = None, **settings: Any) -> list[Completion]:
        """Return the continuations of every prompt, in order, `n` of each.

        Give a `SamplingParams`, or its fields as keywords: `model.generate("It was", temperature=0.7)`.
        The keywords of `stream` serve here too, `control` among them.
        """
        ended = [event for event in self.stream(prompts, params, **settings) if event.completion]
        ended.sort(key=lambda event: (event.prompt_index, event.index))
        return [event.completion for event in ended if event.completion]

    def stream(
        self,
        prompts: Prompts,
        params: SamplingParams | None = None,
        *,
        control: Control | None = None,
        burst_seconds: float = 0.05,
        cancelled: Callable[[], bool] = lambda: False,
        **settings: Any,
    ) -> Iterator[TokenEvent]:
        """Yield every token of every continuation as it comes; prompts are texts, or lists of token ids.

        `control` stands in for the model's own; each one compiles once. The device runs at most about
        `burst_seconds` between two looks. When `cancelled` answers True, every unfinished sequence ends
        with what it has, as "abort".
        """
        params = params or SamplingParams(**settings)
        alone = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
        waiting = collections.deque(self._sequences([prompts] if alone else prompts, params))
        bound = self.decoder(control, penalties=params.penalises, num_logprobs=params.logprobs)
        run = _Run(self, bound, burst_seconds)
        while waiting or run.slots:
            if cancelled():
                for sequence in [*run.slots.values(), *waiting]:
                    yield sequence.end("abort")
                return
            run.admit(waiting)
            yield from run.advance()

    def describe(self) -> list[str]:
        """Return lines that say what runs where, for a person."""
        c, weights = self.config, f"{cost.num_bytes(self.params) / 1e6:.1f} MB {self.params.embedding.dtype}"
        cache = jax.eval_shape(self.decoder().empty).cache
        return [
            f"model {self.name}: {c.architecture}, {c.num_layers} layers, {weights}",
            f"device {jax.devices()[0].device_kind}, attention backend {self.backend}",
            *(f"not chosen: {refusal}" for refusal in self._refusals),
            *self._scoring(),
            f"cache {self.num_pages} pages of {self.page_size} tokens, {cost.num_bytes(cache) / 1e6:.1f} MB, "
            f"{self.num_slots} slots of {self.max_model_len} tokens",
            f"compiled programs kept in {jax.config.jax_compilation_cache_dir or 'memory only'}",
        ]

    def _scoring(self) -> list[str]:
        """Who scores blocks, where the model's own controller chooses any."""
        config = self.decoder().config
        if all(selector.reads_all for selector in config.reading.selectors):
            return []
        backend, refusals = config.scoring
        return [f"blocks scored by {backend}", *(f"not chosen: {refusal}" for refusal in refusals)]

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _sequences(self, prompts: Sequence[str | Sequence[int]], params: SamplingParams) -> list[Continuation]:
        """Check every prompt before any work is done for one."""
        sequences = []
        for prompt_index, prompt in enumerate(prompts):
            tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
            text = prompt if isinstance(prompt, str) else self.tokenizer.decode(tokens)
            if not prompt or not tokens:
                raise UsageError("The prompt is empty; give it at least one character.")
            outside = [token for token in tokens if not 0 <= token < self.config.vocab_size]
            if outside:
                raise UsageError(
                    f"The prompt has the token {outside[0]}, and {self.name} has tokens 0 to "
                    f"{self.config.vocab_size - 1}; encode the prompt with this model's own tokenizer."
                )
            if len(tokens) >= self.max_model_len:
                raise UsageError(
                    f"The prompt has {len(tokens)} tokens and {self.name} holds {self.max_model_len} with the text; "
                    "shorten the prompt or raise max_model_len if the model allows it."
                )
            limit = min(params.max_tokens, self.max_model_len - len(tokens))
            pages = self._blocks(len(tokens) - 1 + limit)
            if pages > self.num_pages - 1:
                raise UsageError(
                    f"The prompt of {len(tokens)} tokens and {limit} more need {pages} pages of {self.page_size} "
                    f"tokens and the pool holds {self.num_pages - 1}; raise num_pages, or lower max_tokens."
                )
            for index in range(params.n):
                sequences.append(
                    Continuation(
                        tokenizer=self.tokenizer,
                        params=params,
                        prompt=text,
                        tokens=tokens,
                        prompt_index=prompt_index,
                        index=index,
                        arrival=len(sequences),
                        limit=limit,
                        pages=pages,
                    )
                )
        return sequences

    def decoder(self, control: Control | None = None, *, penalties: bool = False, num_logprobs: int = 0) -> Decoder:
        """Return the pure functions underneath, bound to this model; compiled once for each set of arguments."""
        controller = self.control if control is None else _controller(control)
        key = (penalties, num_logprobs, controller)
        if key not in self._decoders:
            self._tell("compiling")
            self._decoders[key] = decoder(
                DecoderConfig(
                    model=self.config,
                    num_slots=self.num_slots,
                    batch=self.num_slots,
                    page_size=self.page_size,
                    num_pages=self.num_pages,
                    max_length=self.max_model_len,
                    chunk=self.chunk,
                    max_steps=_MAX_STEPS,
                    cache_dtype=self.params.embedding.dtype,
                    backend=self.backend,
                    num_logprobs=num_logprobs,
                    num_stop_ids=_EOS_SLOTS + MAX_STOP_IDS,
                    penalties=penalties,
                    calibration=self.calibration,
                    controller=controller,
                )
            )
        return self._decoders[key]


class _Run:
    """One call of `stream`: the decode state, and which sequence sits in which slot."""

    def __init__(self, model: Model, decoder: Decoder, burst_seconds: float) -> None:
        self.model, self.decoder, self.burst_seconds = model, decoder, burst_seconds
        self.state: DecodeState = decoder.empty()
        self.slots: dict[int, Continuation] = {}
        self.steps = 1

    def admit(self, waiting: collections.deque[Continuation]) -> None:
        """Start waiting sequences, in order, while there are slots and pages for all they may need."""
        fresh: dict[int, int] = {}  # prompt -> a slot that holds it and has not moved yet
        free = [slot for slot in range(self.model.num_slots) if slot not in self.slots]
        while waiting and free:
            sequence = waiting[0]
            promised = sum(other.pages for other in self.slots.values())
            if promised + sequence.pages > self.model.num_pages - 1:
                return
            waiting.popleft()
            slot = free.pop(0)
            if sequence.prompt_index in fresh:
                self.state, granted = self.decoder.fork(self.state, fresh[sequence.prompt_index], slot)
            else:
                granted = self._prefill(slot, sequence.tokens[:-1])
                fresh[sequence.prompt_index] = slot
            if not granted:
                raise RuntimeError(f"slot {slot} was promised {sequence.pages} pages and did not get them")
            self.state = self.decoder.insert(self.state, slot, self._request(sequence))
            self.slots[slot] = sequence
            self.steps = 1

    def _request(self, sequence: Continuation) -> Request:
        settings = {name: getattr(sequence.params, name) for name in (*_SAMPLING, *_PENALTIES)}
        return request(
            self.decoder.config,
            sequence.tokens,
            limit=sequence.limit,
            arrival=sequence.arrival,
            index=sequence.index,
            stop_ids=sequence.stop_ids,
            **settings,
        )

    def _prefill(self, slot: int, tokens: list[int]) -> bool:
        chunk, granted = self.model.chunk, True
        for start in range(0, len(tokens), chunk):
            part = np.zeros(chunk, np.int32)
            count = min(chunk, len(tokens) - start)
            part[:count] = tokens[start : start + count]
            self.state, fits = self.decoder.prefill(self.model.params, self.state, slot, part, count)
            granted = granted and bool(fits)
        return granted

    def advance(self) -> Iterator[TokenEvent]:
        """Run a burst of steps and hand on what they produced."""
        began = time.perf_counter()
        self.state, outputs, ran = self.decoder.decode(self.model.params, self.state, self.steps)
        host, ran = jax.device_get((outputs, ran))
        per_step = (time.perf_counter() - began) / max(int(ran), 1)
        self.steps = int(np.clip(self.burst_seconds / per_step, 1, _MAX_STEPS))
        for i in range(int(ran)):
            for slot, sequence in list(self.slots.items()):
                event = self._collect(host, i, slot, sequence)
                if event is None:
                    continue
                if event.completion:
                    self.state = self.decoder.release(self.state, slot)
                    del self.slots[slot]
                yield event

    def _collect(self, host: StepOutput, i: int, slot: int, sequence: Continuation) -> TokenEvent | None:
        if host.failed[i, slot]:
            return sequence.end(
                "error",
                error=f"The logits after {len(sequence.trace)} tokens are not numbers; the weights are damaged, "
                "or overflow in this dtype (try float32).",
            )
        if not host.produced[i, slot]:
            return None
        return sequence.take(self._trace(host, i, slot), bool(host.finished[i, slot]))

    def _trace(self, host: StepOutput, i: int, slot: int) -> TokenTrace:
        c, signals = self.model.config, host.signals
        read = int(signals.blocks_read[i, slot])
        length = int(signals.length[i, slot])
        tokens_read = min(read * self.model.page_size, length * c.num_layers * c.num_kv_heads)
        top: tuple[tuple[int, float], ...] = ()
        if host.top_tokens is not None and host.top_logprobs is not None:
            pairs = zip(host.top_tokens[i, slot], host.top_logprobs[i, slot], strict=True)
            top = tuple((int(token), float(logprob)) for token, logprob in pairs)
        return TokenTrace(
            token=int(host.token[i, slot]),
            text="",
            entropy=float(signals.entropy[i, slot]),
            varentropy=float(signals.varentropy[i, slot]),
            temperature=float(host.temperature[i, slot]),
            surprisal=float(signals.surprisal[i, slot]),
            blocks_read=read,
            blocks_held=self.model._blocks(length) * c.num_layers * c.num_kv_heads,
            kept_mass=float(signals.kept_mass[i, slot]),
            entropic_time=float(host.entropic_time[i, slot]),
            cost=float(signals.cost[i, slot]),
            flops=cost.token_flops(self.model.num_multiplied, tokens_read, c.group_size, c.head_dim)
            + cost.selection_flops(
                int(signals.summaries_read[i, slot]),
                c.group_size,
                c.head_dim,
                self.model.page_size if self.decoder.config.controller.key_codes else 0,
            ),
            guard_rates={name: float(rate[i, slot]) for name, rate in host.guard_rates.items()},
            top=top,
        )
