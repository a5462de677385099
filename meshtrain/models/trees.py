"""Parts of nested dicts, such as the trained parameters and all others."""

from collections.abc import Callable, Mapping
from typing import Any

import jax

Tree = Any  # nested dict


def matching(tree: Tree, is_wanted: Callable[[str], bool], prefix: str = "") -> Tree:
    """Returns the leaves with a wanted path, such as layers/mlp/up/kernel; no dict is empty."""
    found = {}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping):
            if inner := matching(value, is_wanted, f"{path}/"):
                found[key] = inner
        elif is_wanted(path):
            found[key] = value
    return found


def intersect(tree: Tree, like: Tree) -> Tree:
    """Returns the leaves that `like` has as well."""
    return {
        key: intersect(tree[key], one) if isinstance(one, Mapping) else tree[key]
        for key, one in like.items()
    }


def difference(tree: Tree, like: Tree) -> Tree:
    """Returns the leaves that `like` lacks."""
    found = {}
    for key, value in tree.items():
        if not isinstance(value, Mapping):
            found |= {} if key in like else {key: value}
        elif inner := difference(value, like.get(key, {})):
            found[key] = inner
    return found


def merge(tree: Tree, part: Tree) -> Tree:
    """Returns `tree` with the leaves of `part` added, or in place of its own."""
    merged = dict(tree)
    for key, value in part.items():
        is_inner = isinstance(value, Mapping) and key in tree
        merged[key] = merge(tree[key], value) if is_inner else value
    return merged


def name_of(path: tuple) -> str:
    """Returns the path of a leaf as text: layers/mlp/up/kernel."""
    return jax.tree_util.keystr(path, simple=True, separator="/")
