// Matrix products of float32 by a processor's matrix unit, which multiplies bfloat16 and adds in
// float32. Each number is written as the sum of three of bfloat16, its parts, without a remainder
// but for the last bit. Of the nine products of parts the six largest are added: the others are
// below 2^-24 of the whole.
//
// The unit holds eight tiles of 16 rows by 64 bytes: here four of sums, two of A and two of B.
// Tiles of A hold 32 terms of 16 rows; those of B 16 pairs of terms, each of 16 columns.

enum { FX_PANEL = 64, FX_PARTS = 3, FX_SPLIT_TERMS = 32, FX_CHUNK = 128, FX_TILE_SIZE = 512 };

// Numbers between nought and this are too near to those that the unit takes for nought.
constexpr float FX_SMALL = 0x1p-40f;

typedef unsigned fx_words __attribute__((vector_size(64), aligned(4), may_alias));

extern "C" void* aligned_alloc(unsigned long, unsigned long) noexcept;
extern "C" void free(void*) noexcept;

// The parts of 32 numbers, largest first.
static inline __attribute__((always_inline)) void fx_split(
    fx_vector low, fx_vector high, fx_words* parts) {
#pragma GCC unroll 3
  for (int part = 0; part < FX_PARTS; ++part) {
    fx_words rounded;
    asm("vcvtne2ps2bf16 %1, %2, %0" : "=v"(rounded) : "v"(low), "v"(high));
    parts[part] = rounded;
    fx_words first, second;
    asm("vpmovzxwd %t1, %0\n\tvpslld $16, %0, %0" : "=v"(first) : "v"(rounded));
    asm("vextracti64x4 $1, %1, %t0\n\tvpmovzxwd %t0, %0\n\tvpslld $16, %0, %0"
        : "=v"(second) : "v"(rounded));
    low -= (fx_vector)first;
    high -= (fx_vector)second;
  }
}

static inline fx_vector fx_larger_size(fx_vector x, fx_vector size) {
  const fx_vector positive = (fx_vector)((fx_words)x & 0x7fffffffu);
  return positive > size ? positive : size;
}

static inline bool fx_is_small(fx_vector size) {
  float largest = 0;
  for (int lane = 0; lane < 16; ++lane) largest = size[lane] > largest ? size[lane] : largest;
  return largest > 0 && largest < FX_SMALL;
}

// 32 terms of a row, as far as there are so many.
static inline __attribute__((always_inline)) void fx_terms(
    const float* from, long step, long count, fx_vector* low, fx_vector* high) {
  if (step == 1 && count >= FX_SPLIT_TERMS) {
    *low = *(const fx_vector*)from;
    *high = *(const fx_vector*)(from + 16);
    return;
  }
  alignas(64) float terms[FX_SPLIT_TERMS] = {};
  for (long k = 0; k < FX_SPLIT_TERMS && k < count; ++k) terms[k] = from[k * step];
  *low = *(const fx_vector*)terms;
  *high = *(const fx_vector*)(terms + 16);
}

// The parts of up to 16 rows of A: [terms / 32][part][16][32]. Tells whether a row is too small.
static bool fx_split_rows(
    const float* a, long row, long step, long rows, long depth, unsigned short* tiles) {
  const long blocks = (depth + FX_SPLIT_TERMS - 1) / FX_SPLIT_TERMS;
  bool is_small = false;
  for (long r = 0; r < 16; ++r) {
    fx_vector size = {};
    for (long n = 0; n < blocks; ++n) {
      fx_words parts[FX_PARTS] = {};
      if (r < rows) {
        fx_vector low, high;
        fx_terms(a + r * row + n * FX_SPLIT_TERMS * step, step, depth - n * FX_SPLIT_TERMS, &low, &high);
        size = fx_larger_size(high, fx_larger_size(low, size));
        fx_split(low, high, parts);
      }
      for (int part = 0; part < FX_PARTS; ++part)
        *(fx_words*)(tiles + (n * FX_PARTS + part) * FX_TILE_SIZE + r * 32) = parts[part];
    }
    is_small |= fx_is_small(size);
  }
  return is_small;
}

