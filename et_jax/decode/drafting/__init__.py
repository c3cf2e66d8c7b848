"""Drafted tokens, and two models that take turns.

`drafts` lays out the drafts of a step, `drafter` writes them with a second model or with the model itself, and
`drafted_rows` verifies them as rows of the step.
`turns` alternates between two models.
"""
