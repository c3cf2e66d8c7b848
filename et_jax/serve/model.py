"""A loaded model: generates, streams and scores for any number of callers."""

import asyncio
import contextlib
import contextvars
from collections import abc
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Iterator
from pathlib import Path
from typing import Any

from et_jax.decode.config import DecoderConfig, Keep
from et_jax.decode.decoder import Decoder
from et_jax.decode.plant import Weights
from et_jax.errors import UsageError
from et_jax.io import values
from et_jax.io.bar import Bar
from et_jax.models.config import ModelShape
from et_jax.models.model import ModelWeights
from et_jax.scope import own_settings
from et_jax.serve import saved_prefix
from et_jax.serve.best_of import BestOf
from et_jax.serve.completions import Completion, TokenEvent
from et_jax.serve.config import Control, EngineConfig
from et_jax.serve.decoders import Decoders
from et_jax.serve.loading.description import description
from et_jax.serve.memory.preflight import Plan
from et_jax.serve.metrics import Metrics
from et_jax.serve.prompts import as_request, check_knobs, refused, requests_of, sequences_of, split_knobs
from et_jax.serve.replicas import Replicas
from et_jax.serve.requests import GenerationRequest, SamplingParams
from et_jax.serve.scoring import Score, scored
from et_jax.serve.sequence import Sequence
from et_jax.serve.streams import serve
from et_jax.serve.use import Use, check_untraced, untraced
from et_jax.text import Grammars, Tokenizer

_AHEAD = 256  # sequences that a caller may have queued: enough for their priorities to matter

Prompt = str | abc.Sequence[int] | GenerationRequest
"""A text, token ids, or a request with its own settings."""

Prompts = Prompt | Iterable[Prompt]
"""A prompt or several; an array of ids is a prompt, an array of two axes is several prompts."""


