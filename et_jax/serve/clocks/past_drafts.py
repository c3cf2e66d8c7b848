"""How the drafts of all texts have fared, told to the laws of their lengths, so that a new text does not begin anew."""

import dataclasses

from et_jax.control.draft import FIRST_CREDIT, TRIAL, PastDrafts

SUPPOSED = 4.0  # drafted tokens: as much as those count that are supposed to be accepted before any is known
MOST_SAVED = 2 * FIRST_CREDIT  # plain steps: what was saved long ago pays for no more than this
FORGOTTEN = 1000.0  # steps after which what was known counts for half: what does not hold is tried again


@dataclasses.dataclass
class DraftRecord:
    """Of the drafted tokens of late so many were `tried`, their predecessors accepted, and so many `accepted`.

    `credit` is what drafts have saved, less what they took, in plain steps, and a hundredth of the steps.
    """

    tried: float = 0.0
    accepted: float = 0.0
    credit: float = FIRST_CREDIT

    def note(self, steps: int, tried: int, accepted: int, saved: float) -> None:
        """Note so many steps, and what drafts saved in them, in plain steps; below 0 where they cost more."""
        kept = 0.5 ** (steps / FORGOTTEN)
        self.tried, self.accepted = kept * self.tried + tried, kept * self.accepted + accepted
        self.credit = min(self.credit + TRIAL * steps + saved, MOST_SAVED)

    def told(self) -> PastDrafts:
        """Return what a law of lengths is told of it."""
        accepted = self.accepted + SUPPOSED * PastDrafts.acceptance
        return PastDrafts(acceptance=accepted / (self.tried + SUPPOSED), credit=self.credit)
