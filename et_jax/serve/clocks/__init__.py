"""What drafts go by: `step_clock` measures what steps take, `past_drafts` how drafts have fared."""
