"""Tokens guessed ahead, and two models that take turns.

`drafts` says how drafts are laid out in a step, `drafter` writes them with a second model or with the model itself.
`turns` has two models speak in turns.
"""
