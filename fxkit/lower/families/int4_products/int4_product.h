// Products by a matrix of 4-bit integers, two to a byte, in groups along a row that share a scale and a
// zero point. The integers of a group are summed exactly where both operands have them.
//
// The low half of a byte holds the first of two neighbours, the high half the second, each as -8 to 7.
// Vectors take 16 bytes of a row to 128 bits, which is 32 terms of one group: lanes have its scale.
static const long FX_GROUP_COLUMNS = 64, FX_GROUP_ROWS = 4, FX_UNIT = 32, FX_GROUPED_ROWS = 384;

// The zero point of a row of what is signed bytes.
static inline int fx_lift_of(const signed char*, int zero) { return zero; }
static inline int fx_lift_of(const unsigned char*, int zero) { return zero - 128; }

// Bytes of a row that a step takes.
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define FX_INTEGER_STEP 64
#elif defined(__AVX2__)
#define FX_INTEGER_STEP 32
#endif
#if defined(__AVX512F__) && defined(__AVX512BW__)
#define FX_FLOAT_STEP 64
#elif defined(__AVX2__)
#define FX_FLOAT_STEP 32
#endif

// Terms of rows that are in order for the kernel at a time; the first cache holds them.
static const long FX_ORDERED_FLOATS = 8192, FX_ORDERED_BYTES = 16384;

// The packed matrix: scales and zero points of a row lie side by side. Zero points may be left out.
template <class Zero>
struct fx_groups {
  const unsigned char* packed;
  const float* scales;
  const Zero* zeros;
  long group;

  long bytes(long depth) const { return depth / 2; }
  long count(long depth) const { return depth / group; }
};

#if defined(FX_FLOAT_STEP)
template <int BYTES>
struct fx_vectors_of;

template <>
struct fx_vectors_of<32> {
  typedef float floats __attribute__((vector_size(32)));
  typedef int ints __attribute__((vector_size(32)));
  typedef int loose __attribute__((vector_size(32), aligned(1), may_alias));
  typedef float loose_floats __attribute__((vector_size(32), aligned(1), may_alias));
};

template <>
struct fx_vectors_of<64> {
  typedef float floats __attribute__((vector_size(64)));
  typedef int ints __attribute__((vector_size(64)));
  typedef int loose __attribute__((vector_size(64), aligned(1), may_alias));
  typedef float loose_floats __attribute__((vector_size(64), aligned(1), may_alias));
};

typedef fx_vectors_of<32>::floats fx_half_floats;
typedef fx_vectors_of<64>::floats fx_whole_floats;

// Four lanes of each of several numbers.
static inline void fx_by_unit(const float* from, const short* place, fx_half_floats& to) {
  const fx_half_floats a = (fx_half_floats){} + from[place[0]], b = (fx_half_floats){} + from[place[1]];
  to = __builtin_shufflevector(a, b, 0, 1, 2, 3, 12, 13, 14, 15);
}

static inline void fx_by_unit(const float* from, const short* place, fx_whole_floats& to) {
  fx_half_floats low, high;
  fx_by_unit(from, place, low);
  fx_by_unit(from, place + 2, high);
  to = __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}

template <int BYTES>
struct fx_step {
  typedef typename fx_vectors_of<BYTES>::floats floats;
  typedef typename fx_vectors_of<BYTES>::ints ints;
  typedef typename fx_vectors_of<BYTES>::loose loose;
  typedef typename fx_vectors_of<BYTES>::loose_floats loose_floats;
  static constexpr int LANES = BYTES / 4, UNITS = BYTES / 16, TERMS = BYTES * 2;

  // The scale of each lane, by the groups of the units of a step.
  static inline floats scales(const float* scale, const short* place) {
    const floats first = (floats){} + scale[place[0]];
    if (place[0] == place[UNITS - 1]) return first;
    floats found;
    fx_by_unit(scale, place, found);
    return found;
  }

