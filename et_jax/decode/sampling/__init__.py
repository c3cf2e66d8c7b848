"""From logits to a token.

`sample` does it all: it applies penalties and `steering`, sets the temperature, applies `truncation`, and draws by the
`noise` of the request. `settings` has what a request asks for.
"""
