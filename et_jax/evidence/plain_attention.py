"""What a measurement asks of a model that it runs by attention of its own."""

from et_jax.models.config import ModelConfig, ModelShape


def require_plain_attention(config: ModelShape) -> None:
    """Raise ValueError unless each layer's attention is a softmax over all tokens, without a soft cap or sinks."""
    kinds = [config.softmax(layer) for layer in range(config.num_layers)]
    found = {
        "sliding windows": any(one.window is not None for one in kinds),
        "soft caps": any(one.soft_cap is not None for one in kinds),
        "sinks": isinstance(config, ModelConfig) and config.sinks,
    }
    if odd := [name for name, there in found.items() if there]:
        raise ValueError(
            f"config: got {' and '.join(odd)} in attention, wanted no sliding window, soft cap or sink in any layer"
        )
