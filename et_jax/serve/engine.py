"""The engine: loads a model and serves whoever calls it."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.typing import DTypeLike

from et_jax.control.controller import Controller
from et_jax.decode import cost
from et_jax.decode.attention import serving_backend
from et_jax.decode.decoder import Decoder, decoder
from et_jax.decode.state import DecoderConfig, Keep
from et_jax.errors import UsageError
from et_jax.io import values
from et_jax.models.bundled import bundled_folder
from et_jax.models.calibration import read_calibration
from et_jax.models.checkpoint import check_weights, read_config, stored_dtype
from et_jax.models.checkpoint import load as load_checkpoint
from et_jax.models.config import ModelConfig
from et_jax.models.hub import resolve
from et_jax.models.transformer import Params
from et_jax.serve.compilation import keep_programs
from et_jax.serve.continuation import Continuation
from et_jax.serve.device_memory import num_sharing, usable_memory
from et_jax.serve.metrics import Metrics
from et_jax.serve.preflight import Plan, plan
from et_jax.serve.prompts import as_request, check_bytes, check_length, requests_of
from et_jax.serve.queue import Queue
from et_jax.serve.replica import Replica
from et_jax.serve.replicas import Replicas
from et_jax.serve.requests import Completion, GenerationRequest, SamplingParams, TokenEvent
from et_jax.serve.sizing import Control, check_backend, controller, decoder_config
from et_jax.serve.streams import Bar, Call, Text, refused
from et_jax.text import Tokenizer, load_tokenizer
from et_jax.types import replace

PROGRAMS = "~/.cache/et_jax/programs"  # where compiled programs are kept unless the caller says otherwise
_MOST = 2**20  # of anything that is counted: beyond it no machine has room
_MOST_DECODERS = 4  # kept compiled; each takes some 50 MB of a host
_AHEAD = 256  # continuations a caller may have waiting: enough for their priorities to matter

Prompt = str | Sequence[int] | GenerationRequest
"""A text, token ids, or a request with settings of its own."""

Prompts = Prompt | Iterable[Prompt]
"""One prompt or several; arrays of ids are lists of ids, an array of two axes is several prompts."""


def load(
    name: str | Path = "bundled",
    *,
    dtype: str = "auto",
    page_size: int | None = None,
    max_model_len: int | None = None,
    num_pages: int | None = None,
    max_num_seqs: int = 8,
    max_resident_seqs: int | None = None,
    max_num_batched_tokens: int = 512,
    prefill_batch: int | None = None,
    prefix_cache: bool = True,
    preempt_every: int = 0,
    replicas: int = 1,
    control: Control = "off",
    backend: str | None = None,
    memory_fraction: float = 0.9,
    compilation_cache: str | Path | None = PROGRAMS,
    progress: Callable[[str], None] | None = None,
) -> "Model":
    """Return a model ready to generate: "bundled", a Hugging Face folder, or a hub name "owner/model".

    `dtype` is "auto", "bfloat16" or "float32". `page_size` tokens share a page (16 on CPU, 64 on GPU,
    128 on TPU). `max_model_len` caps prompt plus text, at most what the model was made for.
    `max_num_seqs` sequences are decoded together, always as that many rows: the same number gives the
    same text, alone or in company. `max_resident_seqs` of them, as many by default, sit in the cache at
    once; with more, every step serves those of highest priority under the controller's rule. `num_pages`
    bounds the cache; by default every resident sequence can reach `max_model_len`, or as many as
    `memory_fraction` of the free memory holds. Where pages run short, sequences move to the host and
    back. `max_num_batched_tokens` bounds the prompt tokens prefilled between two steps, of one prompt or
    several in calls of `prefill_batch` (on CPU 64, 128 from 16 sequences on, else 512). `prefix_cache` keeps full
    pages of prompts for prompts that begin alike. Every `preempt_every` rounds (0: never) somebody is
    moved out for no need, to prove that no text changes. `replicas` serve one queue side by side, each of
    all these sizes: on the machine's devices in turn, with the weights on each, or on one device, where the
    host's work for one and the device's for another overlap.

    `control` is a preset's name or a Controller (see `presets.preset`).
    `compilation_cache` keeps compiled programs between runs; None keeps none. Where the default folder
    cannot be written `progress` is told, and they are kept in memory only.

    Raises UsageError, one sentence, for a name, a file, a folder or a size that cannot work.
    """
    if progress is not None and not callable(progress):
        raise UsageError(f"progress is {values.shown(progress)}; it must be a function of one text.")
    tell = progress or (lambda _: None)
    name, dtype = str(_text("name", name)), str(_text("dtype", dtype))
    page_size, max_model_len = _size("page_size", page_size), _size("max_model_len", max_model_len)
    num_pages, prefill_batch = _size("num_pages", num_pages), _size("prefill_batch", prefill_batch)
    max_resident_seqs = _size("max_resident_seqs", max_resident_seqs)
    max_num_seqs = _count("max_num_seqs", max_num_seqs)
    max_num_batched_tokens = _count("max_num_batched_tokens", max_num_batched_tokens)
    preempt_every = values.whole("preempt_every", preempt_every, 0, wanted="0 (never) or above")
    replicas = _count("replicas", replicas)
    prefix_cache = values.boolean("prefix_cache", prefix_cache)
    memory_fraction = values.number("memory_fraction", memory_fraction)
    control, backend = controller(control), check_backend(backend)
    if compilation_cache is not None:
        folder = Path(_text("compilation_cache", compilation_cache))
        problem = keep_programs(folder)
        if problem is not None and folder != Path(PROGRAMS):
            raise UsageError(f"compilation_cache is {folder}, {problem}; choose another folder, or None.")
        if problem is not None:
            tell(f"compiled programs are not kept: {folder}, {problem}")

    def sized(config: ModelConfig, dtype: DTypeLike, num_pages: int | None, calibration: float = 1.0) -> DecoderConfig:
        return decoder_config(
            name,
            config,
            dtype,
            page_size=page_size,
            max_model_len=max_model_len,
            num_pages=num_pages,
            max_num_seqs=max_num_seqs,
            max_resident_seqs=max_resident_seqs,
            prefill_batch=prefill_batch,
            control=control,
            calibration=calibration,
            backend=backend,
        )

    def fit(folder: Path) -> Plan:
        """What it will need, from config.json alone. Raises UsageError where that is too much."""
        wanted = sized(read_config(folder), stored_dtype(folder, dtype), num_pages)
        return plan(wanted, usable_memory(memory_fraction), num_pages=num_pages, replicas=num_sharing(replicas))

    tell(f"loading {name}")
    folder = bundled_folder() if name == "bundled" else resolve(name, fit)
    check_weights(folder, read_config(folder))
    fitting, tokenizer = fit(folder), load_tokenizer(folder)
    config, params = load_checkpoint(folder, dtype)
    return Model(
        name=name,
        config=sized(config, params.embedding.dtype, fitting.num_pages, read_calibration(folder)),
        params=params,
        tokenizer=tokenizer,
        max_num_batched_tokens=max_num_batched_tokens,
        prefix_cache=prefix_cache,
        preempt_every=preempt_every,
        replicas=replicas,
        plan=fitting,
        progress=progress,
    )


def _count(name: str, value: int) -> int:
    """A size of at least 1, of which a machine could hold so many."""
    counted = values.whole(name, value, 1)
    return values.whole(name, counted, 1, _MOST, f"at most {_MOST}")


def _size(name: str, value: int | None) -> int | None:
    return None if value is None else _count(name, value)


def _text(name: str, value: str | Path) -> str | Path:
    if not isinstance(value, str | Path):
        raise UsageError(f"{name} is {values.shown(value)}; it must be a text.")
    return value


class Model:
    """Weights, a tokenizer, and what has been compiled for them so far.

    `metrics` counts what was served.
    """

    def __init__(
        self,
        *,
        name: str,
        config: DecoderConfig,
        params: Params,
        tokenizer: Tokenizer,
        max_num_batched_tokens: int = 512,
        prefix_cache: bool = True,
        preempt_every: int = 0,
        replicas: int = 1,
        plan: Plan | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        self.name, self.params, self.tokenizer = name, params, tokenizer
        self.config, self.decoder_config = config.model, config
        self.metrics = Metrics()
        self._max_num_batched_tokens, self._prefix_cache = max_num_batched_tokens, prefix_cache
        self._preempt_every, self._num_replicas, self._plan = preempt_every, replicas, plan
        self._tell = progress or (lambda _: None)
        self._decoders: dict[Any, Decoder] = {}
        self._replicas: dict[Controller, Replicas] = {}
        self._lock = threading.Lock()

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and text together."""
        return self.decoder_config.max_length

    def generate(
        self,
        prompts: Prompts,
        params: SamplingParams | None = None,
        *,
        control: Control | None = None,
        progress: bool = False,
        **settings: Any,
    ) -> list[Completion]:
        """Return the continuations of every prompt, in order, `n` of each.

        Prompts are texts, lists of token ids, or `GenerationRequest`s with settings of their own; the others
        take theirs from a `SamplingParams`, its fields as keywords, or both, of which the keywords count:
        `model.generate("It was", temperature=0.7)`. A list of ids alone is one prompt, an empty list none.
        `control` stands in for the model's own; each one compiles once. `progress` shows a bar.
        """
        self._check_call(control)
        requests = self._requests(prompts, params, settings)
        total = sum(request.params.n for request in requests)
        ended = []
        with Bar(total if progress else None) as bar:
            for event in self._serve(self._checked(requests), control):
                bar.take(event)
                if event.completion is not None:
                    ended.append(event)
        ended.sort(key=lambda event: (event.prompt_index, event.index))
        return [event.completion for event in ended]

    def stream(
        self,
        prompts: Prompts,
        params: SamplingParams | None = None,
        *,
        control: Control | None = None,
        cancelled: Callable[[], bool] = lambda: False,
        **settings: Any,
    ) -> Generator[TokenEvent]:
        """Yield every token of every continuation as it comes; prompts and settings as for `generate`.

        Streams open at the same time share the slots. When `cancelled` answers True, every unfinished
        sequence ends with what it has, as "abort"; so it does when the caller closes the stream.
        """
        self._check_call(control, cancelled)
        requests = self._requests(prompts, params, settings)
        return self._serve(self._checked(requests), control, cancelled)

    async def stream_async(
        self, prompts: Prompts, params: SamplingParams | None = None, **settings: Any
    ) -> AsyncIterator[TokenEvent]:
        """`stream` for asyncio: other tasks run while the device works, further streams among them."""
        events = self.stream(prompts, params, **settings)
        pending = None
        try:
            while True:
                pending = asyncio.ensure_future(asyncio.to_thread(next, events, None))
                event = await asyncio.shield(pending)
                if event is None:
                    return
                yield event
        finally:
            if pending is not None:  # the thread may still be at work, and a generator cannot be closed from outside
                await asyncio.wait([pending])
            await asyncio.to_thread(events.close)

    def as_completed(
        self,
        requests: Iterable[GenerationRequest],
        *,
        control: Control | None = None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Iterator[tuple[int, Completion]]:
        """Yield (index of the request, completion) as continuations end, in any order, `n` for each request.

        Requests are taken from the iterable as they are needed, some ahead of the slots. One that cannot
        be served yields a single completion whose `error` says why.
        """
        if isinstance(requests, str | bytes | GenerationRequest) or not isinstance(requests, Iterable):
            raise UsageError(f"requests is {values.shown(requests)}; it must be a list of GenerationRequest(...).")

        def texts() -> Iterator[Text | TokenEvent]:
            for index, request in enumerate(requests):
                try:
                    yield from self._texts(index, as_request(request))
                except UsageError as error:
                    yield refused(index, request, str(error))
                except Exception as error:  # whatever a tokenizer may raise is an answer to its own request
                    yield refused(index, request, f"This request cannot be read ({type(error).__name__}: {error}).")

        def completions() -> Iterator[tuple[int, Completion]]:
            with contextlib.closing(self._serve(texts(), control, cancelled)) as events:
                for event in events:
                    if event.completion is not None:
                        yield event.prompt_index, event.completion

        self._check_call(control, cancelled)
        return completions()

    def warm_up(self, control: Control | None = None) -> None:
        """Compile every program that serving under `control` needs, so that no request waits for it."""
        self.replicas(control)

    def describe(self) -> list[str]:
        """Return lines that say what runs where and what it needs, for a person."""
        c, d = self.config, self.decoder_config
        weights = f"{cost.num_bytes(self.params) / 1e6:.1f} MB {self.params.embedding.dtype}"
        refusals = serving_backend(c, d.page_size, d.cache_dtype)[1]
        return [
            f"model {self.name}: {c.architecture}, {c.num_layers} layers, {weights}",
            f"device {jax.devices()[0].device_kind}, attention backend {d.backend}",
            *(f"not chosen: {refusal}" for refusal in refusals),
            *self._scoring(),
            f"cache {d.num_pages} pages of {d.page_size} tokens, {d.num_slots} slots of {d.max_length} tokens, "
            f"{d.batch} served in a step" + ("" if self._num_replicas == 1 else f", {self._num_replicas} times over"),
            *([] if self._plan is None else self._plan.table()),
            f"compiled programs kept in {jax.config.jax_compilation_cache_dir or 'memory only'}",
        ]

    def _scoring(self) -> list[str]:
        """Who scores blocks, where the model's own controller chooses any."""
        config = self.decoder_config
        if all(selector.reads_all for selector in config.selectors):
            return []
        backend, refusals = config.scoring
        return [f"blocks scored by {backend}", *(f"not chosen: {refusal}" for refusal in refusals)]

    def _requests(self, prompts: Prompts, params: SamplingParams | None, settings: dict) -> list[GenerationRequest]:
        return requests_of(prompts, params, settings, self.max_model_len)

    def _check_call(self, control: Control | None, cancelled: Callable[[], bool] = lambda: False) -> None:
        self._controller(control)
        if not callable(cancelled):
            raise UsageError(f"cancelled is {values.shown(cancelled)}; it must be a function without arguments.")

    def _checked(self, requests: list[GenerationRequest]) -> list[Text]:
        """Check every request before any work is done for one."""
        return [text for index, request in enumerate(requests) for text in self._texts(index, request)]

    def _texts(self, prompt_index: int, request: GenerationRequest) -> list[Text]:
        return [Text(request=request, continuation=text) for text in self.continuations(prompt_index, request)]

    def continuations(self, prompt_index: int, request: GenerationRequest) -> list[Continuation]:
        """Return the `n` continuations that a request asks for, not yet begun; `prompt_index` names it in events.

        Raises UsageError where it cannot be served.
        """
        prompt, params = request.prompt, request.params
        if isinstance(prompt, str):
            check_bytes(prompt, self.tokenizer.longest_token, self.max_model_len)
        else:
            check_length(len(prompt), self.max_model_len)
        tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not prompt or not tokens:
            raise UsageError("The prompt is empty; give it at least one character.")
        for what, ids in (("The prompt has", tokens), ("stop_token_ids holds", params.stop_token_ids)):
            outside = next((token for token in ids if not 0 <= token < self.config.vocab_size), None)
            if outside is not None:
                raise UsageError(
                    f"{what} the token {values.shown(outside)}, and {self.name} has tokens 0 to "
                    f"{self.config.vocab_size - 1}; take ids of this model's own tokenizer."
                )
        if len(tokens) >= self.max_model_len:
            raise UsageError(
                f"The prompt has {len(tokens)} tokens and {self.name} holds {self.max_model_len} with the text; "
                "shorten the prompt or raise max_model_len if the model allows it."
            )
        limit = min(params.max_tokens, self.max_model_len - len(tokens))
        page_size, num_pages = self.decoder_config.page_size, self.decoder_config.num_pages
        pages = -(-(len(tokens) - 1 + limit) // page_size)
        if pages > num_pages - 1:
            raise UsageError(
                f"The prompt of {len(tokens)} tokens and {limit} more need {pages} pages of {page_size} "
                f"tokens and the pool holds {num_pages - 1}; raise num_pages, or lower max_tokens."
            )
        text = prompt if isinstance(prompt, str) else self.tokenizer.decode(tokens)
        return [
            Continuation(
                tokenizer=self.tokenizer,
                params=params,
                prompt=text,
                tokens=tokens,
                prompt_index=prompt_index,
                index=index,
                limit=limit,
            )
            for index in range(params.n)
        ]

    def _serve(
        self,
        texts: Iterable[Text | TokenEvent],
        control: Control | None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Generator[TokenEvent]:
        """Submit texts, a bounded number ahead, and yield their events; an event among them is passed on."""
        call, source, exhausted = Call(self.replicas(control)), iter(texts), False
        most = self._num_replicas * self.decoder_config.num_slots + _AHEAD
        try:
            while True:
                while not exhausted and not call.events and len(call.under_way) < most:
                    item = next(source, None)
                    exhausted = item is None
                    if isinstance(item, TokenEvent):
                        call.events.append(item)
                    elif item is not None:
                        call.submit(item)
                over = exhausted and not call.under_way  # asked before the events, for rounds go on meanwhile
                if call.events:
                    while call.events:
                        yield call.events.popleft()
                    continue
                if over:
                    return
                if cancelled():
                    call.cancel()
                    yield from call.events
                    return
                call.advance()
        finally:
            call.cancel()

    def replicas(self, control: Control | None = None) -> Replicas:
        """Return what serves under a controller, made and warmed up when first asked for; idle others are let go."""
        chosen = self._controller(control)
        with self._lock:
            self._replicas = {
                key: replicas
                for key, replicas in self._replicas.items()
                if not replicas.broken and (key == chosen or not replicas.idle)
            }
            if chosen not in self._replicas:
                queue = Queue()
                replicas = Replicas(queue, [self._replica(chosen, queue, i) for i in range(self._num_replicas)])
                replicas.warm_up(self._tell)
                self._replicas[chosen] = replicas
            return self._replicas[chosen]

    def _replica(self, chosen: Controller, queue: Queue, number: int) -> Replica:
        """A replica, on the devices in turn, beginning where the weights are."""
        own, [home] = self.decoder(chosen), self.params.embedding.devices()
        devices = [home, *(device for device in jax.local_devices() if device != home)]
        return Replica(
            jax.device_put(self.params, devices[number % len(devices)]),
            own,
            queue,
            metrics=self.metrics,
            batched_tokens=self._max_num_batched_tokens,
            # The surprisal of the first token after a kept page needs logits that nobody keeps.
            prefix_cache=self._prefix_cache
            and "surprisals" not in replace(self.decoder_config, controller=chosen).keeps,
            preempt_every=self._preempt_every,
        )

    def decoder(self, control: Control | None = None, keep: frozenset[Keep] = frozenset()) -> Decoder:
        """Return the pure functions underneath, bound to this model; compiled once for each structure of controllers.

        `keep` is that of `DecoderConfig`. The last few are kept.
        """
        config = replace(self.decoder_config, controller=self._controller(control), keep=keep)
        key = (jax.tree.structure(config.controller), keep)
        found = self._decoders.pop(key, None) or decoder(config)
        self._decoders[key] = found  # the last to be used
        while len(self._decoders) > _MOST_DECODERS:
            del self._decoders[next(iter(self._decoders))]
        return replace(found, config=config)

    def _controller(self, control: Control | None) -> Controller:
        return self.decoder_config.controller if control is None else controller(control)
