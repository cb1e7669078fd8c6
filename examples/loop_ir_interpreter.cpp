// An interpreter of fxkit's loop IR: all that a processor has to do for kernels of the core set.
//
// A program is text of words; `core_backend.py` writes it. Each row of a kernel is computed whole,
// one instruction after the other. Numbers are kept as double or int64_t, and after each
// instruction rounded to the dtype of its register.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

using Words = std::istringstream;
using Numbers = std::vector<int64_t>;

template <class T = int64_t> T word(Words& words) {
  T value;
  if (!(words >> value)) throw std::runtime_error("the program ends early");
  return value;
}

Numbers numbers(Words& words, int64_t count) {
  Numbers found;
  while (count-- > 0) found.push_back(word(words));
  return found;
}

// ---- dtypes

enum Type { f64, f32, f16, bf16, i64, i32, i16, i8, u8, b1 };

Type type(Words& words) {
  static const std::map<std::string, Type> types = {
      {"f64", f64}, {"f32", f32}, {"f16", f16}, {"bf16", bf16}, {"i64", i64},
      {"i32", i32}, {"i16", i16}, {"i8", i8},   {"u8", u8},     {"b1", b1}};
  return types.at(word<std::string>(words));
}

bool is_float(Type type) { return type <= bf16; }

uint16_t bits_of_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if (value != value) return 0x7fc0;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

