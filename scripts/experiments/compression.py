"""What do caches lose that keep a part of their entries, by the policy that chooses them?

Rows of text are read as prompts, compressed by the decoder's own policies, and decoded on with the entries kept and
those that come. "latent" ranks when N_d tokens are decoded, the others once the prompt is read.
"""

from collections.abc import Iterator
from typing import Any

from et_jax.control.compression import named
from et_jax.control.policies import POLICIES
from scripts.measuring.experiment import Figure, Group, Missed, grouped, setting
from scripts.measuring.teacher_forced import FIGURES as OF_SCORES
from scripts.measuring.teacher_forced import Forced


class Settings(Forced):
    """Flags of the experiment."""

    shares: tuple[float, ...] = setting((0.5, 0.25, 0.125), "of entries", least=0.01, most=1.0, quick=(0.5,))
    policies: tuple[str, ...] = setting(
        tuple(POLICIES), "policies", choices=tuple(POLICIES), quick=("snapkv", "streaming")
    )


def groups(settings: Settings) -> Iterator[Group]:
    """Yield a group for each share of entries."""
    bench = settings.bench()
    page = bench.model.decoder_config.page_size

    def arm(name: str, share: float) -> dict[str, Any]:
        budget = round(share * bench.start / page) * page
        try:
            how = named(name, budget)
            region = how.layout(page, bench.model.config.windows).region * page
        except ValueError as error:
            raise Missed(str(error)) from error
        if region >= bench.start:
            raise Missed("it has room for the whole cache, and leaves nothing out")
        scores = bench.run(compression=how)
        return {"room": float(region)} | scores.by_row(*OF_SCORES)

    baseline = "snapkv" if "snapkv" in settings.policies else None
    yield from grouped("share", settings.shares, settings.policies, arm, baseline)


DIVERGENCE = Figure(header="KL from the full cache, nats", against="saving")
FIGURES = {"room": Figure(header="entries there is room for")} | OF_SCORES | {"divergence": DIVERGENCE}
