"""Runs a function of one row and KV head for all of them: as a single GPU kernel if it fits in one."""

from et_jax.pallas.per_head.api import fits as fits
from et_jax.pallas.per_head.api import per_head as per_head
from et_jax.pallas.per_head.api import per_head_into as per_head_into
from et_jax.pallas.per_head.inputs import Listed as Listed
from et_jax.pallas.per_head.inputs import Pages as Pages
from et_jax.pallas.per_head.inputs import PerHead as PerHead
from et_jax.pallas.per_head.inputs import PerQuery as PerQuery
from et_jax.pallas.per_head.inputs import PerRow as PerRow
from et_jax.pallas.per_head.inputs import Placed as Placed
