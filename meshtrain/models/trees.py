"""Parts of nested dicts, such as the trained parameters and all others."""

from collections.abc import Callable, Mapping
from typing import Any

import jax

Tree = Any  # nested dict


def matching(tree: Tree, is_wanted: Callable[[str], bool], prefix: str = "") -> Tree:
    """Returns the leaves with a wanted path, such as layers/mlp/up/kernel; no dict is empty."""
    part = {}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping):
            if inner := matching(value, is_wanted, f"{path}/"):
                part[key] = inner
        elif is_wanted(path):
            part[key] = value
    return part


def intersect(tree: Tree, like: Tree) -> Tree:
    """Returns the leaves that `like` has as well."""
    part = {}
    for key, value in like.items():
        is_inner = isinstance(value, Mapping)
        part[key] = intersect(tree[key], value) if is_inner else tree[key]
    return part


def difference(tree: Tree, like: Tree) -> Tree:
    """Returns the leaves that `like` lacks."""
    part = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            if inner := difference(value, like.get(key, {})):
                part[key] = inner
        elif key not in like:
            part[key] = value
    return part


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


def leaf(tree: Any, path: str) -> Any:
    """Returns the leaf, or the tree, at a path such as layers/mlp/up/kernel."""
    for key in path.split("/"):
        tree = tree[key]
    return tree


def nested(path: str, value: Any) -> Any:
    """Returns dicts that hold `value` at a path."""
    for key in reversed(path.split("/")):
        value = {key: value}
    return value
