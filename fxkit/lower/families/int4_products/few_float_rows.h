// Products of a few rows of floats by a matrix of 4-bit integers in groups: floats are put in the order in
// which shifts of packed words find their factors.
#if defined(FX_FLOAT_STEP)
typedef fx_step<FX_FLOAT_STEP> fx_float_step;

// Of 8 vectors of floats in order, those of each place in 8, as the shifts of packed words find them.
static inline void fx_every_eighth(const float* from, float* to) {
  typedef fx_float_step s;
  s::floats x[8], y[8];
  for (int v = 0; v < 8; ++v) x[v] = *(const s::loose_floats*)(from + v * s::LANES);
#if FX_FLOAT_STEP == 64
#define FX_EVENS(A, B) \
  __builtin_shufflevector(A, B, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30)
#define FX_ODDS(A, B) \
  __builtin_shufflevector(A, B, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31)
#else
#define FX_EVENS(A, B) __builtin_shufflevector(A, B, 0, 2, 4, 6, 8, 10, 12, 14)
#define FX_ODDS(A, B) __builtin_shufflevector(A, B, 1, 3, 5, 7, 9, 11, 13, 15)
#endif
#pragma GCC unroll 4
  for (int v = 0; v < 4; ++v) {
    y[v] = FX_EVENS(x[2 * v], x[2 * v + 1]);
    y[4 + v] = FX_ODDS(x[2 * v], x[2 * v + 1]);
  }
  // y[0..3]: places 0 2 4 6, y[4..7]: places 1 3 5 7
#pragma GCC unroll 2
  for (int h = 0; h < 2; ++h)
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) {
      x[h * 4 + v] = FX_EVENS(y[h * 4 + 2 * v], y[h * 4 + 2 * v + 1]);
      x[h * 4 + 2 + v] = FX_ODDS(y[h * 4 + 2 * v], y[h * 4 + 2 * v + 1]);
    }
  // x[0..1]: 0 4, x[2..3]: 2 6, x[4..5]: 1 5, x[6..7]: 3 7
  const int home[4] = {0, 2, 1, 3};
#pragma GCC unroll 4
  for (int q = 0; q < 4; ++q) {
    *(s::floats*)(to + home[q] * s::LANES) = FX_EVENS(x[2 * q], x[2 * q + 1]);
    *(s::floats*)(to + (home[q] + 4) * s::LANES) = FX_ODDS(x[2 * q], x[2 * q + 1]);
  }
}

// ROWS rows of floats by a panel, added to sums[ROWS][64].
template <int ROWS, class Zero>
static void fx_float_groups(const float* a, long row, const fx_groups<Zero>& b, long columns, long depth,
                            long block, fx_floats_in_order& in_order, float* sums) {
  typedef fx_float_step s;
  const long most = FX_ORDERED_FLOATS / ROWS / 128 * 128, most_groups = most / FX_UNIT + 16;
  alignas(64) float moved[FX_ORDERED_FLOATS / FX_UNIT + 16];
  float* const ordered = in_order.terms;
  short* const place = in_order.place;
#if FX_FLOAT_STEP == 64
  const s::floats values = {0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1};
#endif
  for (long from = 0; from < depth; from += most) {
    const long terms = depth - from < most ? depth - from : most;
    const bool are_in_order = block >= 0 && in_order.block == block;
    if (!are_in_order) in_order.groups = fx_places(from, terms, b.group, place);
    const long groups = in_order.groups;
    for (int r = 0; r < ROWS && !are_in_order; ++r) {
      const float* const x = a + r * row + from;
      long k = 0;
      for (; k + s::TERMS <= terms; k += s::TERMS) fx_every_eighth(x + k, ordered + r * most + k);
      if (k < terms) {
        alignas(64) float part[s::TERMS] = {};
        __builtin_memcpy(part, x + k, (terms - k) * sizeof(float));
        fx_every_eighth(part, ordered + r * most + k);
      }
      if (!b.zeros) continue;
      float* const totals = in_order.totals + r * most_groups;
      for (long g = 0; g < (groups + 15) / 16 * 16; ++g) totals[g] = 0;
      for (long unit = 0; unit * FX_UNIT < terms; ++unit) {
        float all = 0;
        for (long i = 0; i < FX_UNIT; ++i) all += x[unit * FX_UNIT + i];
        totals[place[unit]] += all;
      }
    }
    in_order.block = depth <= most ? block : -1;
    for (long c = 0; c < columns; ++c) {
      const unsigned char* const bytes = b.packed + c * b.bytes(depth) + from / 2;
      const long first = c * b.count(depth) + from / b.group;
      const float* const scale = b.scales + first;
      s::floats held[ROWS] = {};
      for (long k = 0; k < terms; k += s::TERMS) {
        __builtin_prefetch(bytes + k / 2 + 4096);
        const s::ints words = s::packed_at(bytes + k / 2, (terms - k) / 2, 0);
        s::floats part[ROWS];
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) {
#if FX_FLOAT_STEP == 64
          s::floats weight;
          asm("vpermps %2, %1, %0" : "=v"(weight) : "v"(words >> 4 * i), "v"(values));
#else
          const s::floats weight = __builtin_convertvector((words << (28 - 4 * i)) >> 28, s::floats);
#endif
#pragma GCC unroll 4
          for (int r = 0; r < ROWS; ++r) {
            const s::floats x = *(const s::floats*)(ordered + r * most + k + i * s::LANES);
            if (i == 0)
              part[r] = x * weight;
            else
              s::add_product(part[r], x, weight);
          }
        }
        const s::floats factor = s::scales(scale, place + k / FX_UNIT);
        for (int r = 0; r < ROWS; ++r) s::add_product(held[r], part[r], factor);
      }
      if (b.zeros) {
        fx_moved_scales(scale, b.zeros + first, groups, moved);
        for (long g = 0; g < groups; g += s::LANES)
          for (int r = 0; r < ROWS; ++r)
            held[r] -= *(const s::floats*)(moved + g) *
                *(const s::floats*)(in_order.totals + r * most_groups + g);
      }
      for (int r = 0; r < ROWS; ++r) sums[r * FX_GROUP_COLUMNS + c] += s::sum(held[r]);
    }
  }
}
#endif
