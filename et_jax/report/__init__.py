"""What a person sees of a run: text as it comes, a summary, a picture."""