float from_bf16(uint16_t half) {
  uint32_t bits = (uint32_t)half << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

double rounded(double value, Type type) {
  switch (type) {
    case f32: return (float)value;
    case f16: return (float)(_Float16)(float)value;
    case bf16: return from_bf16(bits_of_bf16((float)value));
    default: return value;
  }
}

int64_t wrapped(int64_t value, Type type) {
  switch (type) {
    case i32: return (int32_t)value;
    case i16: return (int16_t)value;
    case i8: return (int8_t)value;
    case u8: return (uint8_t)value;
    case b1: return value != 0;
    default: return value;
  }
}

double read_float(const void* memory, int64_t at, Type type) {
  switch (type) {
    case f64: return ((const double*)memory)[at];
    case f32: return ((const float*)memory)[at];
    case f16: return (float)((const _Float16*)memory)[at];
    default: return from_bf16(((const uint16_t*)memory)[at]);
  }
}

int64_t read_integer(const void* memory, int64_t at, Type type) {
  switch (type) {
    case i64: return ((const int64_t*)memory)[at];
    case i32: return ((const int32_t*)memory)[at];
    case i16: return ((const int16_t*)memory)[at];
    case i8: return ((const int8_t*)memory)[at];
    default: return ((const uint8_t*)memory)[at];
  }
}

void write_float(void* memory, int64_t at, Type type, double value) {
  switch (type) {
    case f64: ((double*)memory)[at] = value; break;
    case f32: ((float*)memory)[at] = (float)value; break;
    case f16: ((_Float16*)memory)[at] = (_Float16)(float)value; break;
    default: ((uint16_t*)memory)[at] = bits_of_bf16((float)value);
  }
}

void write_integer(void* memory, int64_t at, Type type, int64_t value) {
  switch (type) {
    case i64: ((int64_t*)memory)[at] = value; break;
    case i32: ((int32_t*)memory)[at] = (int32_t)value; break;
    case i16: ((int16_t*)memory)[at] = (int16_t)value; break;
    default: ((uint8_t*)memory)[at] = (uint8_t)value;
  }
}

// ---- scalar functions

template <class T> T larger(T a, T b) { return a != a ? a : b != b ? b : a > b ? a : b; }
template <class T> T smaller(T a, T b) { return a != a ? a : b != b ? b : a < b ? a : b; }

int64_t power(int64_t base, int64_t exponent) {
  if (exponent < 0) return base == 1 ? 1 : base == -1 ? (exponent % 2 ? -1 : 1) : 0;
  uint64_t result = 1, square = base;
  for (; exponent; exponent >>= 1, square *= square)
    if (exponent & 1) result *= square;
  return result;
}

double log_of_sum(double a, double b) {
  if (a == b && std::isinf(a)) return a;
  return larger(a, b) + std::log1p(std::exp(-std::abs(a - b)));
}

using OfFloat = double (*)(double);
using OfFloats = double (*)(double, double);
using OfInteger = int64_t (*)(int64_t);
using OfIntegers = int64_t (*)(int64_t, int64_t);
using Compared = bool (*)(double, double);
using ComparedIntegers = bool (*)(int64_t, int64_t);

#define F1(name, value) {name, [](double x) -> double { return value; }}
#define F2(name, value) {name, [](double a, double b) -> double { return value; }}
#define I1(name, value) {name, [](int64_t x) -> int64_t { return value; }}
#define I2(name, value) {name, [](int64_t a, int64_t b) -> int64_t { return value; }}

const std::map<std::string, OfFloat> FLOAT = {
    F1("neg", -x), F1("abs", std::abs(x)), F1("floor", std::floor(x)), F1("ceil", std::ceil(x)),
    F1("trunc", std::trunc(x)), F1("rint", std::nearbyint(x)), F1("sqrt", std::sqrt(x)),
    F1("exp", std::exp(x)), F1("exp2", std::exp2(x)), F1("expm1", std::expm1(x)),
    F1("log", std::log(x)), F1("log2", std::log2(x)), F1("log10", std::log10(x)),
    F1("log1p", std::log1p(x)), F1("sigmoid", 1 / (1 + std::exp(-x))), F1("erf", std::erf(x)),
    F1("erfc", std::erfc(x)), F1("normal_cdf", 0.5 * std::erfc(-x * std::sqrt(0.5))),
    F1("lgamma", std::lgamma(x)), F1("sin", std::sin(x)), F1("cos", std::cos(x)),
    F1("tan", std::tan(x)), F1("asin", std::asin(x)), F1("acos", std::acos(x)),
    F1("atan", std::atan(x)), F1("sinh", std::sinh(x)), F1("cosh", std::cosh(x)),
    F1("tanh", std::tanh(x)), F1("asinh", std::asinh(x)), F1("acosh", std::acosh(x)),
    F1("atanh", std::atanh(x))};

const std::map<std::string, OfFloats> FLOATS = {
    F2("add", a + b), F2("sub", a - b), F2("mul", a * b), F2("div", a / b),
    F2("mod", std::fmod(a, b)), F2("max", larger(a, b)), F2("min", smaller(a, b)),
    F2("copysign", std::copysign(a, b)), F2("pow", std::pow(a, b)), F2("atan2", std::atan2(a, b)),
    F2("fmod", std::fmod(a, b)), F2("hypot", std::hypot(a, b)),
    F2("nextafter", std::nextafter(a, b)), F2("logaddexp", log_of_sum(a, b))};

const std::map<std::string, OfInteger> INTEGER = {I1("neg", -(uint64_t)x), I1("abs", x < 0 ? -x : x),
                                                  I1("not", ~x)};

const std::map<std::string, OfIntegers> INTEGERS = {
    I2("add", (uint64_t)a + b), I2("sub", (uint64_t)a - b), I2("mul", (uint64_t)a * b),
    I2("div", b == 0 ? 0 : b == -1 ? -(uint64_t)a : a / b),
    I2("mod", b == 0 || b == -1 ? 0 : a % b), I2("max", larger(a, b)), I2("min", smaller(a, b)),
    I2("and", a & b), I2("or", a | b), I2("xor", a ^ b), I2("shl", (uint64_t)a << (b & 63)),
    I2("shr", a >> (b & 63)), I2("pow", power(a, b))};

template <class T> std::map<std::string, bool (*)(T, T)> comparisons() {
  return {{"lt", [](T a, T b) { return a < b; }},  {"le", [](T a, T b) { return a <= b; }},
          {"gt", [](T a, T b) { return a > b; }},  {"ge", [](T a, T b) { return a >= b; }},
          {"eq", [](T a, T b) { return a == b; }}, {"ne", [](T a, T b) { return a != b; }}};
}

const auto COMPARED = comparisons<double>();
const auto COMPARED_INTEGERS = comparisons<int64_t>();

// ---- programs

struct Buffer {
  Type type;
};

struct Access {
  int64_t buffer, offset;
  Numbers strides, scales;
};

struct Instruction {
  std::string op;
  Type type;
  bool is_wide;
  Numbers operands;
  Access access;
  bool has_guard = false;
  std::string number;  // of a constant, or where a guard is false
  Type storage = f32;
};

struct Store {
  Access access;
  int64_t value;
  bool is_sum;
};

struct Value {
  Type type;
  int64_t step;  // 1 where it varies along the row, else 0
  std::vector<double> f;
  Numbers i;

  Value(Type type, bool is_wide, int64_t points) : type(type), step(is_wide) {
    const int64_t count = is_wide ? points : 1;
    is_float(type) ? f.resize(count) : i.resize(count);
  }
  int64_t count() const { return std::max(f.size(), i.size()); }
  double real(int64_t at) const { return f[at * step]; }
  int64_t integer(int64_t at) const { return i[at * step]; }
  void set(int64_t at, double value) { f[at] = rounded(value, type); }
  void set(int64_t at, int64_t value) { i[at] = wrapped(value, type); }
  void set_word(int64_t at, const std::string& text) {
    is_float(type) ? set(at, std::strtod(text.c_str(), nullptr))
                   : set(at, (int64_t)std::strtoll(text.c_str(), nullptr, 10));
  }
};

struct Program {
  Numbers outer, row;
  int64_t rows = 1, points = 1;
  std::vector<Type> buffers;
  std::vector<Instruction> body;
  std::vector<Store> stores;

  explicit Program(const char* text) {
    Words words(text);
    const int64_t rank = word(words), row_rank = word(words);
    outer = numbers(words, rank - row_rank);
    row = numbers(words, row_rank);
    for (int64_t size : outer) rows *= size;
    for (int64_t size : row) points *= size;
    for (int64_t left = word(words); left > 0; --left) buffers.push_back(type(words));
    for (int64_t left = word(words); left > 0; --left) body.push_back(instruction(words));
    for (int64_t left = word(words); left > 0; --left) {
      Access to = access(words);
      const int64_t value = word(words);
      stores.push_back({to, value, word(words) != 0});
    }
  }

  Access access(Words& words) const {
    Access found;
    found.buffer = word(words);
    found.offset = word(words);
    found.strides = numbers(words, outer.size() + row.size());
    found.scales = numbers(words, word(words));
    return found;
  }

  Instruction instruction(Words& words) const {
    Instruction made;
    made.op = word<std::string>(words);
    made.type = type(words);
    made.is_wide = word(words) != 0;
    made.operands = numbers(words, word(words));
    if (made.op == "load" || made.op == "index") made.access = access(words);
    if (made.op == "load") made.has_guard = word(words) != 0;
    if (made.has_guard || made.op == "const") made.number = word<std::string>(words);
    if (made.op == "round") made.storage = type(words);
    check(made);
    return made;
  }

  // Refuses what there is no code for, before anything runs.
  void check(const Instruction& it) const {
    const std::string& op = it.op;
    static const std::vector<std::string> others = {"load", "index", "const",  "cast",
                                                    "round", "check", "select", "fma"};
    const std::string monoid = op.substr(op.find('_') + 1);
    const bool folds = op.rfind("reduce_", 0) == 0 || op.rfind("scan_", 0) == 0;
    if (folds ? FLOATS.count(monoid) || INTEGERS.count(monoid)
              : FLOAT.count(op) || FLOATS.count(op) || INTEGER.count(op) || INTEGERS.count(op) ||
                    COMPARED.count(op) || std::count(others.begin(), others.end(), op))
      return;
    throw std::runtime_error("no instruction " + op);
  }
};

// ---- running a row

struct Row {
  const Program& program;
  void* const* memory;
  Numbers at;  // coordinates of the row
  std::vector<Value> values;
  bool holds = true;

  // Calls `body(point, address)` at each point of the row, or at its first alone.
  template <class Body> void along(const Access& access, bool is_wide, Body body) const {
    int64_t address = access.offset;
    for (size_t d = 0; d < at.size(); ++d) address += access.strides[d] * at[d];
    const int64_t* strides = access.strides.data() + at.size();
    const int64_t rank = program.row.size(), count = is_wide ? program.points : 1;
    Numbers place(rank, 0);
    for (int64_t point = 0; point < count; ++point) {
      body(point, address);
      for (int64_t d = rank - 1; d >= 0; --d) {
        address += strides[d];
        if (++place[d] < program.row[d]) break;
        address -= strides[d] * place[d];
        place[d] = 0;
      }
    }
  }

  void run(const Instruction& it) {
    Value made(it.type, it.is_wide, program.points);
    if (it.op == "load") load(it, made);
    else if (it.op == "index") along(it.access, it.is_wide, [&](int64_t point, int64_t address) {
      is_float(it.type) ? made.set(point, (double)address) : made.set(point, address);
    });
    else if (it.op == "const") made.set_word(0, it.number);
    else if (it.op == "cast") cast(values[it.operands[0]], made);
    else if (it.op == "round") round(values[it.operands[0]], it.storage, made);
    else if (it.op == "check") check(values[it.operands[0]], made);
    else if (it.op == "select") select(it, made);
    else if (it.op.rfind("reduce_", 0) == 0) fold(it, it.op.substr(7), made, false);
    else if (it.op.rfind("scan_", 0) == 0) fold(it, it.op.substr(5), made, true);
    else scalar(it, made);
    values.push_back(std::move(made));
  }

  void load(const Instruction& it, Value& made) {
    const void* buffer = memory[it.access.buffer];
    const Type stored = program.buffers[it.access.buffer];
    along(it.access, it.is_wide, [&](int64_t point, int64_t address) {
      for (size_t n = 0; n < it.access.scales.size(); ++n)
        address += it.access.scales[n] * values[it.operands[n]].integer(point);
      if (it.has_guard && !values[it.operands.back()].integer(point))
        made.set_word(point, it.number);
      else if (is_float(stored)) made.set(point, read_float(buffer, address, stored));
      else made.set(point, read_integer(buffer, address, stored));
    });
  }

  static void cast(const Value& from, Value& made) {
    for (int64_t n = 0; n < made.count(); ++n) {
      if (is_float(made.type))
        made.set(n, is_float(from.type)   ? from.real(n)
                    : made.type == f32 ? (double)(float)from.integer(n)
                                       : (double)from.integer(n));
      else if (made.type == b1)
        made.set(n, (int64_t)(is_float(from.type) ? from.real(n) != 0 : from.integer(n) != 0));
      else made.set(n, is_float(from.type) ? (int64_t)from.real(n) : from.integer(n));
    }
  }

  static void round(const Value& from, Type storage, Value& made) {
    for (int64_t n = 0; n < made.count(); ++n) made.set(n, rounded(from.real(n), storage));
  }

  void check(const Value& condition, Value& made) {
    for (int64_t n = 0; n < made.count(); ++n) {
      made.set(n, condition.integer(n));
      holds = holds && made.i[n];
    }
  }

  void select(const Instruction& it, Value& made) const {
    const Value &condition = values[it.operands[0]], &a = values[it.operands[1]],
                &b = values[it.operands[2]];
    for (int64_t n = 0; n < made.count(); ++n) {
      const Value& chosen = condition.integer(n) ? a : b;
      is_float(made.type) ? made.set(n, chosen.real(n)) : made.set(n, chosen.integer(n));
    }
  }

  void scalar(const Instruction& it, Value& made) const {
    const Value& a = values[it.operands[0]];
    const Value& b = values[it.operands.size() > 1 ? it.operands[1] : it.operands[0]];
    const int64_t count = made.count();
    if (COMPARED.count(it.op)) {
      const auto real = COMPARED.at(it.op);
      const auto integer = COMPARED_INTEGERS.at(it.op);
      for (int64_t n = 0; n < count; ++n)
        made.set(n, (int64_t)(is_float(a.type) ? real(a.real(n), b.real(n))
                                               : integer(a.integer(n), b.integer(n))));
    } else if (it.op == "fma") {
      const Value& c = values[it.operands[2]];
      for (int64_t n = 0; n < count; ++n)
        made.set(n, it.type == f32 ? std::fma((float)a.real(n), (float)b.real(n), (float)c.real(n))
                                   : std::fma(a.real(n), b.real(n), c.real(n)));
    } else if (it.op == "nextafter" && it.type == f32) {
      for (int64_t n = 0; n < count; ++n)
        made.set(n, std::nextafter((float)a.real(n), (float)b.real(n)));
    } else if (is_float(it.type) && it.operands.size() == 1) {
      const auto function = FLOAT.at(it.op);
      for (int64_t n = 0; n < count; ++n) made.set(n, function(a.real(n)));
    } else if (is_float(it.type)) {
      const auto function = FLOATS.at(it.op);
      for (int64_t n = 0; n < count; ++n) made.set(n, function(a.real(n), b.real(n)));
    } else if (it.op == "not" && it.type == b1) {
      for (int64_t n = 0; n < count; ++n) made.set(n, (int64_t)!a.integer(n));
    } else if (it.operands.size() == 1) {
      const auto function = INTEGER.at(it.op);
      for (int64_t n = 0; n < count; ++n) made.set(n, function(a.integer(n)));
    } else {
      const auto function = INTEGERS.at(it.op);
      for (int64_t n = 0; n < count; ++n) made.set(n, function(a.integer(n), b.integer(n)));
    }
  }

  // Folds a row; a scan keeps what there is at each point. Sums of float32 are kept in float64.
  void fold(const Instruction& it, const std::string& monoid, Value& made, bool is_scan) const {
    const Value& from = values[it.operands[0]];
    if (is_float(it.type)) {
      const auto function = FLOATS.at(monoid);
      const double infinity = std::numeric_limits<double>::infinity();
      double sum = monoid == "add" ? 0 : monoid == "mul" ? 1 : monoid == "min" ? infinity : -infinity;
      for (int64_t n = 0; n < program.points; ++n) {
        sum = function(sum, from.real(n));
        if (is_scan) made.set(n, sum);
      }
      if (!is_scan) made.set(0, sum);
      return;
    }
    const auto function = INTEGERS.at(monoid);
    int64_t sum = first_of_integers(it.type, monoid);
    for (int64_t n = 0; n < program.points; ++n) {
      sum = wrapped(function(sum, from.integer(n)), it.type);
      if (is_scan) made.set(n, sum);
    }
    if (!is_scan) made.set(0, sum);
  }

  static int64_t first_of_integers(Type type, const std::string& monoid) {
    if (monoid == "add" || monoid == "or") return 0;
    if (monoid == "mul" || monoid == "and") return 1;
    const bool is_least = monoid == "max";
    if (type == b1 || type == u8) return is_least ? 0 : type == b1 ? 1 : 255;
    const int64_t bits = type == i64 ? 64 : type == i32 ? 32 : type == i16 ? 16 : 8;
    const int64_t most = std::numeric_limits<int64_t>::max() >> (64 - bits);
    return is_least ? -most - 1 : most;
  }

  void store(const Store& it) const {
    const Value& value = values[it.value];
    void* buffer = memory[it.access.buffer];
    const Type stored = program.buffers[it.access.buffer];
    const int64_t* strides = it.access.strides.data() + at.size();
    const bool is_wide = value.step || std::any_of(strides, strides + program.row.size(),
                                                   [](int64_t stride) { return stride != 0; });
    along(it.access, is_wide, [&](int64_t point, int64_t address) {
      is_float(stored) ? write_float(buffer, address, stored, value.real(point))
                       : write_integer(buffer, address, stored, value.integer(point));
    });
  }
};

// What is summed over all rows, at each point of a row.
struct Sums {
  Value total;

  Sums(const Store& store, const Program& program)
      : total(program.body[store.value].type == f32 ? f64 : program.body[store.value].type, true,
              program.points) {}

  void add(const Value& value) {
    for (int64_t n = 0; n < total.count(); ++n)
      is_float(total.type) ? total.set(n, total.f[n] + value.real(n))
                           : total.set(n, total.i[n] + value.integer(n));
  }
};

bool run(const Program& program, void* const* memory) {
  std::vector<Sums> sums;
  for (const Store& store : program.stores) sums.emplace_back(store, program);
  Row row{program, memory, Numbers(program.outer.size(), 0), {}};
  for (int64_t number = 0; number < program.rows; ++number) {
    row.values.clear();
    for (const Instruction& it : program.body) row.run(it);
    if (!row.holds) return false;
    for (size_t n = 0; n < sums.size(); ++n) {
      const Store& store = program.stores[n];
      store.is_sum ? sums[n].add(row.values[store.value]) : row.store(store);
    }
    for (int64_t d = row.at.size() - 1; d >= 0 && ++row.at[d] == program.outer[d]; --d)
      row.at[d] = 0;
  }
  for (size_t n = 0; n < sums.size(); ++n) {
    if (!program.stores[n].is_sum) continue;
    row.values.assign(1, sums[n].total);
    row.store({program.stores[n].access, 0, false});
  }
  return true;
}

std::string message;

}  // namespace

// Returns a program, or null where it holds what there is no code for: then `loops_error` says what.
extern "C" void* loops_make(const char* text) {
  try {
    return new Program(text);
  } catch (const std::exception& error) {
    message = error.what();
    return nullptr;
  }
}

extern "C" const char* loops_error() { return message.c_str(); }

extern "C" void loops_free(void* program) { delete (Program*)program; }

// Returns 0, or another number where a check of the program does not hold.
extern "C" long loops_run(void* program, void* const* memory) {
  return !run(*(const Program*)program, memory);
}
