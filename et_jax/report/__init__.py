"""What a person sees of a run: `display` (text as it comes, trace rows, a summary) and `plot` (a picture)."""
