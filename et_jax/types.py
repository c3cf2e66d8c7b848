"""The floor everything stands on: axis letters, the pytree dataclass decorator, `replace`, one error.

Axis letters, the same in every signature: `b` slots or batch rows, `r` the rows a step serves, `t`
positions, `l` layers, `k` KV heads, `h` query heads, `g` query heads per KV head, `n` blocks per slot
(`n32` packed words of 32), `m` listed blocks, `p` pages, `s` page size, `d` head dim, `e` width of a
cached token (key and value side by side, padded), `w` model width, `f` feed-forward width, `v`
vocabulary. A *block* is logical, a *page* physical.
"""

import dataclasses
from typing import TypeVar, dataclass_transform

import jax
from jax.tree_util import GetAttrKey

T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def pytree(cls: type[T]) -> type[T]:
    """Return `cls` as a frozen keyword-only dataclass that is also a JAX pytree, every field a child.

    Unflattening bypasses `__init__`: JAX rebuilds trees around objects that are no arrays (shape
    structs, sentinels, layouts), which a shape-checking `__init__` would refuse.
    """
    cls = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
    names = tuple(field.name for field in dataclasses.fields(cls))

    def flatten(tree):
        return tuple(map(vars(tree).__getitem__, names)), None

    def flatten_with_keys(tree):
        return tuple((GetAttrKey(name), getattr(tree, name)) for name in names), None

    def unflatten(_, children):
        tree = object.__new__(cls)
        vars(tree).update(zip(names, children, strict=True))
        return tree

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
    return cls


def replace(tree: T, **changes) -> T:
    """Return `tree` with some fields changed, as `dataclasses.replace`, checked where the class checks."""
    return dataclasses.replace(tree, **changes)
