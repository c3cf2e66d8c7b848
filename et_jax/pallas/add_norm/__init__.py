"""Addition to the residual stream, and the norm that follows, by one kernel."""

from et_jax.pallas.add_norm.api import add_norm as add_norm
