"""A state, such as a decoder's cache, that is held in integers between calls."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxkit
from fxkit import quantization as q
from fxkit.errors import UnsupportedError
from fxkit.ir.types import type_of
from fxkit.passes import Functionalise
from fxkit.quantization.affine import signal_to_noise

STATIC = q.int8_static()
SDPA = {F.scaled_dot_product_attention: STATIC}
HEADS, SIZE = 2, 8
WIDTH = HEADS * SIZE


class Layer(nn.Module):
    """Attention over what is kept and this token; a subclass says how that is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def heads(self, x: Tensor) -> tuple[Tensor, ...]:
        parts = self.project(x).chunk(3, -1)
        return tuple(part.unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for part in parts)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        found = F.scaled_dot_product_attention(query, keys, values)
        return self.out(found.transpose(1, 2).flatten(2))


class Joined(nn.Module):
    """Two layers whose caches grow and come in one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        kept = []
        for layer, key, value in zip(self.layers, keys, values, strict=True):
            query, new_key, new_value = layer.heads(x)
            key, value = torch.cat([key, new_key], 2), torch.cat([value, new_value], 2)
            x = x + layer.attend(query, key, value)
            kept.append((key, value))
        return x, torch.stack([one for one, _ in kept]), torch.stack([one for _, one in kept])


class Copied(Layer):
    """A buffer of fixed length, written by `index_copy`."""

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, at: Tensor) -> tuple[Tensor, ...]:
        query, key, value = self.heads(x)
        keys, values = keys.index_copy(2, at, key), torch.index_copy(values, 2, at, value)
        return self.attend(query, keys, values), keys, values


class Scattered(Layer):
    """The same written by `slice_scatter`, `where` and a shift."""

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, at: Tensor) -> tuple[Tensor, ...]:
        query, key, value = self.heads(x)
        is_new = torch.arange(keys.size(2)).eq(at).view(1, 1, -1, 1)
        keys = torch.where(is_new, key, keys)
        values = torch.slice_scatter(values.roll(1, 2), value, 2, 0, 1)
        return self.attend(query, keys, values), keys, values, keys.size(2) * x


class Assigned(Layer):
    """The same written by assignment to parts of a copy."""

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, at: Tensor) -> tuple[Tensor, ...]:
        query, key, value = self.heads(x)
        keys, values = keys.clone(), values.clone()
        keys[:, :, at] = key
        values[:, :, 3:4] = value
        return self.attend(query, keys, values), keys, values


class Window(Layer):
    """The last tokens, for attention written out, with heads repeated."""

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, at: Tensor) -> tuple[Tensor, ...]:
        query, key, value = self.heads(x)
        keys = torch.cat([keys[:, :, 1:], key], 2)
        values = torch.cat([values[:, :, 1:], value], 2)
        query = query.repeat_interleave(2, 1)
        likely = torch.softmax(query @ keys.repeat_interleave(2, 1).mT / SIZE**0.5, -1)
        return likely @ values.repeat_interleave(2, 1), keys, values


class Recurrent(nn.Module):
    """A state that is computed anew in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.again = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.up(x) + self.again(hidden))
        return hidden * 2, hidden


class InPlace(Layer):
    """Buffers that are written, and not returned."""

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, at: Tensor) -> Tensor:
        query, key, value = self.heads(x)
        keys[:, :, at] = key
        values.index_copy_(2, at, value)
        return self.attend(query, keys, values)


BOTH = {"keys": 1, "values": 2}


def token() -> Tensor:
    return torch.rand(1, 1, WIDTH) * 4 - 2


def past(*shape: int) -> tuple[Tensor, Tensor]:
    return torch.rand(*shape) * 6 - 2, torch.rand(*shape) * 4 - 2


def joined_inputs(tokens: int = 5) -> tuple[Tensor, ...]:
    return token(), *past(2, 1, HEADS, tokens, SIZE)


def buffer_inputs(at: int = 0, length: int = 6) -> tuple[Tensor, ...]:
    return token(), *past(1, HEADS, length, SIZE), torch.tensor([at])


