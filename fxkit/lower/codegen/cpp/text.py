"""How each scalar operation of the loop IR is written in C++."""

from __future__ import annotations

import math

import torch

from fxkit.lower.loop_ir.bits import Number
from fxkit.lower.loop_ir.loop_ir import Instruction
from fxkit.lower.loop_ir.monoids import neutral_element
from fxkit.lower.loop_ir.runtime_parameters import RuntimeFloat, RuntimeInt
from fxkit.lower.loop_ir.scalar_functions import SCALAR_FUNCTIONS, ScalarFunction

TYPES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.int64: "long",
    torch.int32: "int",
    torch.int16: "short",
    torch.int8: "signed char",
    torch.uint8: "unsigned char",
    torch.bool: "bool",
    torch.bfloat16: "unsigned short",
    torch.float16: "unsigned short",
}

# What memory holds. The compiler makes no vector code of bools that are read as such.
MEMORY = TYPES | {torch.bool: "unsigned char"}

# What a loop in lanes computes with.
LANE_TYPES = {torch.float32: "fx_floats", torch.bool: "fx_bools"}

_STORAGE = {torch.bfloat16: "bf16", torch.float16: "f16"}

# Of two equal infinities, the first is the sum: their difference is no number.
_LOGADDEXP = """\
FX_INLINE double fx_logaddexp(double a, double b) {
  double low = a < b ? a : b, high = a < b ? b : a;
  bool is_infinite = (low == high) & (__builtin_fabs(a) == __builtin_inf());
  return is_infinite ? a : log1p(exp(low - high)) + high;
}"""

# Two choices, each between two numbers, become vector instructions; one under `|` does not. Those
# with a number that is the same all along a loop ask of the other one whether it is NaN.
MINMAX = """\
template <class T> FX_INLINE T fx_max(T a, T b) {
  const T top = a > b ? a : b;
  return a != a ? a : top;
}
template <class T> FX_INLINE T fx_min(T a, T b) {
  const T low = a < b ? a : b;
  return a != a ? a : low;
}
template <class T> FX_INLINE T fx_max_with(T a, T b) {
  const T top = a <= b ? b : a;
  return b != b ? b : top;
}
template <class T> FX_INLINE T fx_min_with(T a, T b) {
  const T low = a >= b ? b : a;
  return b != b ? b : low;
}
"""


def literal(value: bool | int | float, dtype: torch.dtype) -> str:
    """Return a number as a C++ expression of exactly that value."""
    if isinstance(value, (RuntimeInt, RuntimeFloat)):
        return f"({TYPES[dtype]}){value.text}"
    if dtype == torch.bool:
        return "true" if value else "false"
    if not dtype.is_floating_point:
        return f"({TYPES[dtype]}){_integer(int(value))}"
    suffix = "f" if dtype == torch.float32 else ""
    if math.isnan(value):
        return f'__builtin_nan{suffix}("")'
    if math.isinf(value):
        return f"{'-' if value < 0 else ''}__builtin_inf{suffix}()"
    text = f"{float(value)!r}{suffix}"
    return f"({text})" if text.startswith("-") else text


def float16_literal(number: Number) -> str:
    """Return the sixteen bits of a number that float16 has, as text."""
    value = torch.tensor(float(number), dtype=torch.float16).view(torch.int16).item()
    return f"(unsigned short){int(value) & 0xFFFF:#06x}"


def _integer(value: int) -> str:
    return "(-9223372036854775807L - 1)" if value == -(2**63) else f"{value}L"


def expression(instruction: Instruction, operands: list[str], source: torch.dtype) -> str:
    """Return an instruction's value as a C++ expression.

    Args:
        instruction: Any instruction but a load, a rounding or a reduction.
        operands: Names of its operands.
        source: Register dtype of the first operand.
    """
    op, dtype = instruction.op, instruction.dtype
    if op == "const":
        return literal(instruction.detail.value, dtype)
    if op == "cast" and source == torch.bool and dtype.is_floating_point:
        # A conversion goes by way of integers as narrow as the condition.
        return f"{operands[0]} ? {literal(1.0, dtype)} : {literal(0.0, dtype)}"
    if op == "cast":
        return _converted(operands[0], source, dtype)
    if (infix := SCALAR_FUNCTIONS[op].infix) is not None:
        text = f"{operands[0]} {infix} {operands[1]}"
        return f"({TYPES[dtype]})({text})" if _is_narrow(dtype) else text
    if op == "select":
        return f"{operands[0]} ? {operands[1]} : {operands[2]}"
    if op == "neg":
        return f"({TYPES[dtype]})-{operands[0]}" if _is_narrow(dtype) else f"-{operands[0]}"
    if op == "not":
        return f"!{operands[0]}" if dtype == torch.bool else f"({TYPES[dtype]})~{operands[0]}"
    if op == "abs":
        return _absolute(operands[0], dtype)
    return f"{function_name(op, source)}({', '.join(operands)})"