// The parts of up to 128 terms of up to 64 columns of B: [terms / 32][columns / 16][part][16][32].
static void fx_split_columns(
    const float* b, long step, long column, long columns, long depth, fx_vector* sizes,
    unsigned short* tiles) {
  for (long k = 0; k < depth; k += FX_SPLIT_TERMS)
    for (long c = 0; c < FX_PANEL; c += 16) {
      alignas(64) float turned[16 * FX_SPLIT_TERMS];
      const float* from = b + k * step + c * column;
      const bool is_whole = depth - k >= FX_SPLIT_TERMS && columns - c >= 16;
      const bool is_turned = is_whole && column == 1 && step != 1;
      if (is_turned) {
        fx_transpose(from, step, turned, FX_SPLIT_TERMS);
        fx_transpose(from + 16 * step, step, turned + 16, FX_SPLIT_TERMS);
      }
      alignas(64) fx_words parts[FX_PARTS][16];
      for (long j = 0; j < 16; ++j) {
        fx_vector low = {}, high = {};
        if (is_turned)
          fx_terms(turned + j * FX_SPLIT_TERMS, 1, FX_SPLIT_TERMS, &low, &high);
        else if (c + j < columns)
          fx_terms(from + j * column, step, depth - k, &low, &high);
        sizes[c + j] = fx_larger_size(high, fx_larger_size(low, sizes[c + j]));
        fx_words found[FX_PARTS];
        fx_split(low, high, found);
        for (int part = 0; part < FX_PARTS; ++part) parts[part][j] = found[part];
      }
      unsigned short* to = tiles + (k / FX_SPLIT_TERMS * (FX_PANEL / 16) + c / 16) * 3 * FX_TILE_SIZE;
      for (int part = 0; part < FX_PARTS; ++part)
        fx_transpose((const float*)parts[part], 16, (float*)(to + part * FX_TILE_SIZE), 16);
    }
}

static inline void fx_configure_tiles() {
  alignas(64) unsigned char settings[64] = {1};
  for (int tile = 0; tile < 8; ++tile) {
    settings[16 + 2 * tile] = 64;
    settings[48 + tile] = 16;
  }
  asm volatile("ldtilecfg %0" : : "m"(settings));
}

