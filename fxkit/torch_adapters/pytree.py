"""Nested containers as a list of leaves and a structure: by the functions that torch.fx uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fxkit.torch_adapters.private_names import private

_MODULE = "torch.utils._pytree"
_NESTS = "looking into nested containers"
_OURS = "tuples, lists and dicts are looked into, and no other containers"
_COMPOSED = "it is composed of the others"
_FLATTEN = private(f"{_MODULE}.tree_flatten", _NESTS, _OURS)
_UNFLATTEN = private(f"{_MODULE}.tree_unflatten", _NESTS, _OURS)
_LEAVES = private(f"{_MODULE}.tree_leaves", _NESTS, _COMPOSED)
_MAP = private(f"{_MODULE}.tree_map", _NESTS, _COMPOSED)
_MAP_ONLY = private(f"{_MODULE}.tree_map_only", _NESTS, _COMPOSED)
_ARG_LEAVES = private(f"{_MODULE}.arg_tree_leaves", _NESTS, _COMPOSED)
_REGISTERED = private(
    f"{_MODULE}.SUPPORTED_NODES",
    "containers of other classes",
    "arguments can't hold tensors in them",
)

_Test = Callable[[Any], bool] | None


class _Leaf:
    """Where a leaf stands in a structure."""


_LEAF = _Leaf()


def _children(nest: Any) -> list[Any] | None:
    kind = type(nest)
    if kind in (list, tuple) or (issubclass(kind, tuple) and hasattr(kind, "_fields")):
        return list(nest)
    return list(nest.values()) if kind is dict else None


def _like(nest: Any, children: list[Any]) -> Any:
    if type(nest) is dict:
        return dict(zip(nest, children, strict=True))
    return type(nest)(*children) if hasattr(nest, "_fields") else type(nest)(children)


def _flatten(tree: Any, is_leaf: _Test = None) -> tuple[list[Any], Any]:
    children = None if is_leaf is not None and is_leaf(tree) else _children(tree)
    if children is None:
        return [tree], _LEAF
    parts = [_flatten(child, is_leaf) for child in children]
    return [leaf for leaves, _ in parts for leaf in leaves], _like(tree, [it[1] for it in parts])


def _unflatten(leaves: Any, treespec: Any) -> Any:
    remaining = iter(leaves)

    def build(spec: Any) -> Any:
        children = _children(spec)
        return next(remaining) if children is None else _like(spec, list(map(build, children)))

    return build(treespec)


def _tree_leaves(tree: Any, is_leaf: _Test = None) -> list[Any]:
    return tree_flatten(tree, is_leaf=is_leaf)[0]


def _tree_map(func: Callable[..., Any], tree: Any, *rests: Any, is_leaf: _Test = None) -> Any:
    leaves, spec = tree_flatten(tree, is_leaf=is_leaf)
    others = [tree_flatten(rest, is_leaf=is_leaf)[0] for rest in rests]
    return tree_unflatten(map(func, leaves, *others), spec)


def _tree_map_only(kinds: Any, func: Callable[[Any], Any], tree: Any, is_leaf: _Test = None) -> Any:
    def change(leaf: Any) -> Any:
        return func(leaf) if isinstance(leaf, kinds) else leaf

    return tree_map(change, tree, is_leaf=is_leaf)


def _arg_tree_leaves(*args: Any, **kwargs: Any) -> list[Any]:
    return tree_leaves((args, kwargs))


_of_nests = (_FLATTEN.get(), _UNFLATTEN.get())
if None in _of_nests:
    _of_nests = (_flatten, _unflatten)
tree_flatten: Callable[..., Any] = _of_nests[0]
tree_unflatten: Callable[..., Any] = _of_nests[1]
tree_leaves: Callable[..., list[Any]] = _LEAVES.get(_tree_leaves)
tree_map: Callable[..., Any] = _MAP.get(_tree_map)
tree_map_only: Callable[..., Any] = _MAP_ONLY.get(_tree_map_only)
arg_tree_leaves: Callable[..., list[Any]] = _ARG_LEAVES.get(_arg_tree_leaves)
SUPPORTED_NODES: dict[type, Any] = _REGISTERED.get({})
