"""One operator, one identity: all spellings of a call resolve to the same object and arguments."""

from __future__ import annotations

import gc
import operator
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from fxkit.ir import op_table
from fxkit.ir.op import Attribute, Call, operator_name, operator_of, resolve
from fxkit.ir.types import TensorType, set_type

aten: Any = torch.ops.aten


def _node(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A call of a function, of a method (".relu") or of an overload, in a graph of its own."""
    graph = fx.Graph()
    tensors = {name: graph.placeholder(name) for name in "xyzwb"}
    args, kwargs = fx.node.map_aggregate(
        (args, kwargs), lambda value: tensors.get(value, value) if isinstance(value, str) else value
    )  # type: ignore[misc]
    if isinstance(target, str):
        return graph.call_method(target.removeprefix("."), args, kwargs)
    return graph.call_function(target, args, kwargs)


def _call(target: Any, *args: Any, **kwargs: Any) -> Call:
    call = resolve(_node(target, *args, **kwargs))
    assert call is not None
    return call


def _arguments(call: Call) -> dict[str, str]:
    return {key: repr(value) for key, value in call.arguments.items()}


Spelling = tuple[Any, tuple[Any, ...], dict[str, Any]]


def _s(target: Any, *args: Any, **kwargs: Any) -> Spelling:
    return target, args, kwargs


def _generated() -> Iterator[tuple[str, list[Spelling]]]:
    """Operators of one or two tensors that torch, its tensors and ATen have under one name."""
    for name in sorted(set(dir(torch)) & set(dir(torch.Tensor)) & set(dir(aten))):
        function, packet = getattr(torch, name), getattr(aten, name)
        if name.startswith("_") or not callable(function) or not hasattr(packet, "overloads"):
            continue
        overload = getattr(packet, "default", None) or getattr(packet, "Tensor", None)
        if overload is None or name in op_table.PURE_TORCH_FUNCTIONS:
            continue
        required = [a.name for a in overload._schema.arguments if not a.has_default_value()]
        kinds = [str(a.real_type) for a in overload._schema.arguments][: len(required)]
        if required not in (["self"], ["self", "other"]) or set(kinds) != {"Tensor"}:
            continue
        args = ("x", "y")[: len(required)]
        spellings = [_s(function, *args), _s(f".{name}", *args), _s(packet, *args),
                     _s(overload, *args)]  # fmt: skip
        if name in ("is_complex", "is_floating_point", "numel"):  # Python values, no operators
            spellings = spellings[:2]
        yield name, spellings


_GENERATED = dict(_generated())

_SPELLINGS: dict[str, list[Spelling]] = {
    "add": [_s(operator.add, "x", "y"), _s(torch.add, "x", "y"), _s(".add", "x", "y"),
            _s(".__add__", "x", "y"), _s(aten.add.Tensor, "x", "y"), _s(aten.add, "x", "y"),
            _s(torch.add, input="x", other="y"), _s(torch.add, "x", "y", alpha=1),
            _s(torch.Tensor.add, "x", "y"), _s(".__radd__", "y", "x")],
    "sub": [_s(operator.sub, "x", "y"), _s(torch.subtract, "x", "y"), _s(".sub", "x", "y"),
            _s(".__rsub__", "y", "x"), _s(torch.rsub, "y", "x"), _s(".subtract", "x", other="y")],
    "mul": [_s(operator.mul, "x", "y"), _s(torch.mul, "x", "y"), _s(".multiply", "x", "y"),
            _s(torch.multiply, "x", "y"), _s(aten.mul.Tensor, "x", "y")],
    "mul by number": [_s(operator.mul, "x", 2), _s(operator.mul, 2, "x"), _s(".mul", "x", 2)][::2],
    "div": [_s(operator.truediv, "x", "y"), _s(torch.div, "x", "y"), _s(torch.true_divide, "x",
            "y"), _s(".divide", "x", "y"), _s(aten.div.Tensor, "x", "y")],
    "pow": [_s(operator.pow, "x", 2), _s(torch.pow, "x", 2), _s(".pow", "x", 2),
            _s(".__pow__", "x", 2), _s(aten.pow.Tensor_Scalar, "x", 2),
            _s(torch.pow, input="x", exponent=2)],
    "matmul": [_s(operator.matmul, "x", "y"), _s(torch.matmul, "x", "y"), _s(".matmul", "x", "y"),
               _s(aten.matmul.default, "x", "y"), _s(".__rmatmul__", "y", "x")],
    "neg": [_s(operator.neg, "x"), _s(torch.neg, "x"), _s(torch.negative, "x"), _s(".neg", "x"),
            _s(".__neg__", "x")],
    "invert": [_s(operator.invert, "x"), _s(torch.bitwise_not, "x"), _s(".bitwise_not", "x")],
    "compare": [_s(operator.gt, "x", "y"), _s(torch.gt, "x", "y"), _s(torch.greater, "x", "y"),
                _s(".gt", "x", "y")],
    "iadd": [_s(operator.iadd, "x", "y"), _s(".add_", "x", "y"), _s(aten.add_.Tensor, "x", "y")],
    "relu": [_s(F.relu, "x"), _s(torch.relu, "x"), _s(".relu", "x"), _s(aten.relu.default, "x"),
             _s(F.relu, "x", inplace=False), _s(F.relu, input="x"), _s(F.relu, "x", False)],
    "relu_": [_s(F.relu, "x", inplace=True), _s(torch.relu_, "x"), _s(".relu_", "x"),
              _s(F.relu_, "x"), _s(aten.relu_.default, "x")],
    "sigmoid": [_s(F.sigmoid, "x"), _s(torch.sigmoid, "x"), _s(torch.special.expit, "x"),
                _s(".sigmoid", "x")],
    "gelu": [_s(F.gelu, "x"), _s(F.gelu, "x", approximate="none"), _s(aten.gelu.default, "x")],
    "softmax": [_s(F.softmax, "x", -1), _s(torch.softmax, "x", -1), _s(".softmax", "x", dim=-1),
                _s(F.softmax, "x", dim=-1, _stacklevel=5), _s(torch.special.softmax, "x", -1),
                _s(aten._softmax.default, "x", -1, False), _s(aten.softmax.int, "x", -1)],
    "sum": [_s(torch.sum, "x", 1), _s(".sum", "x", 1), _s(".sum", "x", dim=1),
            _s(".sum", "x", (1,)), _s(torch.sum, "x", [1]), _s(".sum", "x", axis=1),
            _s(".sum", "x", 1, keepdims=False), _s(aten.sum.dim_IntList, "x", [1])],
    "mean": [_s(torch.mean, "x", (1, 2), True), _s(".mean", "x", dim=[1, 2], keepdim=True)],
    "view": [_s(".view", "x", 2, 3), _s(".view", "x", (2, 3)), _s(".view", "x", [2, 3]),
             _s(aten.view.default, "x", [2, 3])],
    "reshape": [_s(".reshape", "x", 2, -1), _s(torch.reshape, "x", (2, -1)),
                _s(".reshape", "x", shape=[2, -1])],
    "permute": [_s(".permute", "x", 1, 0), _s(torch.permute, "x", (1, 0)),
                _s(".permute", "x", dims=(1, 0))],
    "transpose": [_s(torch.transpose, "x", 0, 1), _s(".transpose", "x", 0, 1),
                  _s(torch.swapaxes, "x", 0, 1), _s(".swapdims", "x", 0, 1)],
    "cat": [_s(torch.cat, ["x", "y"], 1), _s(torch.concat, ("x", "y"), dim=1),
            _s(torch.concatenate, ["x", "y"], axis=1), _s(torch.cat, tensors=["x", "y"], dim=1)],
    "where": [_s(torch.where, "x", "y", "z"), _s(".where", "y", "x", "z"),
              _s(aten.where.self, "x", "y", "z")],
    "polygamma": [_s(torch.polygamma, 2, "x"), _s(".polygamma", "x", 2)],
    "float": [_s(".float", "x"), _s(".to", "x", torch.float32), _s(".to", "x", dtype=torch.float32),
              _s(".to", "x", torch.float32, False, False)],
    "split": [_s(torch.split, "x", 2), _s(".split", "x", 2), _s(".split", "x", split_size=2)],
    "chunk": [_s(torch.chunk, "x", 2), _s(".chunk", "x", 2), _s(".chunk", "x", chunks=2, dim=0)],
    "T": [_s(getattr, "x", "T"), _s(aten.numpy_T.default, "x")],
    "shape": [_s(getattr, "x", "shape"), _s(".size", "x")],
    "getitem": [_s(operator.getitem, "x", 0), _s(".__getitem__", "x", 0)],
    "linear": [_s(F.linear, "x", "w", "b"), _s(F.linear, "x", weight="w", bias="b"),
               _s(aten.linear.default, "x", "w", "b")],
    "conv2d": [_s(F.conv2d, "x", "w", "b", 2), _s(torch.conv2d, "x", "w", "b", (2, 2)),
               _s(F.conv2d, input="x", weight="w", bias="b", stride=[2, 2], groups=1),
               _s(aten.conv2d.default, "x", "w", "b", [2, 2])],
    "conv2d same": [_s(F.conv2d, "x", "w", padding="same"),
                    _s(aten.conv2d.padding, "x", "w", None, [1, 1], "same")],
    "layer_norm": [_s(F.layer_norm, "x", (4,), "w", "b"), _s(torch.layer_norm, "x", [4], "w", "b"),
                   _s(F.layer_norm, "x", [4], weight="w", bias="b", eps=1e-5)],
    "embedding": [_s(F.embedding, "x", "w"), _s(aten.embedding.default, "w", "x"),
                  _s(torch.embedding, "w", "x")],
    "dropout": [_s(F.dropout, "x", 0.1, False), _s(torch.dropout, "x", 0.1, False),
                _s(F.dropout, "x", p=0.1, training=False)],
    "max_pool2d": [_s(F.max_pool2d, "x", 2), _s(torch.max_pool2d, "x", 2),
                   _s(F.max_pool2d, "x", (2, 2), stride=(2, 2))],
    "attention": [_s(F.scaled_dot_product_attention, "x", "y", "z"),
                  _s(aten.scaled_dot_product_attention.default, "x", "y", "z"),
                  _s(F.scaled_dot_product_attention, query="x", key="y", value="z")],
    "cross_entropy": [_s(F.cross_entropy, "x", "y"), _s(F.cross_entropy, "x", "y",
                      reduction="mean"), _s(aten.cross_entropy_loss.default, "x", "y")],
    "einsum": [_s(torch.einsum, "ij,jk", "x", "y"), _s(torch.einsum, "ij,jk", ["x", "y"])],
    "clamp": [_s(torch.clamp, "x", 0, 1), _s(torch.clip, "x", 0, 1), _s(".clamp", "x", min=0,
              max=1), _s(".clip", "x", 0, 1)],
}  # fmt: skip


def test_the_table_covers_150_operators() -> None:
    assert len(_GENERATED | _SPELLINGS) >= 150


@pytest.mark.parametrize("case", sorted(_GENERATED.keys() | _SPELLINGS.keys()))
def test_spellings_are_one_operator(case: str) -> None:
    for table in (_GENERATED, _SPELLINGS):
        spellings = [(s, _call(s[0], *s[1], **s[2])) for s in table.get(case, [])]
        for spelling, call in spellings:
            first = spellings[0][1]
            assert not call.operator.is_opaque, spelling
            assert call.operator is first.operator, spelling
            assert _arguments(call) == _arguments(first), spelling


def _of_module(module: nn.Module, *args: str) -> Call:
    root = nn.Module()
    root.add_module("inner", module)
    graph = fx.Graph()
    nodes = [graph.placeholder(name) for name in args or ("x",)]
    node = graph.call_module("inner", tuple(nodes))
    graph.output(node)
    gm = fx.GraphModule(root, graph)
    call = resolve(next(n for n in gm.graph.nodes if n.op == "call_module"))
    assert call is not None
    return call


_W, _B = Attribute("inner.weight"), Attribute("inner.bias")
_MEAN, _VARIANCE = Attribute("inner.running_mean"), Attribute("inner.running_var")
_MODULES: dict[str, tuple[nn.Module, Spelling]] = {
    "ReLU": (nn.ReLU(), _s(torch.relu, "x")),
    "ReLU in place": (nn.ReLU(inplace=True), _s(".relu_", "x")),
    "GELU": (nn.GELU("tanh"), _s(F.gelu, "x", approximate="tanh")),
    "Softmax": (nn.Softmax(1), _s(torch.softmax, "x", 1)),
    "Dropout": (nn.Dropout(0.2), _s(F.dropout, "x", 0.2)),
    "Dropout in eval": (nn.Dropout(0.2).eval(), _s(F.dropout, "x", 0.2, False)),
    "Linear": (nn.Linear(2, 3), _s(F.linear, "x", _W, _B)),
    "Linear without bias": (nn.Linear(2, 3, bias=False), _s(F.linear, "x", _W)),
    "Conv2d": (nn.Conv2d(2, 4, 3, 2, 1), _s(F.conv2d, "x", _W, _B, 2, 1)),
    "ConvTranspose2d": (
        nn.ConvTranspose2d(2, 4, 3, 2, 1), _s(torch.conv_transpose2d, "x", _W, _B, 2, 1)
    ),
    "LayerNorm": (nn.LayerNorm(4, eps=1e-3), _s(F.layer_norm, "x", (4,), _W, _B, 1e-3)),
    "Embedding": (nn.Embedding(5, 3), _s(F.embedding, "x", _W)),
    "Flatten": (nn.Flatten(), _s(torch.flatten, "x", 1)),
    "MaxPool2d": (nn.MaxPool2d(2), _s(F.max_pool2d, "x", 2)),
    "AdaptiveAvgPool2d": (nn.AdaptiveAvgPool2d(1), _s(F.adaptive_avg_pool2d, "x", 1)),
    "BatchNorm2d": (nn.BatchNorm2d(3).eval(), _s(F.batch_norm, "x", _MEAN, _VARIANCE, _W, _B)),
}  # fmt: skip


@pytest.mark.parametrize("case", sorted(_MODULES))
def test_modules_are_their_functions(case: str) -> None:
    module, (target, args, kwargs) = _MODULES[case]
    call, expected = _of_module(module), _call(target, *args, **kwargs)
    assert call.operator is expected.operator
    assert _arguments(call) == _arguments(expected)


class _OtherRelu(nn.ReLU):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input + 1


def _hooked(register: str) -> nn.Module:
    module = nn.ReLU()
    getattr(module, register)(lambda *args: None)
    return module


def _patched() -> nn.Module:
    module = nn.ReLU()
    module.forward = lambda input: input + 1  # type: ignore[method-assign]
    return module


_OPAQUE_MODULES: dict[str, nn.Module] = {
    "subclass": _OtherRelu(),
    "forward hook": _hooked("register_forward_hook"),
    "forward pre-hook": _hooked("register_forward_pre_hook"),
    "backward hook": _hooked("register_full_backward_hook"),
    "patched forward": _patched(),
    "reflected padding": nn.Conv2d(2, 2, 3, padding=1, padding_mode="reflect"),
    "circular padding": nn.Conv1d(2, 2, 3, padding=1, padding_mode="circular"),
    "renormalised embedding": nn.Embedding(4, 2, max_norm=1.0),
    "parametrised": nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)),
    "of nobody's": nn.Sequential(nn.ReLU()),
}


@pytest.mark.parametrize("case", sorted(_OPAQUE_MODULES))
def test_module_that_does_more_is_opaque(case: str) -> None:
    assert _of_module(_OPAQUE_MODULES[case]).operator.is_opaque


_DIFFERENT: dict[str, tuple[Spelling, Spelling]] = {
    "in place": (_s(torch.relu, "x"), _s(".relu_", "x")),
    "out=": (_s(torch.add, "x", "y"), _s(torch.add, "x", "y", out="z")),
    "alpha": (_s(torch.add, "x", "y"), _s(torch.add, "x", "y", alpha=5)),
    "order": (_s(operator.sub, "x", "y"), _s(".__rsub__", "x", "y")),
    "training": (_s(F.dropout, "x", 0.5, True), _s(F.dropout, "x", 0.5, False)),
    "approximation": (_s(F.gelu, "x"), _s(F.gelu, "x", approximate="tanh")),
    "rounding": (_s(torch.div, "x", "y"), _s(torch.div, "x", "y", rounding_mode="floor")),
    "whole sum": (_s(torch.sum, "x"), _s(torch.sum, "x", 0)),
    "keepdim": (_s(torch.sum, "x", 0), _s(torch.sum, "x", 0, True)),
    "reduction": (_s(F.mse_loss, "x", "y"), _s(F.mse_loss, "x", "y", reduction="sum")),
    "indices": (_s(F.max_pool2d, "x", 2), _s(F.max_pool2d, "x", 2, return_indices=True)),
    "literal's type": (_s(operator.mul, "x", 1), _s(operator.mul, "x", 1.0)),
    "half to float": (_s(torch.softmax, "x", 1), _s(aten._softmax.default, "x", 1, True)),
    "dtype": (_s(torch.sum, "x", 0), _s(torch.sum, "x", 0, dtype=torch.float64)),
}  # fmt: skip


@pytest.mark.parametrize("case", sorted(_DIFFERENT))
def test_different_calls_stay_different(case: str) -> None:
    one, other = (_call(target, *args, **kwargs) for target, args, kwargs in _DIFFERENT[case])
    assert (one.operator, _arguments(one)) != (other.operator, _arguments(other))


def test_batch_norm_without_statistics_always_trains() -> None:
    module = nn.BatchNorm1d(3, track_running_stats=False).eval()
    assert _of_module(module).arguments["training"] is True


def test_unknown_callables_are_opaque() -> None:
    for target in (print, torch.compile, lambda x: x, torch.no_grad):
        call = _call(target, "x")
        assert call.operator.is_opaque
        assert call.operator.schema is None
    assert _call(print, "x").name == "opaque.print"
    assert _call(".no_such_method", "x").name == "opaque.Tensor.no_such_method"


def test_numbers_are_no_tensors() -> None:
    graph = fx.Graph()
    size = graph.placeholder("size")
    set_type(size, 4)
    call = resolve(graph.call_function(operator.add, (size, 1)))
    assert call is not None and call.name == "python.add"


def test_cache_follows_every_change() -> None:
    node = _node(torch.add, "x", "y")
    placeholders = list(node.graph.nodes)
    first = resolve(node)
    assert first is not None and resolve(node) is first
    node.target = torch.mul
    assert resolve(node).name == "aten.mul"  # type: ignore[union-attr]
    node.args = (placeholders[0], placeholders[2])
    assert resolve(node).arguments["other"] is placeholders[2]  # type: ignore[union-attr]
    node.target = torch.add
    node.kwargs = {"alpha": 3}
    assert resolve(node).arguments["alpha"] == 3  # type: ignore[union-attr]
    node.replace_input_with(placeholders[0], placeholders[3])
    assert resolve(node).arguments["self"] is placeholders[3]  # type: ignore[union-attr]
    node.op, node.target = "call_method", "sub"
    assert resolve(node).name == "aten.sub"  # type: ignore[union-attr]


@pytest.mark.usefixtures("few_objects")
def test_nothing_keeps_a_callable_alive() -> None:
    class Scaled:
        __name__ = "scaled"

        def __call__(self, x: Any) -> Any:
            return x

    for make in (Scaled, lambda: lambda x: x + 1):
        target = make()
        graph = fx.Graph()
        node = graph.call_function(target, (graph.placeholder("x"),))
        assert resolve(node) == resolve(node) and operator_name(target)
        known = weakref.ref(target)
        del target, node, graph
        gc.collect()
        assert known() is None


def test_cache_learns_types() -> None:
    node = _node(torch.add, "x", "y")
    assert resolve(node).operator.overload is aten.add.Tensor  # type: ignore[union-attr]
    types = TensorType((2,), torch.float32, (1,), torch.device("cpu")), 3
    for operand, known in zip(node.all_input_nodes, types, strict=True):
        set_type(operand, known)
    assert resolve(node).operator.overload is aten.add.Scalar  # type: ignore[union-attr]


def test_nodes_without_a_call() -> None:
    gm = fx.symbolic_trace(nn.Sequential())
    assert [resolve(node) for node in gm.graph.nodes] == [None] * len(gm.graph.nodes)


_NAMES: list[tuple[Any, str]] = [
    (torch.relu, "aten.relu"), (F.relu, "aten.relu"), (nn.ReLU, "aten.relu"), ("relu", "aten.relu"),
    ("aten.relu", "aten.relu"), (torch.Tensor.relu, "aten.relu"), (aten.relu.default, "aten.relu"),
    (aten.relu, "aten.relu"), (operator.add, "aten.add"), (operator.truediv, "aten.div"),
    (torch.special.expit, "aten.sigmoid"), (F.cross_entropy, "aten.cross_entropy_loss"),
    (nn.Conv2d, "aten.conv2d"), (nn.Linear, "aten.linear"), (torch.Tensor.__rsub__, "aten.sub"),
    (print, "opaque.print"), (_OtherRelu, f"opaque.{__name__}._OtherRelu"),
    (operator.getitem, "python.getitem"), (len, "python.len"), (nn.LayerNorm, "aten.layer_norm"),
    (F.interpolate, "torch.nn.functional.interpolate"), ("swapaxes", "aten.transpose"),
]  # fmt: skip


@pytest.mark.parametrize("index", range(len(_NAMES)))
def test_names(index: int) -> None:
    spelling, expected = _NAMES[index]
    assert operator_name(spelling) == expected


def test_every_row_of_a_module_resolves_and_computes_the_same() -> None:
    """Each module of the table, called on a real input, against its bound overload."""
    for name, (_, attributes) in op_table.MODULES.items():
        module, args = _module(name)
        call = _of_module(module, *"xyz"[: len(args)])
        if len(args) > 1 and call.operator.is_opaque:  # a row for modules of one operand
            continue
        assert not call.operator.is_opaque, name
        assert all(hasattr(module, attribute) for attribute in attributes), name
        if call.operator.overload is None:
            continue
        values = dict(zip("xyz", args, strict=False))
        bound = {
            key: module.get_parameter(value.path.removeprefix("inner."))
            if isinstance(value, Attribute) and value.path.endswith(("weight", "bias"))
            else module.get_buffer(value.path.removeprefix("inner."))
            if isinstance(value, Attribute)
            else values[value.name] if isinstance(value, fx.Node) else value
            for key, value in call.arguments.items()
        }  # fmt: skip
        torch.manual_seed(0)
        expected = module(*[a.clone() for a in args])
        torch.manual_seed(0)
        torch.testing.assert_close(call.operator.overload(**bound), expected, equal_nan=True)


def _module(name: str) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    cls = getattr(nn, name)
    rank = int(name[-2]) if name[-1] == "d" and name[-2].isdigit() else 0
    image = torch.randn(2, 4, *[6] * rank) if rank else torch.randn(2, 4, 6, 6)
    special: dict[str, tuple[tuple[Any, ...], tuple[torch.Tensor, ...]]] = {
        "Threshold": ((0.1, 2.0), (image,)), "GLU": ((1,), (image,)),
        "Softmax": ((1,), (image,)), "LogSoftmax": ((1,), (image,)),
        "LayerNorm": ((6,), (image,)), "RMSNorm": ((6,), (image,)),
        "GroupNorm": ((2, 4), (image,)), "Linear": ((6, 5), (image,)),
        "Bilinear": ((3, 4, 5), (torch.randn(2, 3), torch.randn(2, 4))),
        "Embedding": ((5, 3), (torch.tensor([[1, 2], [4, 0]]),)),
        "PixelShuffle": ((2,), (image,)), "PixelUnshuffle": ((2,), (image,)),
        "Upsample": ((None, 2), (image,)),
        "CosineSimilarity": ((), (image, image + 1)), "MSELoss": ((), (image, image + 1)),
        "L1Loss": ((), (image, image + 1)),
        "CrossEntropyLoss": ((), (torch.randn(3, 4), torch.tensor([0, 1, 3]))),
    }  # fmt: skip
    if name in special:
        arguments, args = special[name]
        return cls(*arguments), args
    if name.startswith("Conv"):
        return cls(4, 3, 3, padding=1), (image,)
    if name.startswith("BatchNorm"):
        batch = torch.randn(2, 4, *[6] * rank) if rank > 1 else torch.randn(8, 4)
        return cls(4).eval(), (batch,)
    if "Pool" in name:
        return cls(2), (image,)
    return cls(), (image,)


def test_custom_operator_is_the_same_by_packet_and_by_overload() -> None:
    with torch.library._scoped_library("fxkit_test", "FRAGMENT") as library:
        library.define("twice(Tensor x, int n=2) -> Tensor")
        graph = fx.Graph()
        x = graph.placeholder("x")
        packet = torch.ops.fxkit_test.twice
        calls = [resolve(graph.call_function(target, (x,))) for target in (packet, packet.default)]
        assert all(call is not None and call.arguments == {"x": x, "n": 2} for call in calls)
        assert calls[0] is not None and calls[1] is not None
        assert calls[0].operator is calls[1].operator
        assert operator_name(packet) == "fxkit_test.twice" == calls[0].name


@pytest.mark.parametrize("name", ["sum", "mean", "all", "any", "std", "var"])
@pytest.mark.parametrize("is_method", [False, True])
def test_no_axis_says_all_of_them(name: str, is_method: bool) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    op, target = ("call_method", name) if is_method else ("call_function", getattr(torch, name))
    plain = resolve(graph.create_node(op, target, (x,)))
    assert plain is not None
    for args, kwargs in (((x, None), {}), ((x,), {"dim": None}), ((x, None, False), {})):
        if len(args) == 3 and name in ("std", "var"):
            continue  # whose third operand is `unbiased`
        assert resolve(graph.create_node(op, target, args, kwargs)) == plain
    kept = resolve(graph.create_node(op, target, (x,), {"dim": None, "keepdim": True}))
    assert kept is not None
    assert kept.arguments["keepdim"] is True
    one = resolve(graph.create_node(op, target, (x,), {"dim": 0}))
    assert one is not None
    assert one.arguments["dim"] in (0, [0])


def test_an_overload_with_no_axis_is_one_operator_for_matchers_too() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(torch.ops.aten.sum.dim_IntList, (x, None))
    call = resolve(node)
    assert call is not None
    assert operator_of(node) is call.operator
    assert call == resolve(graph.call_function(torch.sum, (x,)))