#define FX_LOAD(TILE, FROM) \
  asm volatile("tileloadd (%0,%1), %%tmm" #TILE : : "r"(FROM), "r"(64L) : "memory")
#define FX_STORE(TILE, TO) \
  asm volatile("tilestored %%tmm" #TILE ", (%0,%1)" : : "r"(TO), "r"(128L) : "memory")
#define FX_CLEAR(TILE) asm volatile("tilezero %%tmm" #TILE : :)
#define FX_MULTIPLY() \
  asm volatile( \
      "tdpbf16ps %%tmm6, %%tmm4, %%tmm0\n\ttdpbf16ps %%tmm7, %%tmm4, %%tmm1\n\t" \
      "tdpbf16ps %%tmm6, %%tmm5, %%tmm2\n\ttdpbf16ps %%tmm7, %%tmm5, %%tmm3" : :)

// found[32][32] = 32 rows of A times 32 columns of B, over `blocks` times 32 terms. From one pair of
// parts to the next only those of one side change: to load tiles takes as long as to multiply them.
static void fx_multiply_tiles(
    const unsigned short* upper, const unsigned short* lower, const unsigned short* left,
    long blocks, float* found) {
  const unsigned short* const right = left + FX_PARTS * FX_TILE_SIZE;
  enum { TWO = FX_TILE_SIZE, THREE = 2 * FX_TILE_SIZE };
  FX_CLEAR(0);
  FX_CLEAR(1);
  FX_CLEAR(2);
  FX_CLEAR(3);
  for (long n = 0; n < blocks; ++n) {
    const long a = n * FX_PARTS * FX_TILE_SIZE, b = a * (FX_PANEL / 16);
    FX_LOAD(4, upper + a);
    FX_LOAD(5, lower + a);
    FX_LOAD(6, left + b + THREE);
    FX_LOAD(7, right + b + THREE);
    FX_MULTIPLY();
    FX_LOAD(6, left + b + TWO);
    FX_LOAD(7, right + b + TWO);
    FX_MULTIPLY();
    FX_LOAD(4, upper + a + TWO);
    FX_LOAD(5, lower + a + TWO);
    FX_MULTIPLY();
    FX_LOAD(6, left + b);
    FX_LOAD(7, right + b);
    FX_MULTIPLY();
    FX_LOAD(4, upper + a + THREE);
    FX_LOAD(5, lower + a + THREE);
    FX_MULTIPLY();
    FX_LOAD(4, upper + a);
    FX_LOAD(5, lower + a);
    FX_MULTIPLY();
  }
  FX_STORE(0, found);
  FX_STORE(1, found + 16);
  FX_STORE(2, found + 16 * 32);
  FX_STORE(3, found + 16 * 32 + 16);
}

#undef FX_LOAD
#undef FX_STORE
#undef FX_CLEAR
#undef FX_MULTIPLY

// A and B of a product; strides are in elements.
struct fx_matrices {
  const float* a;
  long row, a_step;
  const float* b;
  long b_step, column, rows, columns, depth;
};

// The same sums from whole numbers, for what the unit can't multiply.
template <bool IS_ROW_MAJOR>
static __attribute__((noinline)) void fx_whole_panel(
    const fx_matrices& m, long first, long last, long from, long to, float* sums) {
  enum { ROWS = 48 };
  alignas(64) float found[ROWS * FX_COLUMNS];
  for (long r = first; r < last; r += ROWS)
    for (long c = from; c < to; c += FX_COLUMNS) {
      const long rows = last - r < ROWS ? last - r : ROWS;
      const long columns = to - c < FX_COLUMNS ? to - c : FX_COLUMNS;
      fx_product<IS_ROW_MAJOR, 1, false>(
          m.a + r * m.row, m.row, m.a_step, m.b + c * m.column, m.b_step, m.column, rows, columns,
          m.depth, found);
      for (long i = 0; i < rows; ++i)
        for (long j = 0; j < columns; ++j)
          sums[(r - first + i) * FX_PANEL + c - from + j] = found[i * FX_COLUMNS + j];
    }
}

// sums[rows][FX_PANEL] = A[first to last] B[from to `to`], of the parts of A. Sums over more than
// FX_CHUNK terms are sums of such sums. Tells whether all of them hold.
static bool fx_split_panel(
    const fx_matrices& m, const unsigned short* tiles, long first, long last, long from, long to,
    float* sums) {
  const long band = (m.depth + FX_SPLIT_TERMS - 1) / FX_SPLIT_TERMS * FX_PARTS * FX_TILE_SIZE;
  alignas(64) unsigned short panel[FX_CHUNK / FX_SPLIT_TERMS * (FX_PANEL / 16) * FX_PARTS * FX_TILE_SIZE];
  fx_vector sizes[FX_PANEL] = {}, doubt = {};
  fx_configure_tiles();
  for (long k = 0; k < m.depth; k += FX_CHUNK) {
    const long terms = m.depth - k < FX_CHUNK ? m.depth - k : FX_CHUNK;
    fx_split_columns(
        m.b + k * m.b_step + from * m.column, m.b_step, m.column, to - from, terms, sizes, panel);
    if (m.b_step == 1 && k + terms < m.depth)
      fx_ask_for(m.b + k + terms + from * m.column, m.column, to - from);
    for (long r = 0; r < last - first; r += 32) {
      const unsigned short* upper =
          tiles + r / 16 * band + k / FX_SPLIT_TERMS * FX_PARTS * FX_TILE_SIZE;
      for (long c = 0; c < to - from; c += 32) {
        alignas(64) float found[32 * 32];
        fx_multiply_tiles(
            upper, upper + band, panel + c / 16 * FX_PARTS * FX_TILE_SIZE,
            (terms + FX_SPLIT_TERMS - 1) / FX_SPLIT_TERMS, found);
        for (long i = 0; i < 32; ++i)
          for (long j = 0; j < 32; j += 16) {
            const fx_vector more = *(const fx_vector*)(found + i * 32 + j);
            fx_vector* sum = (fx_vector*)(sums + (r + i) * FX_PANEL + c + j);
            *sum = k ? *sum + more : more;
            doubt += more * 0.0f;
          }
      }
    }
  }
  asm volatile("tilerelease");
  bool holds = true;
  for (int lane = 0; lane < 16; ++lane) holds &= doubt[lane] == 0;
  for (long c = 0; c < to - from; ++c) holds &= !fx_is_small(sizes[c]);
  return holds;
}

// Call epilogue(first, last, from, to, sums) for each block of A B: sums[last - first][FX_PANEL].
template <bool IS_ROW_MAJOR, class Epilogue>
static void fx_bf16x3_product(const fx_matrices& m, long threads, const Epilogue& epilogue) {
  enum { MOST = 1024 };
  const long blocks = (m.rows + MOST - 1) / MOST;
  const long height = ((m.rows + blocks - 1) / blocks + 31) / 32 * 32;
  const long band = (m.depth + FX_SPLIT_TERMS - 1) / FX_SPLIT_TERMS * FX_PARTS * FX_TILE_SIZE;
  unsigned short* tiles = (unsigned short*)aligned_alloc(64, height / 16 * band * 2);
  const long panels = (m.columns + FX_PANEL - 1) / FX_PANEL;
  for (long first = 0; first < m.rows; first += height) {
    const long last = m.rows - first < height ? m.rows : first + height;
    const long bands = (last - first + 31) / 32 * 2;
    bool is_whole = tiles == 0;
    if (tiles)
#pragma omp parallel for num_threads(threads) schedule(static) reduction(| : is_whole) \
    if (threads > 1)
      for (long n = 0; n < bands; ++n)
        is_whole |= fx_split_rows(
            m.a + (first + n * 16) * m.row, m.row, m.a_step, last - first - n * 16, m.depth,
            tiles + n * band);
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (long panel = 0; panel < panels; ++panel) {
      const long from = panel * FX_PANEL;
      const long to = m.columns - from < FX_PANEL ? m.columns : from + FX_PANEL;
      alignas(64) float sums[MOST * FX_PANEL];
      if (is_whole || !fx_split_panel(m, tiles, first, last, from, to, sums))
        fx_whole_panel<IS_ROW_MAJOR>(m, first, last, from, to, sums);
      epilogue(first, last, from, to, sums);
    }
  }
  free(tiles);
}