class Model:
    """Weights, a tokenizer, and the decoders compiled for them so far.

    `metrics` counts requests and tokens. `config` has the model's sizes. Any number of threads of the process that
    loaded the model may use it until it is closed.
    """

    def __init__(
        self,
        settings: EngineConfig,
        *,
        config: DecoderConfig,
        weights: Weights,
        tokenizer: Tokenizer,
        others: tuple[ModelShape, ...] = (),
        plan: Plan | None = None,
        remarks: tuple[str, ...] = (),
        progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.name, self.tokenizer = settings.name, tokenizer
        self.settings, self.config, self.decoder_config = settings, config.model, config
        self._grammars = Grammars(tokenizer, config.model.vocab_size)
        self.metrics = Metrics()
        self._plan, self._remarks, self._use = plan, remarks, Use(settings.name)
        self._decoders = Decoders(settings, config, weights, others, self.metrics, self._use, progress)

    def __enter__(self) -> "Model":
        self._use.check()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the memory of weights and caches; later use of the model, or of an open stream, raises UsageError.

        Waits for running rounds, five seconds at most. A second call does nothing. A model that is garbage-collected
        frees its memory without `close`.
        """
        self._use.closed = True
        self._decoders.free()

    def __reduce__(self) -> Any:
        raise UsageError(
            f"The model {self.name} cannot be copied or pickled, for it holds a device's memory; load it again, in "
            "each process."
        )

    @property
    def params(self) -> ModelWeights:
        """The weights of the model itself, without those of a second model."""
        return self.weights[0]

    @property
    def weights(self) -> Weights:
        """The weights of every model that the decoder runs, as its functions receive them."""
        return self._decoders.weights

    @property
    def max_model_len(self) -> int:
        """The most tokens of prompt and generated text together."""
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

        Prompts are texts, lists of token ids, or `GenerationRequest`s with their own settings. The others take their
        settings from `params`, from keywords named as its fields, or from both; keywords override `params`:
        `model.generate("It was", temperature=0.7)`. A list of ids is a single prompt; an empty list is no prompt.
        `control` replaces the model's control for this call. Controllers that differ only in numbers share a compiled
        program, as do requests with their own `control`. The knobs of a preset (`control.presets`) are keywords too:
        `control="certified", tolerance=0.1`. None leaves a setting at its default. `progress` shows a bar.
        """
        knobs, settings = split_knobs(settings)
        control = self._check_call(control, knobs)
        requests = self._requests(prompts, params, settings)
        total = sum(request.params.n for request in requests)
        ended = []
        with Bar(total if progress else None) as bar:
            for event in self._serve(self._checked(requests, control), control):
                bar.count(token=event.trace is not None, ended=event.completion is not None)
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
        cancelled: Callable[[], bool] | None = None,
        **settings: Any,
    ) -> Generator[TokenEvent]:
        """Yield every token of every continuation as it is decoded; prompts and settings as for `generate`.

        Concurrent streams share the slots. When `cancelled` returns True, or the caller closes the stream, every
        unfinished sequence ends with its tokens so far and finish reason "abort".
        """
        knobs, settings = split_knobs(settings)
        control = self._check_call(control, knobs, cancelled)
        requests = self._requests(prompts, params, settings)
        return self._serve(self._checked(requests, control), control, cancelled)

    async def stream_async(
        self, prompts: Prompts, params: SamplingParams | None = None, **settings: Any
    ) -> AsyncGenerator[TokenEvent]:
        """`stream` for asyncio: other tasks, including further streams, run while the device works."""
        events = self.stream(prompts, params, **settings)
        loop, pending = asyncio.get_running_loop(), None

        def following() -> TokenEvent | None:
            return next(events, None)

        try:
            while True:
                # Not `asyncio.to_thread`, which is a task: a loop that ends cancels its tasks, but not its threads.
                pending = loop.run_in_executor(None, contextvars.copy_context().run, following)
                try:
                    event = await asyncio.shield(pending)
                except asyncio.CancelledError:
                    await asyncio.wait([pending])  # its thread still runs
                    raise
                if event is None:
                    return
                yield event
        finally:
            if pending is None or pending.done():  # else that thread ends the stream when it returns
                events.close()

    def as_completed(
        self,
        requests: Iterable[GenerationRequest],
        *,
        control: Control | None = None,
        cancelled: Callable[[], bool] | None = None,
        **knobs: float | int | None,
    ) -> Iterator[tuple[int, Completion]]:
        """Yield (index of the request, completion) as continuations end, in any order, `n` for each request.

        Requests are taken from the iterable lazily, some ahead of the free slots. An invalid request, or an item that
        is not a GenerationRequest, yields a single completion whose `error` explains why; the others continue. `knobs`
        are those of the preset, as for `generate`.
        """
        wrong = isinstance(requests, str | GenerationRequest) or values.is_bytes(requests)
        if wrong or not isinstance(requests, Iterable):
            raise UsageError(f"requests is {values.shown(requests)}; it must be a list of GenerationRequest(...).")

        check_knobs(knobs)
        control = self._check_call(control, knobs, cancelled)

        def sequences() -> Iterator[Sequence | TokenEvent]:
            for index, request in enumerate(requests):
                try:
                    yield from self.sequences(index, as_request(index, request), control)
                except UsageError as error:
                    yield refused(index, request, str(error))
                except Exception as error:  # a tokenizer may raise anything; only its own request fails
                    yield refused(index, request, f"This request cannot be read ({type(error).__name__}: {error}).")

        def completions() -> Iterator[tuple[int, Completion]]:
            with contextlib.closing(self._serve(sequences(), control, cancelled)) as events:
                for event in events:
                    if event.completion is not None:
                        yield event.prompt_index, event.completion

        return completions()

    @untraced
    @own_settings()
    def score(self, texts: Prompts, *, prefix: str | abc.Sequence[int] = "") -> list[Score]:
        """Return for every text the log-probability and the entropy of each of its tokens; nothing is generated.

        Texts have the types of the prompts of `generate`. With a `prefix`, texts are its continuations, and the prefix
        is prefilled once. Attention is dense under every control. Scoring allocates its own cache beside that of
        `generate`: for the prefix, the longest text and 128 tokens, rounded up to at most twice that.
        """
        self._use.check()
        given = self._requests(texts, None, {})
        before = [] if isinstance(prefix, str) and not prefix else self._requests(prefix, None, {})
        if len(before) > 1:
            raise UsageError(f"prefix is {len(before)} texts; give one, or score each group of texts by itself.")
        if any(one != GenerationRequest(prompt=one.prompt) for one in (*given, *before)):
            raise UsageError("A text that is scored has no settings; give texts, or lists of token ids.")
        return scored(
            [one.prompt for one in given],
            before[0].prompt if before else (),
            tokenizer=self.tokenizer,
            config=self.decoder_config,
            name=self.name,
            weights=self.weights,
            compiled=self._decoders.scoring,
        )

    @untraced
    @own_settings()
    def save_prefix(self, prompt: Prompt, path: str | Path, *, control: Control | None = None) -> int:
        """Prefill a prompt, write the cache pages that its tokens fill to a file, and return how many tokens they hold.

        `load_prefix` puts them into the prefix cache of a model loaded with the same settings. Raises UsageError for a
        prompt that fills no page, if there is no prefix cache, and if the file cannot be written.
        """
        [asked] = self._requests([prompt], None, {})
        params = SamplingParams(max_tokens=1, temperature=0.0)
        [sequence] = self.sequences(0, GenerationRequest(prompt=asked.prompt, params=params), control)
        replicas = self.replicas(control)
        depends = saved_prefix.depends_on(replicas.replicas[0])
        self.generate(GenerationRequest(prompt=tuple(sequence.prompt_ids), params=params), control=control)
        return saved_prefix.save(path, replicas, sequence.prompt_ids, depends)

    @untraced
    @own_settings()
    def load_prefix(self, path: str | Path, *, control: Control | None = None) -> int:
        """Put the pages of a file of `save_prefix` into the prefix cache, and return how many tokens they hold.

        A prompt that begins with these tokens is prefilled from their end on. A `control` of another structure than the
        model's own has a separate prefix cache. Raises UsageError for a file that is damaged or that another model or
        other settings wrote, and if there are too few free pages.
        """
        return saved_prefix.load(path, self.replicas(control))

    def update(self, params: Any) -> None:
        """Replace the weights, as a trainer does between rollouts, without compiling anything.

        The new weights must have the structure, shapes and dtypes of the current `params`. Cached prefixes are evicted;
        the calibration of heads stays. Raises UsageError for other weights, and while requests are running.
        """
        self._use.check()
        self._decoders.update(params)

    def warm_up(self, control: Control | None = None, *, drafts: bool = True) -> None:
        """Compile every program that serving under `control` needs, so that no request waits for a compilation.

        Without `drafts` another thread compiles the largest program, the drafting one, and sequences begin without
        drafts, which does not change their tokens. If no programs are stored on disk, `drafts` has no effect.
        """
        self.replicas(control, drafts=drafts)

    def describe(self) -> list[str]:
        """Return readable lines that report what runs on which device, and its memory."""
        return description(self.settings, self.decoder_config, self.params, self._plan, self._remarks)

    def _requests(self, prompts: Prompts, params: SamplingParams | None, settings: dict) -> list[GenerationRequest]:
        return requests_of(prompts, params, settings, self.max_model_len)

    def _check_call(
        self, control: Control | None, knobs: abc.Mapping[str, Any], cancelled: Callable[[], bool] | None = None
    ) -> Control | None:
        """Return the control of a call, its preset with the `knobs`. Raises UsageError if it is not supported."""
        self._use.check()
        check_untraced()
        control = self.settings.with_knobs(control, knobs)
        self._decoders.configuration(control)
        if not (cancelled is None or callable(cancelled)):
            raise UsageError(f"cancelled is {values.shown(cancelled)}; it must be a function without arguments.")
        return control

    def _checked(self, requests: list[GenerationRequest], control: Control | None) -> list[Sequence]:
        """Return the sequences of all requests, so that every request is checked before any of them runs."""
        return [one for index, request in enumerate(requests) for one in self.sequences(index, request, control)]

    def sequences(
        self, prompt_index: int, request: GenerationRequest, control: Control | None = None
    ) -> list[Sequence]:
        """Return the `n` sequences of a request, not submitted yet; events name the request by `prompt_index`.

        Raises UsageError if the model cannot run the request.
        """
        config = self._decoders.configuration(control)
        adapters = tuple(self.settings.adapters or ())
        return sequences_of(
            request, prompt_index, grammars=self._grammars, config=config, name=self.name, adapters=adapters
        )

    def _serve(
        self, asked: Iterable[Sequence | TokenEvent], control: Control | None, cancelled: Callable | None = None
    ) -> Generator[TokenEvent]:
        ahead, best = self.settings.replicas * self.decoder_config.num_slots + _AHEAD, BestOf()
        found = serve(self.replicas(control), best.watched(asked), ahead=ahead, cancelled=cancelled or (lambda: False))
        yield from best.chosen(found)

    def replicas(self, control: Control | None = None, *, drafts: bool = True) -> Replicas:
        """Return the replicas for a control's structure; the first call creates them and warms them up (`drafts` too).

        Idle replicas of other structures are dropped.
        """
        return self._decoders.replicas(control, drafts=drafts)

    def decoder(self, control: Control | None = None, keep: frozenset[Keep] = frozenset()) -> Decoder:
        """Return this model's decoder, a set of pure functions; `keep` is that of `DecoderConfig`.

        Controllers of the same structure share compilations. The model caches the most recently used decoders.
        """
        self._use.check()
        return self._decoders.decoder(control, keep)
