"""The acceptance rate and savings of drafts over all sequences, with which draft laws start a new sequence."""

import dataclasses

from et_jax.control.draft import FIRST_CREDIT, TRIAL, PastDrafts

SUPPOSED = 4.0  # drafted tokens: the weight of the prior acceptance rate
MOST_SAVED = 2 * FIRST_CREDIT  # plain steps: the limit on `credit`, so that old savings do not pay for ever
FORGOTTEN = 1000.0  # steps: the half-life of the counts, so that drafts are proposed again


@dataclasses.dataclass
class DraftRecord:
    """Decayed counts of drafted tokens: `verified`, with all predecessors accepted, and `accepted`.

    `credit` is the time that drafts have saved, in plain steps, plus the share `TRIAL` of all steps.
    """

    verified: float = 0.0
    accepted: float = 0.0
    credit: float = FIRST_CREDIT

    def record(self, steps: int, verified: int, accepted: int, saved: float) -> None:
        """Record `steps` steps, and the time that drafts saved in them, in plain steps; negative if they cost more."""
        decay = 0.5 ** (steps / FORGOTTEN)
        self.verified, self.accepted = decay * self.verified + verified, decay * self.accepted + accepted
        self.credit = min(self.credit + TRIAL * steps + saved, MOST_SAVED)

    def past(self) -> PastDrafts:
        """Return the summary that a draft law receives."""
        accepted = self.accepted + SUPPOSED * PastDrafts.acceptance
        return PastDrafts(acceptance=accepted / (self.verified + SUPPOSED), credit=self.credit)
