"""et_jax: a decoder that lets the entropy of the next token run the engine."""
