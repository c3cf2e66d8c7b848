"""Policy gradient on the bundled model, which generates its own rollouts: the text learns to have more of a letter.

    python -m scripts.policy_gradient --steps 10

REINFORCE (Williams 1992): the reward of a continuation is the share of its characters that are the letter, less the
mean of its batch. Each step samples a batch, follows the gradient of the log-probabilities of the tokens drawn, and
replaces the weights of the decoder, which compiles nothing anew.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax

import et_jax
from et_jax.training.rollouts import log_probs, rollouts

PROMPT, LETTER, BATCH, TOKENS, RATE = "It was", "e", 32, 24, 1e-3


def main() -> None:
    """Train for some steps, and print the reward and the entropy before each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bundled", help="as for et_jax.generate (default: bundled)")
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    model = et_jax.load(args.model, dtype="float32", max_num_seqs=BATCH, max_model_len=128)
    prompt = model.tokenizer.encode(PROMPT)
    optimizer = optax.adam(RATE)
    memory = optimizer.init(model.params)

    @jax.jit
    def improved(params, memory, tokens, weights):
        def loss(params):
            return -jnp.sum(weights * log_probs(params, model.config, tokens))

        gradient = jax.grad(loss)(params)
        change, memory = optimizer.update(gradient, memory, params)
        return optax.apply_updates(params, change), memory

    for step in range(args.steps + 1):
        completions = model.generate([prompt], n=BATCH, max_tokens=TOKENS, ignore_eos=True, seed=step)
        reward = np.array([one.text.count(LETTER) / max(len(one.text), 1) for one in completions])
        data = rollouts([prompt] * BATCH, completions, len(prompt) + TOKENS)
        differing = np.abs(data.log_probs - log_probs(model.params, model.config, data.tokens))[data.generated].max()
        print(
            f"step {step}: reward {reward.mean():.4f}, entropy {data.entropies[data.generated].mean():.3f} nats, "
            f"log-probabilities within {differing:.1e} of the trainer's, "
            f"{model.metrics.programs_compiled_late} programs compiled late"
        )
        if step < args.steps:
            advantage = (reward - reward.mean()) / (reward.std() + 1e-6)
            weights = advantage[:, None] * data.generated / data.generated.sum()
            params, memory = improved(model.params, memory, data.tokens, weights)
            model.update(params)


if __name__ == "__main__":
    main()
