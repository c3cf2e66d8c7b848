"""Families of models: one file a family, which says what its config.json means and what its tensors are named.

    registry -> llama, mistral, mixtral, qwen2, qwen2_moe, qwen3, qwen3_moe -> base

`base` is what a family has to say, and what several say alike; `registry` finds a family by a name, and reads and
writes config.json by it. No family's name stands elsewhere in the package, but where models are described.
"""