def _converted(value: str, source: torch.dtype, dtype: torch.dtype) -> str:
    """Return a value of one dtype as one of another."""
    if dtype == torch.bool:
        return f"{value} != 0"
    if source.is_floating_point and not dtype.is_floating_point:
        value = f"fx_{integer_between(source, dtype)}({value})"
    return f"({TYPES[dtype]}){value}"


def integer_between(source: torch.dtype, dtype: torch.dtype) -> str:
    """Return the integer by way of which eager makes a narrow one of a float."""
    is_long = dtype == torch.int64 or (dtype == torch.uint8 and source == torch.float64)
    return "long" if is_long else "int"


def _is_narrow(dtype: torch.dtype) -> bool:
    return dtype in (torch.int8, torch.int16, torch.uint8)


def _absolute(operand: str, dtype: torch.dtype) -> str:
    if dtype.is_floating_point:
        return f"__builtin_fabs{_suffix(dtype)}({operand})"
    return f"({TYPES[dtype]})({operand} < 0 ? -{operand} : {operand})"


def _suffix(dtype: torch.dtype) -> str:
    return "f" if dtype == torch.float32 else ""


def function_name(op: str, dtype: torch.dtype) -> str:
    """Return the C++ function that computes an operation."""
    function = SCALAR_FUNCTIONS[op]
    if op in ("max", "min", "fma"):
        return f"fx_{op}"
    if function.builtin:
        return f"__builtin_{op}{_suffix(dtype)}"
    if dtype == torch.float32 and (function.own or function.domain):
        return f"fx_{op}"
    if function.composed or function.domain:
        return f"fx_{op}64"
    return f"{op}{_suffix(dtype)}"


def is_near_function(instruction: Instruction) -> bool:
    """Tell whether an operation has a faster version for operands that are near zero."""
    function = SCALAR_FUNCTIONS.get(instruction.op)
    if function is None or function.near is None:
        return False
    has_double = instruction.op == "fmod" and instruction.dtype == torch.float64
    return has_double or instruction.dtype == torch.float32


def _called(body: tuple[Instruction, ...]) -> list[tuple[ScalarFunction, torch.dtype]]:
    """Return each scalar function of a body and the dtype that it computes."""
    return [(SCALAR_FUNCTIONS[i.op], i.dtype) for i in body if i.op in SCALAR_FUNCTIONS]


def own_functions(body: tuple[Instruction, ...], storage: set[torch.dtype]) -> set[str]:
    """Return the names of fxkit's own functions that a body calls."""
    names = {f"fx_{f.op}" for f, dtype in _called(body) if f.own and dtype == torch.float32}
    names |= {name for i in body if i.is_tensor_op for name in i.detail.functions}
    names |= {str(SCALAR_FUNCTIONS[i.op].near) for i in body if is_near_function(i)}
    return names | {f"fx_{_STORAGE[dtype]}" for dtype in storage if dtype in _STORAGE}


def library_functions(body: tuple[Instruction, ...]) -> set[tuple[str, torch.dtype]]:
    """Return the functions of the C library that a body calls, each with its dtype."""
    found = {
        (f.op, dtype)
        for f, dtype in _called(body)
        if f.library and not (f.own and dtype == torch.float32)
    }
    found |= {
        (f.composed.calls, dtype)
        for f, dtype in _called(body)
        if f.composed and dtype == torch.float64
    }
    if "scan_logaddexp" in [i.op for i in body]:
        found |= {("exp", torch.float64), ("log1p", torch.float64)}
    return found


def composed_functions(body: tuple[Instruction, ...], *, is_guarded: bool = True) -> set[str]:
    """Return the definitions of functions that a body calls and that call the C library's.

    Args:
        body: The instructions.
        is_guarded: Whether the library's are kept from numbers for which they have no value.
    """
    found = {_LOGADDEXP for i in body if i.op == "scan_logaddexp"}
    define = _within if is_guarded else _unguarded
    found |= {define(f, dtype) for f, dtype in _called(body) if _has_domain(f, dtype)}
    return found | {
        f"FX_INLINE double fx_{f.op}64(double x) {{ return {f.composed.text}; }}"
        for f, dtype in _called(body)
        if f.composed and dtype == torch.float64
    }


