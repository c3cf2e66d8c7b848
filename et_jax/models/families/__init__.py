"""Families of models: one file a family, which says what its config.json means and what its tensors are named.

    registry -> llama, mistral, qwen2, qwen3, phi3, olmo2, smollm3, granite -> base
                mixtral, qwen2_moe, qwen3_moe, gpt_oss
                gemma3 -> gemma3_text -> gemma2

`base` is what a family has to say, and what several say alike; `registry` finds a family by a name, and reads and
writes config.json by it. No family's name stands elsewhere in the package, but where models are described.
"""
