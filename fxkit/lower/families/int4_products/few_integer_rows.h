// Products of a few rows of integers by a matrix of 4-bit integers in groups: exact in each group.
#if defined(FX_INTEGER_STEP)
typedef fx_step<FX_INTEGER_STEP> fx_integer_step;

// sums + the products of unsigned by signed bytes in each lane, of two vectors of them; and of a third
// one, where it is LIFTED. The unsigned ones are at most 15, those of the third 30: what is added up
// fits into 16 bits.
template <bool LIFTED>
static inline fx_integer_step::ints fx_nibble_dots(fx_integer_step::ints sums,
                                                   const fx_integer_step::ints (&factors)[3],
                                                   const signed char* x, fx_integer_step::ints lift) {
  typedef fx_integer_step s;
  const s::ints y[3] = {*(const s::ints*)x, *(const s::ints*)(x + FX_INTEGER_STEP), lift};
#if FX_INTEGER_STEP == 64
#pragma GCC unroll 3
  for (int i = 0; i < (LIFTED ? 3 : 2); ++i)
    asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(factors[i]), "v"(y[i]));
  return sums;
#else
  typedef char bytes __attribute__((vector_size(32)));
  typedef short shorts __attribute__((vector_size(32)));
  shorts pairs = (shorts)__builtin_ia32_pmaddubsw256((bytes)factors[0], (bytes)y[0]);
#pragma GCC unroll 2
  for (int i = 1; i < (LIFTED ? 3 : 2); ++i)
    pairs += (shorts)__builtin_ia32_pmaddubsw256((bytes)factors[i], (bytes)y[i]);
  return sums + (s::ints)__builtin_ia32_pmaddwd256(pairs, (shorts){} + 1);
#endif
}

static inline fx_integer_step::ints fx_lifted_more(fx_integer_step::ints sums,
                                                   fx_integer_step::ints factors,
                                                   fx_integer_step::ints lift) {
#if FX_INTEGER_STEP == 64
  asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(factors), "v"(lift));
  return sums;
#else
  typedef char bytes __attribute__((vector_size(32)));
  typedef short shorts __attribute__((vector_size(32)));
  const shorts pairs = (shorts)__builtin_ia32_pmaddubsw256((bytes)factors, (bytes)lift);
  return sums + (fx_integer_step::ints)__builtin_ia32_pmaddwd256(pairs, (shorts){} + 1);
#endif
}

// Of 2 vectors of bytes in order, those at even and those at odd places, as signed bytes.
template <class Left>
static inline void fx_every_second(const Left* from, Left flip, signed char* to) {
  typedef fx_integer_step s;
  typedef short shorts __attribute__((vector_size(FX_INTEGER_STEP)));
  typedef signed char half __attribute__((vector_size(FX_INTEGER_STEP / 2), may_alias));
  const s::ints flips = (s::ints){} + (unsigned char)flip * 0x01010101;
#pragma GCC unroll 2
  for (int v = 0; v < 2; ++v) {
    const shorts x = (shorts)(*(const s::loose*)(from + v * FX_INTEGER_STEP) ^ flips);
    *(half*)(to + v * FX_INTEGER_STEP / 2) = __builtin_convertvector(x, half);
    *(half*)(to + (2 + v) * FX_INTEGER_STEP / 2) = __builtin_convertvector(x >> 8, half);
  }
}

// Writes a row in order: its terms as signed bytes, and for each lane what the weight's being moved up by
// 8 adds to a sum, which starts from there.
template <class Left>
static __attribute__((noinline)) void fx_order_row(const Left* x, int zero, long terms, signed char* ordered, int* begin) {
  typedef fx_integer_step s;
  const Left flip = (Left)-1 < 0 ? 0 : (Left)128;
  const s::ints ones = (s::ints){} + 0x01010101, factors[3] = {ones, ones, ones};
  const int lift = fx_lift_of(x, zero);
  for (long k = 0; k < terms; k += s::TERMS, begin += s::LANES, ordered += s::TERMS) {
    const Left* from = x + k;
    Left part[s::TERMS];
    if (terms - k < s::TERMS) {
      for (long i = 0; i < s::TERMS; ++i) part[i] = i < terms - k ? from[i] : flip;
      from = part;
    }
    fx_every_second(from, flip, ordered);
    *(s::ints*)begin = (fx_nibble_dots<false>((s::ints){}, factors, ordered, ones) - 8 * lift) * -8;
    for (long lane = (terms - k) / 8; lane < s::LANES; ++lane) begin[lane] = 0;
  }
}