  // One rounding; compilers are told not to make it of a product and a sum.
  static inline void add_product(floats& sum, floats a, floats b) {
    asm("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
  }

  // The bytes of a step of which so many are there; others are filled.
  static inline ints packed_at(const unsigned char* from, long there, int fill) {
    if (there >= BYTES) return *(const loose*)from;
    alignas(BYTES) unsigned char part[BYTES];
    __builtin_memset(part, fill, BYTES);
    __builtin_memcpy(part, from, there);
    return *(const ints*)part;
  }

  static inline float sum(floats x) {
    typedef float four __attribute__((vector_size(16)));
    four part[LANES / 4];
    __builtin_memcpy(part, &x, sizeof x);
    for (int half = LANES / 8; half > 0; half /= 2)
      for (int i = 0; i < half; ++i) part[i] += part[i + half];
    const four sums = part[0] + __builtin_shufflevector(part[0], part[0], 2, 3, 0, 1);
    return sums[0] + sums[1];
  }
};

// Of each unit of terms the group, counted from that of the first.
static inline long fx_places(long from, long terms, long group, short* place) {
  long in_group = from % group, at = 0;
  for (long unit = 0; unit * FX_UNIT < terms; ++unit) {
    place[unit] = (short)at;
    in_group += FX_UNIT;
    if (in_group >= group) in_group = 0, ++at;
  }
  const long units = (terms + FX_UNIT - 1) / FX_UNIT;
  for (long more = 0; more < 4; ++more) place[units + more] = place[units - 1];
  return place[units - 1] + 1;
}

// As many bytes as floats; gcc 12 would convert them one by one.
static inline fx_half_floats fx_floats_of(const signed char* from) {
  fx_vectors_of<32>::ints wide;
  asm("vpmovsxbd %1, %0" : "=x"(wide) : "m"(*(const signed char(*)[8])from));
  return __builtin_convertvector(wide, fx_half_floats);
}

// scale * zero point of each group of a row, and 0 up to a whole vector.
static inline void fx_moved_scales(const float* scale, const signed char* zeros, long count, float* to) {
  long g = 0;
#if FX_FLOAT_STEP == 64
  for (; g + 16 <= count; g += 16) {
    fx_vectors_of<64>::ints wide;
    asm("vpmovsxbd %1, %0" : "=v"(wide) : "m"(*(const signed char(*)[16])(zeros + g)));
    *(fx_whole_floats*)(to + g) = *(const fx_vectors_of<64>::loose_floats*)(scale + g) *
        __builtin_convertvector(wide, fx_whole_floats);
  }
#endif
  for (; g + 8 <= count; g += 8)
    *(fx_half_floats*)(to + g) =
        *(const fx_vectors_of<32>::loose_floats*)(scale + g) * fx_floats_of(zeros + g);
  for (; g < count; ++g) to[g] = scale[g] * (float)zeros[g];
  for (; g % 16; ++g) to[g] = 0;
}

template <class Zero>
static inline void fx_moved_scales(const float* scale, const Zero* zeros, long count, float* to) {
  for (long g = 0; g < count; ++g) to[g] = scale[g] * (float)zeros[g];
  for (long g = count; g % 16; ++g) to[g] = 0;
}
#endif

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
static void fx_order_row(const Left* x, int zero, long terms, signed char* ordered, int* begin) {
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
                              long columns, long depth, float* sums) {
  typedef fx_integer_step s;
  const long most = FX_ORDERED_BYTES / ROWS / 128 * 128;
  alignas(64) signed char ordered[FX_ORDERED_BYTES];
  alignas(64) int begin[FX_ORDERED_BYTES / 8];
  alignas(64) float totals[ROWS][FX_ORDERED_BYTES / ROWS / FX_UNIT + 16];
  alignas(64) float moved[FX_ORDERED_BYTES / FX_UNIT + 16];
  short place[FX_ORDERED_BYTES / FX_UNIT + 4];
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
    const long groups = fx_places(from, terms, b.group, place);
    for (int r = 0; r < ROWS; ++r) {
      const Left* const terms_of = a + r * row + from;
      fx_order_row(terms_of, zero[r], terms, ordered + r * most, begin + r * most / 8);
      if (!b.zeros) continue;
      for (long g = 0; g < (groups + 15) / 16 * 16; ++g) totals[r][g] = 0;
      for (long unit = 0; unit * FX_UNIT < terms; ++unit) {
        int all = 0;
        for (long i = 0; i < FX_UNIT; ++i) all += terms_of[unit * FX_UNIT + i];
        totals[r][place[unit]] += (float)(all - FX_UNIT * zero[r]);
      }
    }
    const auto finish = [&](long c, s::floats (&held)[ROWS]) __attribute__((always_inline)) {
      const long first = c * b.count(depth) + from / b.group;
      if (b.zeros) {
        fx_moved_scales(b.scales + first, b.zeros + first, groups, moved);
        for (long g = 0; g < groups; g += s::LANES)
#pragma GCC unroll 4
          for (int r = 0; r < ROWS; ++r)
            held[r] -= *(const s::floats*)(moved + g) * *(const s::floats*)(totals[r] + g);
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
        for (int i = 0; i < AT_ONCE; ++i) finish(c + i, held[i]);
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
      finish(c, held);
    }
  }
}

// Chooses whether rows are lifted.
template <int ROWS, class Left, class Zero>
static void fx_integer_rows(const Left* a, long row, const int* zero, const fx_groups<Zero>& b,
                            long columns, long depth, float* sums) {
  bool lifted = false;
  for (int r = 0; r < ROWS; ++r) lifted |= fx_lift_of(a, zero[r]) != 0;
  if (lifted)
    fx_integer_groups<ROWS, true>(a, row, zero, b, columns, depth, sums);
  else
    fx_integer_groups<ROWS, false>(a, row, zero, b, columns, depth, sums);
}
#endif

// The two integers of a byte.
static inline int fx_low_of(unsigned char byte) { return (signed char)(byte << 4) >> 4; }
static inline int fx_high_of(unsigned char byte) { return (signed char)byte >> 4; }

// The same one by one, for groups of any even size; Sum is what a group is summed in.
template <class Sum, class Left, class Zero>
static void fx_plain_groups(const Left* a, long row, const int* zero, const fx_groups<Zero>& b, long rows,
                            long columns, long depth, float* sums) {
  for (long r = 0; r < rows; ++r)
    for (long c = 0; c < columns; ++c) {
      const unsigned char* const bytes = b.packed + c * b.bytes(depth);
      for (long g = 0; g < b.count(depth); ++g) {
        const long place = c * b.count(depth) + g;
        const Sum moved = b.zeros ? (Sum)b.zeros[place] : (Sum)0;
        const Sum lift = zero ? (Sum)zero[r] : (Sum)0;
        Sum sum = 0;
        for (long k = g * b.group; k < (g + 1) * b.group; k += 2) {
          const unsigned char byte = bytes[k / 2];
          sum += ((Sum)a[r * row + k] - lift) * ((Sum)fx_low_of(byte) - moved);
          sum += ((Sum)a[r * row + k + 1] - lift) * ((Sum)fx_high_of(byte) - moved);
        }
        sums[r * FX_GROUP_COLUMNS + c] += (float)sum * b.scales[place];
      }
    }
}

#if defined(FX_INTEGER_STEP)
// Rows enough for it to be worth bytes of the weight in memory: they are multiplied as such.
template <bool HAS_TILES, class Left, class Zero>
static void fx_groups_of_bytes(const Left* a, long row, fx_zeros zeros, const fx_groups<Zero>& b,
                               long rows, long columns, long depth, float* sums) {
  const long most = 1024;
  alignas(64) signed char bytes[FX_GROUP_COLUMNS * most];
  alignas(64) int found[FX_GROUPED_ROWS * FX_GROUP_COLUMNS];
  for (long k = 0; k < depth;) {
    const long rest = b.group - k % b.group, some = rest < most ? rest : most;
    for (long c = 0; c < columns; ++c) {
      const unsigned char* const from = b.packed + c * b.bytes(depth) + k / 2;
      for (long i = 0; i < some / 2; ++i) {
        bytes[c * most + 2 * i] = (signed char)(from[i] << 4) >> 4;
        bytes[c * most + 2 * i + 1] = (signed char)from[i] >> 4;
      }
    }
    fx_add_product<HAS_TILES, false>(
        a + k, row, bytes, most, rows, columns, some, zeros, true, found);
    alignas(64) float scale[FX_GROUP_COLUMNS] = {};
    alignas(64) int moved[FX_GROUP_COLUMNS] = {};
    for (long c = 0; c < columns; ++c) {
      const long place = c * b.count(depth) + k / b.group;
      scale[c] = b.scales[place];
      moved[c] = b.zeros ? (int)b.zeros[place] : 0;
    }
    for (long r = 0; r < rows; ++r) {
      const Left* const x = a + r * row + k;
      int total = 0;
      if (b.zeros) {
        for (long i = 0; i < some; ++i) total += x[i];
        total -= (int)some * zeros.of(r);
      }
      const int* const from = found + r * FX_GROUP_COLUMNS;
      float* const to = sums + r * FX_GROUP_COLUMNS;
      for (long c = 0; c < FX_GROUP_COLUMNS; ++c) to[c] += (float)(from[c] - moved[c] * total) * scale[c];
    }
    k += some;
  }
}
#endif

// sums[rows][64] = (A - zeros) by a panel of columns, for integers A; each group is summed in 32 bits.
template <bool HAS_TILES, class Left, class Zero>
static void fx_int4_product(const Left* a, long row, fx_zeros zeros, const fx_groups<Zero>& b, long rows,
                             long columns, long depth, float* sums) {
  __builtin_memset(sums, 0, rows * FX_GROUP_COLUMNS * sizeof(float));
#if defined(FX_INTEGER_STEP)
  if (b.group % FX_UNIT == 0 && rows > FX_FEW_ROWS) {
    fx_groups_of_bytes<HAS_TILES>(a, row, zeros, b, rows, columns, depth, sums);
    return;
  }
#endif
  for (long r = 0; r < rows; r += FX_GROUP_ROWS) {
    const long count = rows - r < FX_GROUP_ROWS ? rows - r : FX_GROUP_ROWS;
    int zero[FX_GROUP_ROWS];
    bool are_bytes = true;
    for (long i = 0; i < count; ++i) {
      zero[i] = zeros.of(r + i);
      are_bytes &= fx_lift_of(a, zero[i]) >= -254 && fx_lift_of(a, zero[i]) <= 256;
    }
    const Left* const from = a + r * row;
    float* const to = sums + r * FX_GROUP_COLUMNS;
#if defined(FX_INTEGER_STEP)
    if (b.group % FX_UNIT == 0 && are_bytes) {
      if (count == 1) fx_integer_rows<1>(from, row, zero, b, columns, depth, to);
      if (count == 2) fx_integer_rows<2>(from, row, zero, b, columns, depth, to);
      if (count == 3) fx_integer_rows<3>(from, row, zero, b, columns, depth, to);
      if (count == 4) fx_integer_rows<4>(from, row, zero, b, columns, depth, to);
      continue;
    }
#endif
    fx_plain_groups<int>(from, row, zero, b, count, columns, depth, to);
  }
}