def run(
    program: Any, steps: list[tuple[Tensor, ...]], state: Mapping[str, int], kept: list[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the results of steps that go on with their state, and the last state."""
    found = []
    for x, *rest in steps:
        results = program(x, *kept, *rest[len(kept) :])
        kept = [results[index] for index in state.values()]
        found.append(results[0])
    return found, kept


def quantized(
    model: Any, batches: list[tuple[Tensor, ...]], state: Mapping[str, int | None], **options: Any
) -> Any:
    config = q.QuantizationConfig(STATIC, state=state, **options)
    return q.quantize(model, config, batches)


def check(
    program: Any,
    steps: list[Any],
    state: Mapping[str, int],
    dtype: torch.dtype = torch.int8,
    *,
    compiles: bool = True,
) -> Any:
    """Hold a program's state, and compare a loop of steps in all ways."""
    held, how = q.hold_in_integers(program, state)
    first = steps[0][1 : 1 + len(state)]
    integers = [one.quantize(value) for one, value in zip(how.values(), first, strict=True)]
    floats = [one.dequantize(value) for one, value in zip(how.values(), integers, strict=True)]
    found, last = run(held, steps, state, integers)
    expected, kept = run(program, steps, state, floats)
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)
    for one, mine, theirs in zip(how.values(), last, kept, strict=True):
        assert mine.dtype == dtype and mine.nbytes * 4 == theirs.nbytes
        assert torch.equal(one.quantize(theirs), mine)
        assert dtype != torch.int8 or torch.equal(one.dequantize(mine), theirs)
    fast = fxkit.compile(held)
    for _ in range(2 * compiles):
        compiled, end = run(fast, steps, state, integers)
        torch.testing.assert_close(compiled, found, rtol=1e-4, atol=0.05)
        for mine, theirs in zip(end, last, strict=True):
            assert (mine.int() - theirs.int()).abs().max() <= 1
    return held


@pytest.mark.parametrize("named", [False, True])
@torch.no_grad()
def test_a_cache_that_grows(named: bool) -> None:
    torch.manual_seed(0)
    model = Joined().eval()
    batches = [joined_inputs(tokens) for tokens in (5, 6, 9)]
    program = quantized(model, batches, BOTH, by_operator=SDPA if named else {})
    held = check(program, [joined_inputs() for _ in range(2)], BOTH, compiles=not named)
    names = [str(node.target) for node in held.graph.nodes]
    assert sum("cat" in name for name in names) == 4
    users = {str(u.target) for p in held.graph.find_nodes(op="placeholder")[1:] for u in p.users}
    assert users == {"unbind"}


@pytest.mark.parametrize("kind", [Copied, Scattered, Window])
@torch.no_grad()
def test_a_cache_that_is_written_by_results(kind: type[Layer]) -> None:
    torch.manual_seed(0)
    model = kind().eval()
    batches = [buffer_inputs(at) for at in range(3)] + [buffer_inputs(length=8)]
    check(quantized(model, batches, BOTH), [buffer_inputs(at) for at in range(4)], BOTH)


@torch.no_grad()
def test_a_cache_that_is_assigned_to() -> None:
    torch.manual_seed(0)
    model, batches = Assigned().eval(), [buffer_inputs(at) for at in range(3)]
    program = fxkit.capture(model, batches[0])
    with pytest.raises(UnsupportedError, match="written in place"):
        q.prepare(program, batches[0], q.QuantizationConfig(STATIC, state=BOTH))
    fxkit.PassManager([Functionalise()]).run(program)
    check(quantized(program, batches, BOTH), batches, BOTH)


@torch.no_grad()
def test_a_state_that_is_computed_anew() -> None:
    torch.manual_seed(0)
    model = Recurrent().eval()
    batches = [(token(), torch.rand(1, 1, WIDTH) * 2 - 1) for _ in range(4)]
    check(quantized(model, batches, {"hidden": 1}), batches, {"hidden": 1})


@torch.no_grad()
def test_a_cache_that_is_written_in_place() -> None:
    torch.manual_seed(0)
    model, state = InPlace().eval(), {"keys": None, "values": None}
    with pytest.raises(UnsupportedError, match="to be written in place, as no result is named"):
        quantized(Copied().eval(), [buffer_inputs()], state)
    program = fxkit.capture(model, buffer_inputs())
    fxkit.PassManager([Functionalise()]).run(program)
    batches = [buffer_inputs(at) for at in range(3)]
    reference = quantized(program, batches, state)
    held, how = q.hold_in_integers(reference, state)
    start = [one.quantize(value) for one, value in zip(how.values(), past(1, 2, 6, 8), strict=True)]
    floats = [one.dequantize(value) for one, value in zip(how.values(), start, strict=True)]
    fast = fxkit.compile(held)
    ours, compiled = [one.clone() for one in start], [one.clone() for one in start]
    for x, _, _, at in batches:
        found = held(x, *ours, at)
        assert torch.equal(found, reference(x, *floats, at))
        torch.testing.assert_close(fast(x, *compiled, at), found, rtol=1e-4, atol=0.05)
    assert not torch.equal(ours[0], start[0])
    for one, mine, theirs, other in zip(how.values(), ours, floats, compiled, strict=True):
        assert mine.dtype == torch.int8
        assert torch.equal(one.dequantize(mine), theirs)
        assert (mine.int() - other.int()).abs().max() <= 1


@torch.no_grad()
def test_a_cache_in_bfloat16() -> None:
    torch.manual_seed(0)
    model = Joined().eval().bfloat16()
    batches = [tuple(one.bfloat16() for one in joined_inputs(tokens)) for tokens in (5, 6)]
    program = quantized(model, batches, BOTH)
    held, how = q.hold_in_integers(program, BOTH)
    assert how["keys"].float_dtype == torch.bfloat16
    integers = [how[name].quantize(one) for name, one in zip(BOTH, batches[0][1:], strict=True)]
    floats = [how[name].dequantize(one) for name, one in zip(BOTH, integers, strict=True)]
    found, last = run(held, batches, BOTH, integers)
    expected, kept = run(program, batches, BOTH, floats)
    assert all(map(torch.equal, found, expected))
    for name, mine, theirs in zip(BOTH, last, kept, strict=True):
        assert torch.equal(how[name].dequantize(mine), theirs)


@pytest.mark.parametrize("kind", [Joined, Copied, Scattered])
@torch.no_grad()
def test_integers_lose_little(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, inputs = kind().eval(), joined_inputs if kind is Joined else buffer_inputs
    config = q.QuantizationConfig(None, state=BOTH)
    program = q.quantize(model, config, [inputs() for _ in range(8)])
    held, how = q.hold_in_integers(program, BOTH)
    steps = [inputs() for _ in range(8)]
    start = steps[0][1:3]
    integers = [how[name].quantize(one) for name, one in zip(BOTH, start, strict=True)]
    exact, _ = run(model, steps, BOTH, list(start))
    found, _ = run(held, steps, BOTH, integers)
    assert signal_to_noise(torch.cat(exact), torch.cat(found)) > 40


@torch.no_grad()
def test_torch_export_takes_it_for_all_lengths() -> None:
    torch.manual_seed(0)
    program = quantized(Joined().eval(), [joined_inputs(5), joined_inputs(7)], BOTH)
    held, how = q.hold_in_integers(program, BOTH)

    def inputs(tokens: int) -> tuple[Tensor, ...]:
        x, *floats = joined_inputs(tokens)
        return x, *(how[name].quantize(one) for name, one in zip(BOTH, floats, strict=True))

    tokens = torch.export.Dim("tokens", min=2)
    sizes = (None, {3: tokens}, {3: tokens})
    exported = torch.export.export(held, inputs(5), dynamic_shapes=sizes).module()
    for given in (inputs(5), inputs(12)):
        assert all(map(torch.equal, exported(*given), held(*given)))


@torch.no_grad()
def test_a_graph_that_names_no_state_but_quantises_it() -> None:
    torch.manual_seed(0)
    model = Copied().eval()
    program = quantized(model, [buffer_inputs()], {}, by_operator=SDPA)
    held = check(program, [buffer_inputs(at) for at in range(3)], BOTH, torch.uint8)
    keys = held.graph.find_nodes(op="placeholder")[1]
    assert [str(user.target) for user in keys.users] == ["index_copy"]


def test_scale_and_zero_point_stand_for_values() -> None:
    one = q.IntegerState(torch.int8, 0.5, -3, -128, 127)
    x = torch.tensor([0.0, 1.0, -2.0, 1000.0])
    integers = one.quantize(x)
    assert integers.tolist() == [-3, -1, -7, 127] and integers.dtype == torch.int8
    assert one.dequantize(integers).tolist() == [0.0, 1.0, -2.0, 65.0]


@torch.no_grad()
def test_the_report_shows_the_state_and_ranges_cover_what_joins() -> None:
    torch.manual_seed(0)
    batches = [joined_inputs(5)]
    spec = q.TensorSpec()
    config = q.QuantizationConfig(STATIC, by_operator=SDPA, state=BOTH, state_spec=spec)
    prepared = q.prepare(Joined().eval(), batches[0], config)
    q.calibrate(prepared, batches, progress=False)
    observers = prepared.observers
    assert observers["keys"] is not observers["values"]
    assert sum(one is observers["keys"] for one in observers.values()) == 5
    program = q.convert(prepared)
    row = next(r for r in q.report(program, prepared, batches).rows if "dot" in r.operator)
    assert row.how == f"input {STATIC.activations}, input {spec}, input {spec}"
    assert any("dot" in one.operator for one in q.compare(prepared, program, batches).rows)
    _, how = q.hold_in_integers(program, BOTH)
    assert how["keys"].zero_point == 0
    high = max(float(one.abs().max()) for one in prepared(*batches[0])[1])
    assert math.isclose(how["keys"].scale, high / 127.5, rel_tol=1e-5)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"key": 1}, "the name of an input as state, got 'key'\n  hint:  the inputs are x, keys"),
        ({"keys": 3}, "the index of a result that is a tensor for state 'keys', got 3 of 3"),
        ({"keys": 1, "values": 1}, "states that stay apart, got 'keys' and 'values' joined"),
        ({"keys": 2, "values": 2}, "states that stay apart, got 'keys' and 'values' joined"),
        ({"at": 1}, "a state in float32 or less, got 'at' in int64"),
    ],
)
def test_a_state_that_is_none_is_told(state: dict[str, int], message: str) -> None:
    class Together(Layer):
        def forward(self, x: Tensor, keys: Tensor, values: Tensor, at: Tensor) -> Any:
            keys = keys.index_copy(2, at, x.unflatten(-1, (HEADS, SIZE)).transpose(1, 2))
            return self.out(x), keys, torch.cat([keys, values])

    config = q.QuantizationConfig(STATIC, state=state)
    with pytest.raises(UnsupportedError) as caught:
        q.prepare(Together().eval(), buffer_inputs(), config)
    assert message in str(caught.value)


