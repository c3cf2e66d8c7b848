"""A new sequence's request, as arrays for the device."""

from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from et_jax.control.controller import Controller
from et_jax.decode.config import DecoderConfig
from et_jax.decode.fresh import law_numbers
from et_jax.decode.sampling.settings import Sampling
from et_jax.decode.sampling.steering import Steering, steering_fields
from et_jax.scope import within
from et_jax.types import pytree


@pytree
class Request:
    """A new sequence: the last token of its prompt, its settings, and the numbers of its laws.

    `limit` is the number of tokens to produce, `stop_ids` is padded with -1, `in_prompt` marks the prompt's tokens, and
    `steering` has forbidden and biased tokens; both are None without `DecoderConfig.penalties`. `index` is folded into
    the key, so that several continuations of a prompt differ. `logprobs` requests alternatives. `text` has the prompt's
    tokens; `num_drafted` is the most to draft in a step.
    """

    token: Int[Array, ""]
    limit: Int[Array, ""]
    arrival: Int[Array, ""]
    urgency: Float[Array, ""]
    index: Int[Array, ""]
    stop_ids: Int[Array, " i"]
    logprobs: Bool[Array, ""]
    sampling: Sampling
    laws: Controller
    in_prompt: Bool[Array, " v"] | None
    steering: Steering | None
    text: Int[Array, " n"]
    num_drafted: Int[Array, ""]


@within
def request(
    config: DecoderConfig,
    prompt: Sequence[int],
    *,
    limit: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    top_n_sigma: float = 0.0,
    min_k: float = 0.0,
    typical_p: float = 1.0,
    eta_cutoff: float = 0.0,
    top_h: float = 0.0,
    p_less: bool = False,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    seed: int = 0,
    index: int = 0,
    stop_ids: Sequence[int] = (),
    logprobs: bool = False,
    arrival: int = 0,
    urgency: float = 0.0,
    control: Controller | None = None,
    num_drafted: int | None = None,
    logit_bias: Mapping[int, float] | None = None,
    allowed_token_ids: Sequence[int] | None = None,
    bad_words: Sequence[Sequence[int]] = (),
    min_tokens: int = 0,
    constrained: bool = False,
) -> Request:
    """Return the request to continue `prompt` by `limit` tokens; all its tokens but the last must be prefilled.

    The settings are those of `sampling.Sampling`. Stop ids outside the vocabulary are dropped; more than
    `config.num_stop_ids` raise ValueError. `control` has the request's numbers (default: `config.controller`); another
    structure raises ValueError. At most `num_drafted` tokens are drafted in a step (default: the decoder's maximum).
    `logit_bias`, `allowed_token_ids`, `bad_words` (as token ids), `min_tokens` and `constrained` are those of
    `steering.steering_fields`.
    """
    laws = config.controller if control is None else control
    if jax.tree.structure(laws) != jax.tree.structure(config.controller):
        raise ValueError("control: got another structure than that of the decoder, wanted other numbers alone")
    size = config.model.vocab_size
    stops = [token for token in stop_ids if 0 <= token < size]
    if len(stops) > config.num_stop_ids:
        raise ValueError(f"stop_ids: got {len(stops)}, wanted at most num_stop_ids = {config.num_stop_ids}")
    in_prompt = np.zeros(size, bool)
    in_prompt[list(prompt)] = True
    settings = {
        "temperature": np.float32(temperature),
        "top_k": np.int32(min(top_k, size)),
        "top_p": np.float32(top_p),
        "min_p": np.float32(min_p),
        "top_n_sigma": np.float32(top_n_sigma),
        "min_k": np.float32(min_k),
        "typical_p": np.float32(typical_p),
        "eta_cutoff": np.float32(eta_cutoff),
        "top_h": np.float32(top_h),
        "p_less": np.bool_(p_less),
        "repetition_penalty": np.float32(repetition_penalty),
        "presence_penalty": np.float32(presence_penalty),
        "frequency_penalty": np.float32(frequency_penalty),
        "key": np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32),
    }
    fields = {
        "token": np.int32(prompt[-1]),
        "limit": np.int32(limit),
        "arrival": np.int32(arrival),
        "urgency": np.float32(urgency),
        "index": np.int32(index),
        "stop_ids": np.array([*stops, *[-1] * (config.num_stop_ids - len(stops))], np.int32),
        "logprobs": np.bool_(logprobs),
        "laws": law_numbers(laws),
        "in_prompt": in_prompt if config.penalties else None,
        "text": np.zeros(config.max_length, np.int32),
        "num_drafted": np.int32(0),
    }
    fields["text"][: len(prompt)] = prompt
    if config.draft is not None:
        most = config.draft.most
        fields["num_drafted"] = np.int32(most if num_drafted is None else min(num_drafted, most))
    steered = {"bias": logit_bias or {}, "allowed": allowed_token_ids, "words": bad_words, "min_tokens": min_tokens}
    steered["constrained"] = constrained
    steering = steering_fields(size, **steered) if config.penalties else None
    if steering is None and any(steered.values()):
        raise ValueError("penalties: got False, wanted True for a request that is steered")
    fields, settings, steering = jax.device_put((fields, settings, steering))  # one transfer for all
    fields["steering"] = None if steering is None else Steering(**steering)
    return Request(sampling=Sampling(**settings), **fields)
