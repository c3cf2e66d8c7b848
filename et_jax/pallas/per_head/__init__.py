"""One function of a row and KV head run for all of them: a single GPU kernel where it fits in one."""

from et_jax.pallas.per_head.api import Listed as Listed
from et_jax.pallas.per_head.api import Pages as Pages
from et_jax.pallas.per_head.api import PerHead as PerHead
from et_jax.pallas.per_head.api import PerQuery as PerQuery
from et_jax.pallas.per_head.api import PerRow as PerRow
from et_jax.pallas.per_head.api import Placed as Placed
from et_jax.pallas.per_head.api import fits as fits
from et_jax.pallas.per_head.api import per_head as per_head
from et_jax.pallas.per_head.api import per_head_into as per_head_into