def _has_domain(function: ScalarFunction, dtype: torch.dtype) -> bool:
    """Tell whether a function is the C library's, and is not asked where it has no value."""
    return function.domain is not None and (dtype == torch.float64 or not function.own)


def _within(function: ScalarFunction, dtype: torch.dtype) -> str:
    """Return the definition of a function that the C library's serves in a domain."""
    op, domain = function.op, function.domain
    assert domain is not None
    kind, bits = TYPES[dtype], "long" if dtype == torch.float64 else "int"
    return (
        f"FX_INLINE {kind} {function_name(op, dtype)}({kind} x) {{\n"
        f"  bool is_within = {domain.condition};\n"
        f"  {bits} mask = -({bits})is_within;\n"
        f"  {bits} instead = fx_bits(({kind}){domain.instead}) & ~mask;\n"
        f"  {kind} y = {op}{_suffix(dtype)}(fx_{kind}((fx_bits(x) & mask) | instead));\n"
        f"  {kind} other = {domain.outside};\n"
        "  return is_within ? y : other;\n"
        "}"
    )


def _unguarded(function: ScalarFunction, dtype: torch.dtype) -> str:
    """Return the definition of a function that the C library's serves."""
    kind, call = TYPES[dtype], f"{function.op}{_suffix(dtype)}(x)"
    name = function_name(function.op, dtype)
    return f"FX_INLINE {kind} {name}({kind} x) {{ return {call}; }}"


def declaration(op: str, dtype: torch.dtype, glibc: tuple[int, int] | None) -> str:
    """Declare a function of the C library, with its vector version where there is one.

    Args:
        op: The operation.
        dtype: float32 or float64.
        glibc: Version of the C library on x86-64, or None where it has no vector functions.
    """
    function = SCALAR_FUNCTIONS[op]
    has_vector = glibc is not None and glibc >= function.vector_since
    simd = '__attribute__((simd("notinbranch"), const)) ' if has_vector else ""
    parameters = ", ".join([TYPES[dtype]] * function.arity)
    return f'extern "C" {simd}{TYPES[dtype]} {op}{_suffix(dtype)}({parameters}) noexcept;'


def held_expression(place: str, dtype: torch.dtype) -> str:
    """Read a register's value from an array that holds it."""
    return f"{place} != 0" if dtype == torch.bool else place


def load_expression(address: str, dtype: torch.dtype, is_lone: bool = False) -> str:
    """Read an element from memory into a register.

    Args:
        address: The element.
        dtype: What memory holds.
        is_lone: Whether it is read in no loop that becomes vector code.
    """
    if dtype not in _STORAGE:
        return held_expression(address, dtype)
    return f"fx_from_{_lone(dtype, is_lone)}({address})"


def store_expression(
    value: str,
    dtype: torch.dtype,
    is_quiet: bool = False,
    is_held: bool = False,
    is_lone: bool = False,
) -> str:
    """Convert a register to what memory holds; see `rounding`.

    Args:
        value: The register.
        dtype: What memory holds.
        is_quiet: Whether each NaN is known to be quiet, with its lower half nought.
        is_held: Whether it is known to be a number that bfloat16 has.
        is_lone: Whether it is written in no loop that becomes vector code.
    """
    if dtype not in _STORAGE:
        return value
    if is_held:
        return f"fx_to_held_bf16({value})"
    return f"fx_to_{_quiet(dtype, is_quiet, is_lone)}({value})"


def rounding(value: str, dtype: torch.dtype, is_quiet: bool = False, is_lone: bool = False) -> str:
    """Round a register to what memory can hold.

    Args:
        value: The register.
        dtype: What it is rounded to.
        is_quiet: Whether each NaN is known to be quiet, with its lower half nought.
        is_lone: Whether it is rounded in no loop that becomes vector code.
    """
    return f"fx_round_{_quiet(dtype, is_quiet, is_lone)}({value})"


def _quiet(dtype: torch.dtype, is_quiet: bool, is_lone: bool) -> str:
    is_short = is_quiet and dtype == torch.bfloat16
    return "quiet_bf16" if is_short else _lone(dtype, is_lone)


def _lone(dtype: torch.dtype, is_lone: bool) -> str:
    return "lone_f16" if is_lone and dtype == torch.float16 else _STORAGE[dtype]


def identity_of(monoid: str, dtype: torch.dtype) -> str:
    """Return the element that a reduction starts from."""
    return literal(neutral_element(monoid, dtype), dtype)
