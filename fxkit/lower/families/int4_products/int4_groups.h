// A matrix of 4-bit integers, two to a byte, in groups along a row that share a scale and a
// zero point: how it lies in memory, and steps over it. Products by it sum a group of integers exactly.
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

// Up to FX_GROUP_ROWS rows of the left operand in order, and of each group the sum of its terms. A thread
// keeps them for all panels of a block, where they have room for the whole depth; none is below 0.
template <class Term, long TERMS>
struct fx_rows_in_order {
  long block = -1, groups = 0;
  alignas(64) Term terms[TERMS];
  alignas(64) int begin[sizeof(Term) == 1 ? TERMS / 8 : 16];
  alignas(64) float totals[TERMS / FX_UNIT + FX_GROUP_ROWS * 16];
  short place[TERMS / FX_UNIT + 4];
};
typedef fx_rows_in_order<signed char, FX_ORDERED_BYTES> fx_bytes_in_order;
typedef fx_rows_in_order<float, FX_ORDERED_FLOATS> fx_floats_in_order;

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
static __attribute__((noinline)) long fx_places(long from, long terms, long group, short* place) {
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
static __attribute__((noinline)) void fx_moved_scales(const float* scale, const signed char* zeros, long count, float* to) {
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
static __attribute__((noinline)) void fx_moved_scales(const float* scale, const Zero* zeros, long count, float* to) {
  for (long g = 0; g < count; ++g) to[g] = scale[g] * (float)zeros[g];
  for (long g = count; g % 16; ++g) to[g] = 0;
}
#endif
