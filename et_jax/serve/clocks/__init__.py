"""Measurements for draft laws: `step_clock` fits the times of steps, `past_drafts` the acceptance rate of drafts."""
