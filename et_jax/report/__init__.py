"""What a person sees of a run: `display` (text as it comes, a summary) and `plot` (a picture); `trace` keeps it."""
