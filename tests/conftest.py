"""Every test runs with strict dtype promotion: a silent float32 next to a bfloat16 is an error."""

import jax

jax.config.update("jax_numpy_dtype_promotion", "strict")
