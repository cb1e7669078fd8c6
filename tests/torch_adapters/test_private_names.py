"""Private names of torch, and private attributes, stand in `fxkit/torch_adapters` alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import fx, nn

import fxkit
from fxkit.torch_adapters import private_names

PACKAGE = Path(fxkit.__file__).parent
ROOM = PACKAGE / "torch_adapters"

# torch documents these, underscore or not.
DOCUMENTED = {"torch._check", "torch._assert"}
IMPORTERS = {"import_module", "__import__", "find_spec"}


def _private_attributes() -> frozenset[str]:
    """Return the private attributes of torch's nodes, graphs, modules, tensors and operators."""
    graph = fx.Graph()
    graph.output(graph.placeholder("x"))
    relu = torch.ops.aten.relu
    some = (
        *graph.nodes, graph, graph._graph_namespace, fx.GraphModule(nn.Module(), graph),
        torch.ones(1), torch.ones(1).untyped_storage(), torch.Generator(), relu, relu.default,
    )  # fmt: skip
    names = {name for one in some for name in dir(one)}
    return frozenset(n for n in names if n.startswith("_") and not n.startswith("__"))


ATTRIBUTES = _private_attributes()


def private_attributes(source: str) -> list[str]:
    """Return the private attributes of torch's objects that a module's code reads or writes.

    Those of `self`, `cls` and `super()` are its own, and operators are no attributes.
    """
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in ATTRIBUTES:
            owner = ast.unparse(node.value)
            is_own = owner in ("self", "cls", "super()")
            if not is_own and not owner.startswith(("torch.ops", "ATEN", "aten")):
                found.add(ast.unparse(node))
    return sorted(found)


def private_uses(source: str) -> list[str]:
    """Return the private names of torch that a module's code reaches, by imports or by dots.

    A name that the module binds to a part of torch, by an import or by a plain assignment, is
    followed. Operators (`torch.ops.…`) and what is written twice underscored are no private names.
    """
    tree = ast.parse(source)
    bound: dict[str, str] = {}
    found = []
    for node in ast.walk(tree):
        for name, path in _bindings(node):
            bound[name] = path
            found.append(path)
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            path = _path_of(node.value, bound)
            if path is not None:
                bound[node.targets[0].id] = path
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
            path = _path_of(node.value, bound)
            if path is not None:
                bound[node.target.id] = path
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            found.append(_path_of(node, bound) or "")
        if isinstance(node, ast.Call) and _last_of(node.func) in IMPORTERS | {"getattr"}:
            found.extend(_named_by(node, bound))
    return sorted({path for path in found if _is_private(path)})


def _bindings(node: ast.AST) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            if alias.name.partition(".")[0] == "torch":
                yield (alias.asname, alias.name) if alias.asname else ("torch", "torch")
                if _is_private(alias.name):
                    yield "", alias.name
    elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
        for alias in node.names:
            yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _path_of(node: ast.AST, bound: dict[str, str]) -> str | None:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in bound:
        return None
    return ".".join([bound[node.id], *reversed(parts)])


def _named_by(call: ast.Call, bound: dict[str, str]) -> Iterator[str]:
    """Yield what `import_module("torch._x")` or `getattr(torch, "_x")` names."""
    texts = [a.value for a in call.args if isinstance(a, ast.Constant) and type(a.value) is str]
    if _last_of(call.func) != "getattr":
        yield from (text for text in texts if text.partition(".")[0] == "torch")
        return
    owner = _path_of(call.args[0], bound) if call.args else None
    if owner is not None:
        yield from (f"{owner}.{text}" for text in texts[:1])


def _last_of(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _is_private(path: str) -> bool:
    if path.startswith("torch.ops.") or path in DOCUMENTED:
        return False
    return any(part.startswith("_") and not part.startswith("__") for part in path.split("."))


def test_no_private_name_stands_outside_of_the_room() -> None:
    found = {
        str(path.relative_to(PACKAGE)): uses
        for path in sorted(PACKAGE.rglob("*.py"))
        if ROOM not in path.parents and (uses := private_uses(path.read_text()))
    }
    assert found == {}


def test_no_private_attribute_is_read_outside_of_the_room() -> None:
    found = {
        str(path.relative_to(PACKAGE)): uses
        for path in sorted(PACKAGE.rglob("*.py"))
        if ROOM not in path.parents and (uses := private_attributes(path.read_text()))
    }
    assert found == {}


@pytest.mark.parametrize(
    "planted",
    ["node._input_nodes", "gm.graph._len += 1", "x.untyped_storage()._cdata", "m._parameters"],
)
def test_a_planted_private_attribute_is_found(planted: str) -> None:
    assert private_attributes(planted)


@pytest.mark.parametrize(
    "planted", ["self._args = args", "super()._parameters", "torch.ops.aten._to_copy", "node.args"]
)
def test_what_is_no_private_attribute_is_left_alone(planted: str) -> None:
    assert private_attributes(planted) == []


@pytest.mark.parametrize(
    "planted",
    [
        "import torch\ntorch._C._len_torch_dispatch_stack()",
        "import torch._dynamo",
        "import torch._dynamo as dynamo",
        "from torch import _C",
        "from torch.utils import _pytree as pytree",
        "from torch._ops import OpOverload",
        "from torch.fx.graph import _PyTreeCodeGen",
        "from torch.autograd import forward_ad\nforward_ad._current_level",
        "import torch\nautograd: Any = torch.autograd\nautograd._enable_profiler_legacy()",
        "import torch\ndef late():\n    return getattr(torch.nn, '_reduction')",
        "import importlib\nimportlib.import_module('torch._refs')",
    ],
)
def test_a_planted_private_name_is_found(planted: str) -> None:
    assert private_uses(planted)


@pytest.mark.parametrize(
    "planted",
    [
        "import torch\ntorch.ops.aten._to_copy.default(x)",
        "import torch\ntorch.Tensor.__add__",
        "from torch.fx import Graph",
        "import torch\ntorch._check(True)",
        "x._version",
    ],
)
def test_what_is_no_private_name_is_left_alone(planted: str) -> None:
    assert private_uses(planted) == []


def test_each_name_says_what_it_is_for_and_what_is_done_without() -> None:
    names = private_names.declared()
    assert len(names) > 60
    assert [n.path for n in names if not (n.purpose and n.without and _is_private(n.path))] == []


def test_torchs_that_are_supported_lack_nothing() -> None:
    assert private_names.missing() == ()


def test_a_name_that_is_lost_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = private_names.PrivateName("torch._C._lost", "a test", "nothing is done", (2, 11), None)
    older = private_names.PrivateName("torch._C._older", "a test", "nothing", (1, 0), (2, 0))
    assert lost.is_missing() and not older.is_missing()
    with pytest.warns(UserWarning, match=r"has no torch\._C\._lost, which fxkit needs for a test"):
        lost.warn()
    lost.warn()  # once only: a warning would be an error here
