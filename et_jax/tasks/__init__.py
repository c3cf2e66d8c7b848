"""Questions whose answers stand far back in a text, and the loss of a text by position."""
