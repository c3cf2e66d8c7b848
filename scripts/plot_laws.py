"""Draw the control laws to docs/figures, one picture a family, on synthetic signals: no model is run.

clocks        four clocks on one falling, flickering entropy
contraction   the thermostat's error on fixed logits, for three products of gain and varentropy
tolerance     how the two entropy-driven tolerances answer to entropy
aging         the wait of a sequence that always scores least, against its bound
interval      what the k likeliest tokens say of an entropy
"""

import argparse
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from matplotlib.figure import Figure

from et_jax.control import clock, entropy, priority, temperature, temperature_rules, tolerance
from et_jax.control.base import ControlState, Law, Signals
from et_jax.decode.fresh import blank_signals
from et_jax.evidence.figures import FIGURES, pyplot, save
from et_jax.types import replace

plt = pyplot()


def start(shape: tuple[int, ...] = ()) -> ControlState:
    """Return the control state of sequences before their first token, at temperature 1."""
    zero = jnp.zeros(shape, jnp.float32)
    return ControlState(
        entropy=zero,
        entropic_time=zero,
        total_cost=zero,
        temperature=zero + 1.0,
        surprisal_cap=zero + jnp.inf,
        tolerance=zero,
        priority=zero,
        wait=jnp.zeros(shape, jnp.int32),
        block_mask=jnp.zeros((*shape, 1, 1, 1), jnp.uint32),
        notes={},
    )


def raw(h: Array) -> Signals:
    """Return signals that show the raw entropy `h`, known exactly."""
    return replace(blank_signals(h.shape), entropy=h, entropy_low=h, entropy_high=h)


def states(law: Law, signals: Signals) -> ControlState:
    """Return the state after each token of `signals`."""
    return jax.lax.scan(lambda state, seen: (law(seen, state),) * 2, law.init(start()), signals)[1]


def clocks() -> Figure:
    """Draw what each clock reads while an entropy falls and flickers."""
    token = np.arange(200)
    jitter = np.random.default_rng(0).uniform(-0.15, 0.15, token.size)
    h = np.maximum(3.0 * np.exp(-token / 50) + 0.5 + 0.4 * np.sin(token / 7) * np.exp(-token / 80) + jitter, 0.0)
    laws = {
        "chain_rule": clock.ChainRuleClock(),
        "paper": clock.FallClock(),
        "deadband(0.05)": clock.FallClock(0.05),
        "record": clock.RecordClock(),
    }
    figure, axes = plt.subplots(2, 1, figsize=(6.4, 4), sharex=True, layout="constrained", height_ratios=[2, 3])
    axes[0].plot(token, h, color="black", linewidth=0.8)
    axes[0].set(ylabel="raw entropy, nats", ylim=(0, None))
    for name, law in laws.items():
        axes[1].plot(token, states(law, raw(jnp.asarray(h, jnp.float32))).entropic_time, label=name)
    axes[1].set(ylabel="entropic time, nats", xlabel="token", yscale="log", ylim=(0.1, None))
    axes[1].legend(fontsize=8)
    return figure


def contraction() -> Figure:
    """Draw log T - log T* of the thermostat on fixed logits, V taken at the set point."""
    logits, target = 2.5 * jax.random.normal(jax.random.key(0), (1000,)), 3.0

    def moments_at(heat: Array | float) -> tuple[Array, Array]:
        moments = entropy.moments(logits, heat)
        return entropy.entropy(moments), entropy.varentropy(moments)

    settled = temperature_rules.Solve(target, low=0.01, high=10.0)(moments_at, blank_signals(()), start())
    slope = float(moments_at(settled)[1])

    def errors(product: float) -> Array:
        law = temperature.Thermostat(target, product / slope, low=0.01, high=10.0)

        def step(state: ControlState, _: None) -> tuple[ControlState, Array]:
            seen = replace(blank_signals(()), tempered_entropy=moments_at(state.temperature)[0])
            return law(seen, state), jnp.log(state.temperature / settled)

        first = replace(start(), temperature=settled * jnp.exp(0.3))
        return jax.lax.scan(step, first, length=16)[1]

    figure, axis = plt.subplots(figsize=(6.4, 3), layout="constrained")
    for product in (0.5, 1.5, 2.2):
        axis.plot(errors(product), marker=".", label=f"gain V = {product}")
    axis.set(xlabel="token", ylabel="log T - log T*")
    axis.legend(fontsize=8, ncols=3, frameon=False, loc="lower right", bbox_to_anchor=(1.0, 1.0))
    return figure