@torch.no_grad()
def test_what_is_not_held_is_told() -> None:
    plain = quantized(Copied().eval(), [buffer_inputs()], {})
    with pytest.raises(UnsupportedError, match=r"input 'keys' and result 1 in float[^€]*state="):
        q.hold_in_integers(plain, {"keys": 1})
    with pytest.raises(UnsupportedError, match="a program with a graph, got"):
        q.hold_in_integers(Copied().eval(), {"keys": 1})

    held, _ = q.hold_in_integers(quantized(Copied().eval(), [buffer_inputs()], BOTH), BOTH)
    with pytest.raises(UnsupportedError, match="got 'keys' in int8"):
        q.hold_in_integers(held, BOTH)
    with pytest.raises(UnsupportedError, match="config without state to train with"):
        q.prepare_qat(Copied(), buffer_inputs(), q.QuantizationConfig(STATIC, state=BOTH))
    with pytest.raises(UnsupportedError, match="a state_spec in integers with one scale"):
        per_token = q.TensorSpec(granularity="per_token", is_dynamic=True)
        q.QuantizationConfig(STATIC, state_spec=per_token)


@torch.no_grad()
def test_two_scales_are_told() -> None:
    class Read(Layer):
        def forward(self, x: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
            joined = torch.cat([keys, x * 3], 1)
            return self.out(keys) + self.project(joined)[:, -1:, :WIDTH], joined

    program = quantized(Read().eval(), [(token(), token())], {})
    with pytest.raises(UnsupportedError, match="one scale for input 'keys' and result 1, got sca"):
        q.hold_in_integers(program, {"keys": 1})
    one = quantized(Read().eval(), [(token(), token())], {}, shares_scales=True)
    q.hold_in_integers(one, {"keys": 1})


class Mean(nn.Module):
    """Divides by how long its state is."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        k = torch.cat([k, self.linear(x)], 1)
        return k.sum(1) / k.shape[1], k


@torch.no_grad()
def test_states_of_other_sizes_are_refused_where_the_program_reads_them() -> None:
    torch.manual_seed(0)
    batches = [(torch.randn(1, 1, 4), torch.randn(1, n, 4)) for n in (3, 4)]
    config = q.QuantizationConfig(q.int8_static(), state={"k": 1})
    reference = fxkit.quantize(Mean().eval(), config, batches)
    held, states = q.hold_in_integers(reference, {"k": 1})
    (k,) = (node for node in held.graph.find_nodes(op="placeholder") if node.name == "k")
    size = int(type_of(k).shape[1])
    x, cache = batches[0][0], states["k"].quantize(torch.randn(1, size, 4))
    found, expected = held(x, cache), reference(x, states["k"].dequantize(cache))
    assert torch.equal(found[0], expected[0])
    with pytest.raises(UnsupportedError, match="constants in this graph"):
        held(x, found[1])
    with pytest.raises(UnsupportedError, match="constants in this graph"):
        fxkit.compile(held)(x, found[1])


@pytest.mark.parametrize("state", [{"k": "k"}, ["k"], {"k": 1.5}, {1: 1}, {"k": True}])
def test_what_is_no_state_is_told_as_such(state: Any) -> None:
    with pytest.raises(UnsupportedError, match="expected a state of input names"):
        q.QuantizationConfig(q.int8_static(), state=state)


def test_a_result_of_another_rank_is_no_state() -> None:
    batch = (torch.randn(1, 1, 4), torch.randn(1, 3, 4))
    config = q.QuantizationConfig(q.int8_static(), state={"k": 0})
    with pytest.raises(UnsupportedError, match="as many axes as state 'k'"):
        fxkit.quantize(Mean().eval(), config, [batch])