// The sum of a row's terms in each group, and 0 up to a whole vector.
template <class Left>
static __attribute__((noinline)) void fx_total_groups(const Left* x, int zero, long terms, long groups,
                                                      const short* place, float* totals) {
  for (long g = 0; g < (groups + 15) / 16 * 16; ++g) totals[g] = 0;
  for (long unit = 0; unit * FX_UNIT < terms; ++unit) {
    int all = 0;
    for (long i = 0; i < FX_UNIT; ++i) all += x[unit * FX_UNIT + i];
    totals[place[unit]] += (float)(all - FX_UNIT * zero);
  }
}

// The low halves of bytes, moved up by 8.
static inline fx_integer_step::ints fx_positive_nibbles(fx_integer_step::ints words) {
  typedef fx_integer_step s;
  const s::ints flips = (s::ints){} + 0x08080808, halves = (s::ints){} + 0x0f0f0f0f;
#if FX_INTEGER_STEP == 64
  asm("vpternlogd $0x28, %2, %1, %0" : "+v"(words) : "v"(flips), "v"(halves));  // (words ^ flips) & halves
  return words;
#else
  return (words ^ flips) & halves;
#endif
}

// What rows are multiplied by, in order: their bytes, what sums begin with, and what they are moved by.
template <int ROWS>
struct fx_ordered_rows {
  const signed char* bytes;
  const int* begin;
  long apart;
  fx_integer_step::ints lifts[ROWS], rests[ROWS];
  bool has_rests;
};

// ROWS rows by COLUMNS columns side by side, whose groups are whole steps. Other columns than these are
// asked for ahead: memory takes longer than a few steps.
template <int ROWS, int COLUMNS, bool LIFTED>
static inline __attribute__((always_inline)) void fx_whole_groups(
    const fx_ordered_rows<ROWS>& x, const unsigned char* bytes, long step, const float* scale, long apart,
    long group, long terms, fx_integer_step::floats (&held)[COLUMNS][ROWS]) {
  typedef fx_integer_step s;
  const long ahead = COLUMNS * step <= 16384 ? COLUMNS * step : 4096;
  for (long from = 0; from < terms; from += group, ++scale)
    for (long k = from; k < from + group; k += s::TERMS)
#pragma GCC unroll 4
      for (int c = 0; c < COLUMNS; ++c) {
        const unsigned char* const at = bytes + c * step + k / 2;
        __builtin_prefetch(at + ahead);
        const s::ints words = *(const s::loose*)at;
        const s::ints low = fx_positive_nibbles(words), high = fx_positive_nibbles(words >> 4);
        const s::ints factors[3] = {low, high, low + high};
        const s::floats factor = scale[c * apart] - (s::floats){};
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) {
          s::ints found = *(const s::ints*)(x.begin + (r * x.apart + k) / 8);
          found = fx_nibble_dots<LIFTED>(found, factors, x.bytes + r * x.apart + k, x.lifts[r]);
          if (LIFTED && x.has_rests) found = fx_lifted_more(found, factors[2], x.rests[r]);
          s::add_product(held[c][r], __builtin_convertvector(found, s::floats), factor);
        }
      }
}

