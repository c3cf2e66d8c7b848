"""Does each temperature law hold its target entropy?

Every law continues the same prompts with the same seeds; end tokens are not heeded. The tempered entropy is that of the
distribution a token was drawn from, before truncation. For Mirostat the target is a surprisal. `fixed` and `edt` know
no target.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from et_jax.control import temperature, temperature_rules
from et_jax.control.controller import Controller
from et_jax.serve.engine import Model, load
from scripts.measuring import experiment, text
from scripts.measuring.experiment import Base, Figure, Group, grouped, setting
from scripts.measuring.states import prefilled

CLIP = {"low": 0.1, "high": 2.0}  # of every law and rule


class Settings(Base):
    """Flags of the experiment."""

    model: str = experiment.model()
    text: Path = experiment.text()
    prompts: int = setting(8, "sequences, decoded together", least=2, quick=2)
    prompt_tokens: int = setting(17, "tokens of a prompt", least=2)
    tokens: int = setting(256, "tokens of each continuation", least=8, quick=24)
    burn_in: int = setting(32, "first tokens that are left out", least=0, quick=8)
    targets: tuple[float, ...] = setting((1.0, 2.0, 3.0), "target entropies, nats", least=0.01, quick=(1.0,))


def controllers(target: float) -> dict[str, Controller]:
    """Return the laws and rules, those that aim at `target` nats after those that do not."""
    solve = temperature_rules.Solve(target, **CLIP)
    return {
        "fixed": Controller(),  # its laws leave the temperature alone
        "edt": Controller(temperature_rule=temperature_rules.EDT(1.0)),
        "thermostat": Controller(law=temperature.Thermostat(target, 0.05, **CLIP)),
        "damped thermostat": Controller(law=temperature.DampedThermostat(target, **CLIP)),
        "mirostat2": Controller(law=temperature.Mirostat2(target)),
        "newton": Controller(temperature_rule=temperature_rules.Newton(target, **CLIP)),
        "solve": Controller(temperature_rule=solve),
        "cool only, solve": Controller(temperature_rule=temperature_rules.CoolOnly(solve)),
    }


def continued(model: Model, control: Controller, prompts: np.ndarray, num_tokens: int, seed: int) -> dict[str, Any]:
    """Return what each token of each prompt's continuation showed, "r t"."""
    decoder = model.decoder(control)
    state = prefilled(decoder, model.weights, prompts.tolist(), limit=num_tokens, temperature=1.0, seed=seed)
    bursts = []
    while sum(len(one.token) for one in bursts) < num_tokens:
        state, outputs, ran = decoder.decode(model.weights, state, decoder.config.max_steps)
        bursts.append(jax.tree.map(lambda x, ran=int(ran): np.asarray(x)[:ran, 0], outputs))
    output = jax.tree.map(lambda *leaves: np.concatenate(leaves).swapaxes(0, 1), *bursts)
    shown = {name: getattr(output.signals, name) for name in ("tempered_entropy", "surprisal")}
    return shown | {"temperature": output.temperature}


def groups(settings: Settings) -> Iterator[Group]:
    """Yield a group for each target."""
    served = load(settings.model, dtype="float32", max_num_seqs=settings.prompts)
    length = settings.prompt_tokens + settings.tokens
    passages = text.rows(served, settings.text, settings.prompts, length)

    def arm(name: str, target: float) -> dict[str, Any]:
        prompts = passages[:, : settings.prompt_tokens]
        shown = continued(served, controllers(target)[name], prompts, settings.tokens, settings.seed)
        late = {name: np.asarray(one)[:, settings.burn_in :] for name, one in shown.items()}
        means = {name: one.mean(axis=1) for name, one in late.items()}
        off = np.abs(late["tempered_entropy"] - target).mean(axis=1)
        return means | {"off": off}

    yield from grouped("target, nats", settings.targets, controllers(1.0), arm, "fixed")


FIGURES = {
    "tempered_entropy": Figure(header="tempered entropy, nats"),
    "off": Figure(header="off the target, nats", against="difference"),
    "surprisal": Figure(header="surprisal, nats"),
    "temperature": Figure(header="temperature"),
}