def tolerances() -> Figure:
    """Draw the tolerance that each entropy-driven law settles at, against the raw entropy."""
    h = jnp.linspace(0.0, 3.0, 301)
    laws = {
        "entropy(), a share of mass": tolerance.EntropyTolerance(rise=jnp.inf),
        "paper(0.05, 2.0), a threshold": tolerance.EntropyThreshold(0.05, 2.0),
    }
    figure, axis = plt.subplots(figsize=(6.4, 3), layout="constrained")
    for name, law in laws.items():
        axis.plot(h, jax.vmap(law)(raw(h), law.init(start(h.shape))).tolerance, label=name)
    axis.set(xlabel="raw entropy, nats", ylabel="tolerance")
    axis.set_yscale("symlog", linthresh=1e-3)
    axis.legend(fontsize=8)
    return figure


def waits(rate: float, ceiling: float, runnable: int, served: int, steps: int) -> Array:
    """Return the wait of sequence 0 after each step, all others always scoring the ceiling and it 0."""
    rule = priority.Aged(lambda signals, state: signals.urgency, ceiling, rate)
    signals = replace(blank_signals((runnable,)), urgency=jnp.where(jnp.arange(runnable) > 0, ceiling, 0.0))

    def step(wait: Array, _: None) -> tuple[Array, Array]:
        score = jax.vmap(rule)(signals, replace(start((runnable,)), wait=wait))
        chosen = jax.lax.top_k(score[::-1], served)[1]  # of equal scores the last: ties go against sequence 0
        after = (wait + 1).at[runnable - 1 - chosen].set(0)
        return after, after[0]

    return jax.lax.scan(step, jnp.zeros(runnable, jnp.int32), length=steps)[1]


def aging() -> Figure:
    """Draw the wait of a sequence that always scores least, over time and against the bound."""
    ceiling, runnable, served, steps = 2.0, 8, 2, 400
    run = jax.jit(partial(waits, ceiling=ceiling, runnable=runnable, served=served, steps=steps), static_argnums=0)
    figure, axes = plt.subplots(1, 2, figsize=(7, 3), layout="constrained")
    for rate in (0.0, 0.02, 0.1):
        axes[0].plot(run(rate), label=f"rate {rate}")
    axes[0].set(xlabel="step", ylabel="wait, steps", ylim=(0, 160))
    axes[0].legend(fontsize=8)
    rates = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
    axes[1].plot(rates, [priority.waiting_bound(ceiling, rate, runnable, served) for rate in rates], label="bound")
    axes[1].plot(rates, [int(run(rate).max()) for rate in rates], ".", label="longest wait seen")
    axes[1].set(xlabel="aging rate a, score per step", ylabel="wait, steps", xscale="log", yscale="log")
    axes[1].legend(fontsize=8)
    figure.suptitle(f"{runnable} runnable, {served} served a step, ceiling {ceiling}", fontsize=9)
    return figure


def interval() -> Figure:
    """Draw the interval, the tail-corrected estimate and H^(k) of a power law, against k."""
    size = 32_000
    log_prob = jax.nn.log_softmax(-1.2 * jnp.log(jnp.arange(1, size + 1, dtype=jnp.float32)))
    true = float(entropy.entropy(entropy.moments(log_prob)))
    ks = np.unique(np.geomspace(1, size, 40).astype(int))
    estimates = [entropy.tail_corrected(log_prob[:k], size, 0.5) for k in ks]
    figure, axis = plt.subplots(figsize=(6.4, 3), layout="constrained")
    axis.fill_between(ks, [e.low for e in estimates], [e.high for e in estimates], alpha=0.3, label="interval")
    axis.plot(ks, [e.entropy for e in estimates], label="tail_corrected, share 1/2")
    axis.plot(ks, [entropy.top_k(log_prob[:k], size).entropy for k in ks], "--", label="H^(k) alone")
    axis.axhline(true, color="black", linewidth=0.8, linestyle=":", label="true entropy")
    axis.set(xlabel="k", ylabel="entropy, nats", xscale="log", title=f"p ~ rank^-1.2 over {size:,} tokens")
    axis.title.set_fontsize(9)
    axis.legend(fontsize=8)
    return figure


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    drawings = {
        "clocks": clocks,
        "contraction": contraction,
        "tolerance": tolerances,
        "aging": aging,
        "interval": interval,
    }
    for name, draw in drawings.items():
        path = FIGURES / f"{name}.png"
        print(f"{path.name}: {save(draw(), path)} bytes")


if __name__ == "__main__":
    main()