// ROWS rows of integers by a panel, added to sums[ROWS][64]: (A - zeros) by B. Where zero points of rows
// are not those of signed bytes, rows are LIFTED: a byte, or two where it has to be, stands for that.
template <int ROWS, bool LIFTED, class Left, class Zero>
static void fx_integer_groups(const Left* a, long row, const int* zero, const fx_groups<Zero>& b,
                              long columns, long depth, long block, fx_bytes_in_order& in_order,
                              float* sums) {
  typedef fx_integer_step s;
  const long most = FX_ORDERED_BYTES / ROWS / 128 * 128, most_groups = most / FX_UNIT + 16;
  alignas(64) float moved[FX_ORDERED_BYTES / FX_UNIT + 16];
  signed char* const ordered = in_order.terms;
  int* const begin = in_order.begin;
  short* const place = in_order.place;
  fx_ordered_rows<ROWS> x = {ordered, begin, most, {}, {}, false};
  for (int r = 0; LIFTED && r < ROWS; ++r) {
    const int lift = -fx_lift_of(a, zero[r]);
    const int byte = lift < -128 ? -128 : lift > 127 ? 127 : lift;
    x.lifts[r] = (s::ints){} + (byte & 255) * 0x01010101;
    x.rests[r] = (s::ints){} + ((lift - byte) & 255) * 0x01010101;
    x.has_rests |= lift != byte;
  }
  for (long from = 0; from < depth; from += most) {
    const long terms = depth - from < most ? depth - from : most;
    const bool are_in_order = block >= 0 && in_order.block == block;
    if (!are_in_order) in_order.groups = fx_places(from, terms, b.group, place);
    const long groups = in_order.groups;
    for (int r = 0; r < ROWS && !are_in_order; ++r) {
      const Left* const terms_of = a + r * row + from;
      fx_order_row(terms_of, zero[r], terms, ordered + r * most, begin + r * most / 8);
      if (!b.zeros) continue;
      fx_total_groups(terms_of, zero[r], terms, groups, place, in_order.totals + r * most_groups);
    }
    in_order.block = depth <= most ? block : -1;
    const auto add_column = [&](long c, s::floats (&held)[ROWS]) __attribute__((always_inline)) {
      const long first = c * b.count(depth) + from / b.group;
      if (b.zeros) {
        fx_moved_scales(b.scales + first, b.zeros + first, groups, moved);
        for (long g = 0; g < groups; g += s::LANES)
#pragma GCC unroll 4
          for (int r = 0; r < ROWS; ++r)
            held[r] -= *(const s::floats*)(moved + g) *
                *(const s::floats*)(in_order.totals + r * most_groups + g);
      }
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; ++r) sums[r * FX_GROUP_COLUMNS + c] += s::sum(held[r]);
    };
    long c = 0;
    if (b.group % s::TERMS == 0 && from % b.group == 0 && terms % b.group == 0) {
      constexpr int AT_ONCE = ROWS == 1 ? 4 : ROWS == 2 ? 2 : 1;
      for (; c + AT_ONCE <= columns; c += AT_ONCE) {
        s::floats held[AT_ONCE][ROWS] = {};
        fx_whole_groups<ROWS, AT_ONCE, LIFTED>(
            x, b.packed + c * b.bytes(depth) + from / 2, b.bytes(depth),
            b.scales + c * b.count(depth) + from / b.group, b.count(depth), b.group, terms, held);
#pragma GCC unroll 4
        for (int i = 0; i < AT_ONCE; ++i) add_column(c + i, held[i]);
      }
    }
    for (; c < columns; ++c) {
      const unsigned char* const bytes = b.packed + c * b.bytes(depth) + from / 2;
      const float* const scale = b.scales + c * b.count(depth) + from / b.group;
      s::floats held[ROWS] = {};
      for (long k = 0; k < terms; k += s::TERMS) {
        __builtin_prefetch(bytes + k / 2 + 4096);
        const s::ints words = s::packed_at(bytes + k / 2, (terms - k) / 2, 0x88);
        const s::ints low = fx_positive_nibbles(words), high = fx_positive_nibbles(words >> 4);
        const s::ints factors[3] = {low, high, low + high};
        const s::floats factor = s::scales(scale, place + k / FX_UNIT);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) {
          s::ints found = *(const s::ints*)(begin + (r * most + k) / 8);
          found = fx_nibble_dots<LIFTED>(found, factors, ordered + r * most + k, x.lifts[r]);
          if (LIFTED && x.has_rests) found = fx_lifted_more(found, factors[2], x.rests[r]);
          s::add_product(held[r], __builtin_convertvector(found, s::floats), factor);
        }
      }
      add_column(c, held);
    }
  }
}

// Chooses whether rows are lifted.
template <int ROWS, class Left, class Zero>
static void fx_integer_rows(const Left* a, long row, const int* zero, const fx_groups<Zero>& b,
                            long columns, long depth, long block, fx_bytes_in_order& in_order,
                            float* sums) {
  bool lifted = false;
  for (int r = 0; r < ROWS; ++r) lifted |= fx_lift_of(a, zero[r]) != 0;
  if (lifted)
    fx_integer_groups<ROWS, true>(a, row, zero, b, columns, depth, block, in_order, sums);
  else
    fx_integer_groups<ROWS, false>(a, row, zero, b, columns, depth, block, in_order, sums);
}
#endif
