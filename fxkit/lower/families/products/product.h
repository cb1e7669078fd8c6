// Matrix products, block by block. A block of up to FX_ROWS_MAX rows and FX_COLUMNS columns of
// C = A B is summed in `sums`; B is brought into a panel that stays in the first-level cache.
// Sums over more than FX_DEPTH terms are sums of such sums, so that errors do not grow with depth.
// FX_TILE rows and FX_VECTORS vectors of columns are summed at once: as many sums as registers hold
// beside a row of B. With sixteen registers, 6 x 2 vectors take 0.7 times as long as 4 x 3.

#if defined(__AVX512F__)
#define FX_LANES 16
#define FX_TILE 8
#define FX_VECTORS 3
#elif defined(__AVX2__)
#define FX_LANES 8
#define FX_TILE 6
#define FX_VECTORS 2
#else
#define FX_LANES 4
#define FX_TILE 4
#define FX_VECTORS 3
#endif
#if defined(__clang__)
#define FX_FUSED
#pragma clang fp contract(fast)
#else
#define FX_FUSED __attribute__((optimize("fp-contract=fast", "no-unroll-loops")))
#endif

enum { FX_COLUMNS = 48, FX_DEPTH = 96 };
enum { FX_FEW = 4, FX_ACROSS = 1536, FX_SHARES = 16 };

typedef float fx_vector __attribute__((vector_size(4 * FX_LANES), aligned(4), may_alias));

// Ask for the next terms of rows of A, where they lie apart. The compiler takes a call that does
// nothing else for one that does nothing.
static inline __attribute__((always_inline)) void fx_ask_for(
    const float* from, long stride, long count) {
  for (long n = 0; n < count; ++n)
    for (long k = 0; k < FX_DEPTH; k += 16) __builtin_prefetch(from + n * stride + k);
}

// Lines of B that are needed next: `lines` at each of `count` places. A few are asked for with each
// tile, since a processor that is asked for many at once waits.
struct fx_ahead {
  const float* from;
  long step, lines, count, asked;
};

static inline __attribute__((always_inline)) void fx_ask_ahead(fx_ahead& next, long count) {
  const long last = next.asked + count < next.count ? next.asked + count : next.count;
  for (long n = next.asked; n < last; ++n)
    for (long k = 0; k < next.lines; ++k) __builtin_prefetch(next.from + n * next.step + k * 16);
  next.asked = last;
}

// sums[r][j] += (a row of A) . (a column of the panel), for ROWS rows and VECTORS of columns.
template <int ROWS, int VECTORS>
FX_FUSED static inline __attribute__((always_inline)) void fx_tile(
    const float* __restrict a, long row, long step, const float* __restrict panel, long panel_step,
    long depth, float* __restrict sums, bool is_first) {
  fx_vector total[ROWS][VECTORS] = {};
  for (long k = 0; k < depth; ++k) {
    fx_vector b[VECTORS];
#pragma GCC unroll 6
    for (int v = 0; v < VECTORS; ++v)
      b[v] = *(const fx_vector*)(panel + k * panel_step + v * FX_LANES);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 6
      for (int v = 0; v < VECTORS; ++v) total[r][v] += b[v] * a[r * row + k * step];
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 6
    for (int v = 0; v < VECTORS; ++v) {
      fx_vector* sum = (fx_vector*)(sums + r * FX_COLUMNS + v * FX_LANES);
      *sum = is_first ? total[r][v] : *sum + total[r][v];
    }
}

// How many vectors the last columns of a panel take, of which FX_VECTORS are summed at a time.
constexpr int fx_vectors(int columns) {
  return (columns - 1) % (FX_VECTORS * FX_LANES) / FX_LANES + 1;
}

// ROWS rows of A and all columns of a panel. As many vectors of columns as there are left, and no
// fewer than FEWEST; always FX_VECTORS where A is turned, which is rare.
template <bool IS_ROW_MAJOR, int FEWEST, int ROWS>
FX_FUSED static inline __attribute__((always_inline)) void fx_rows(
    const float* a, long row, long step, const float* panel, long panel_step, long depth,
    long columns, float* sums, bool is_first) {
  if constexpr (ROWS == 1 && FX_VECTORS * FX_LANES < FX_COLUMNS)
    if (columns == FX_COLUMNS) {
      fx_tile<1, FX_COLUMNS / FX_LANES>(a, row, step, panel, panel_step, depth, sums, is_first);
      return;
    }
  for (long from = 0; from < columns; from += FX_VECTORS * FX_LANES) {
    const long left = columns - from;
    const float* const b = panel + from;
    float* const to = sums + from;
    if constexpr (IS_ROW_MAJOR && FEWEST < 2)
      if (left <= FX_LANES) {
        fx_tile<ROWS, 1>(a, row, step, b, panel_step, depth, to, is_first);
        continue;
      }
    if constexpr (IS_ROW_MAJOR && FEWEST < 3 && FX_VECTORS > 2)
      if (left <= 2 * FX_LANES) {
        fx_tile<ROWS, 2>(a, row, step, b, panel_step, depth, to, is_first);
        continue;
      }
    fx_tile<ROWS, FX_VECTORS>(a, row, step, b, panel_step, depth, to, is_first);
  }
}

template <bool IS_ROW_MAJOR, int FEWEST>
FX_FUSED static void fx_panel(
    const float* a, long row, long step, const float* panel, long panel_step, long rows, long depth,
    long columns, float* sums, bool is_first, fx_ahead& next) {
  if (IS_ROW_MAJOR) step = 1;
  const long share = (next.count * FX_TILE + rows - 1) / rows;
  long r = 0;
  for (; r + FX_TILE <= rows; r += FX_TILE) {
    fx_ask_ahead(next, share);
    // With shorter vectors the next rows are needed later, and to ask costs more than it saves.
    if (IS_ROW_MAJOR && FX_LANES == 16 && r + 2 * FX_TILE <= rows)
      fx_ask_for(a + (r + FX_TILE) * row, row, FX_TILE);
    fx_rows<IS_ROW_MAJOR, FEWEST, FX_TILE>(
        a + r * row, row, step, panel, panel_step, depth, columns, sums + r * FX_COLUMNS, is_first);
  }
  if (FX_TILE > 4 && r + 4 <= rows) {
    fx_rows<IS_ROW_MAJOR, FEWEST, 4>(
        a + r * row, row, step, panel, panel_step, depth, columns, sums + r * FX_COLUMNS, is_first);
    r += 4;
  }
  for (; r < rows; ++r)
    fx_rows<IS_ROW_MAJOR, FEWEST, 1>(
        a + r * row, row, step, panel, panel_step, depth, columns, sums + r * FX_COLUMNS, is_first);
  fx_ask_ahead(next, next.count);
}

// Transpose FX_LANES x FX_LANES numbers by pairing rows that are half of them apart.
template <int... I>
struct fx_list {};
template <int N, int... I>
struct fx_count : fx_count<N - 1, N - 1, I...> {};
template <int... I>
struct fx_count<0, I...> { typedef fx_list<I...> type; };

template <int... I>
static inline fx_vector fx_low(fx_vector a, fx_vector b, fx_list<I...>) {
  return __builtin_shufflevector(a, b, (I / 2 + I % 2 * FX_LANES)...);
}
template <int... I>
static inline fx_vector fx_high(fx_vector a, fx_vector b, fx_list<I...>) {
  return __builtin_shufflevector(a, b, (FX_LANES / 2 + I / 2 + I % 2 * FX_LANES)...);
}

static void fx_transpose(const float* from, long row, float* to, long to_row) {
  typedef fx_count<FX_LANES>::type lanes;
  fx_vector a[FX_LANES], b[FX_LANES];
#pragma GCC unroll 16
  for (int i = 0; i < FX_LANES; ++i) a[i] = *(const fx_vector*)(from + i * row);
#pragma GCC unroll 4
  for (int half = 1; half < FX_LANES; half *= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < FX_LANES / 2; ++i) {
      b[2 * i] = fx_low(a[i], a[i + FX_LANES / 2], lanes());
      b[2 * i + 1] = fx_high(a[i], a[i + FX_LANES / 2], lanes());
    }
#pragma GCC unroll 16
    for (int i = 0; i < FX_LANES; ++i) a[i] = b[i];
  }
#pragma GCC unroll 16
  for (int i = 0; i < FX_LANES; ++i) *(fx_vector*)(to + i * to_row) = a[i];
}

static void fx_pack(
    const float* b, long step, long column, long depth, long columns, float* panel) {
  if (columns > FX_COLUMNS) __builtin_unreachable();
  if (columns < FX_COLUMNS)
    for (long i = 0; i < depth * FX_COLUMNS; ++i) panel[i] = 0;
  long k = 0;
  if (step == 1)
    for (; k + FX_LANES <= depth; k += FX_LANES) {
      long j = 0;
      for (; j + FX_LANES <= columns; j += FX_LANES)
        fx_transpose(b + j * column + k, column, panel + k * FX_COLUMNS + j, FX_COLUMNS);
      for (; j < columns; ++j)
        for (int l = 0; l < FX_LANES; ++l)
          panel[(k + l) * FX_COLUMNS + j] = b[j * column + k + l];
    }
  for (; k < depth; ++k)
    for (long j = 0; j < columns; ++j)
      panel[k * FX_COLUMNS + j] = b[k * step + j * column];
}

// Sum the lanes of FX_LANES vectors: lane i of the result is the sum of vector i.
static inline fx_vector fx_sums(fx_vector* a) {
  typedef fx_count<FX_LANES>::type lanes;
#pragma GCC unroll 4
  for (int half = FX_LANES / 2; half; half /= 2)
#pragma GCC unroll 8
    for (int i = 0; i < half; ++i)
      a[i] = fx_low(a[i], a[i + half], lanes()) + fx_high(a[i], a[i + half], lanes());
  return a[0];
}

// A few rows of A, and columns of B that lie along memory: sums along the depth, without a panel.
template <int ROWS>
FX_FUSED static void fx_few_rows(
    const float* __restrict a, long row, const float* __restrict b, long column, long rows,
    long columns, long depth, float* __restrict sums) {
  enum { WIDTH = FX_LANES / ROWS };
  const long whole = depth / FX_LANES * FX_LANES;
  for (long c = 0; c < columns; c += WIDTH) {
    const float *left[ROWS], *right[WIDTH];
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) left[r] = a + (r < rows ? r : rows - 1) * row;
#pragma GCC unroll 16
    for (int i = 0; i < WIDTH; ++i) right[i] = b + (c + i < columns ? c + i : columns - 1) * column;
    fx_vector total[FX_LANES] = {};
    for (long k = 0; k < whole; k += FX_LANES) {
      fx_vector x[ROWS];
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; ++r) x[r] = *(const fx_vector*)(left[r] + k);
#pragma GCC unroll 16
      for (int i = 0; i < WIDTH; ++i) {
        const fx_vector y = *(const fx_vector*)(right[i] + k);
        __builtin_prefetch(right[i] + WIDTH * column + k);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) total[r * WIDTH + i] += x[r] * y;
      }
    }
    alignas(64) float found[FX_LANES];
    *(fx_vector*)found = fx_sums(total);
    for (long k = whole; k < depth; ++k)
      for (int r = 0; r < ROWS; ++r)
        for (int i = 0; i < WIDTH; ++i) found[r * WIDTH + i] += left[r][k] * right[i][k];
    for (int r = 0; r < ROWS && r < rows; ++r) {
      float* const to = sums + r * FX_COLUMNS + c;
      if (columns - c >= WIDTH)
        __builtin_memcpy(to, found + r * WIDTH, WIDTH * sizeof(float));
      else
        for (int i = 0; i < columns - c; ++i) to[i] = found[r * WIDTH + i];
    }
  }
}

// sums[ROWS][width] += a few rows of A times B, each row of which is read at a stretch.
template <int ROWS>
FX_FUSED static void fx_add_across(
    const float* __restrict a, long row, long a_step, const float* __restrict b, long b_step,
    long columns, long depth, float* __restrict sums, long width) {
  enum { TERMS = ROWS == 1 ? 8 : 4 };
  long k = 0;
  for (; k + TERMS <= depth; k += TERMS) {
    const float* const p = b + k * b_step;
    float x[ROWS][TERMS];
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
      for (int i = 0; i < TERMS; ++i) x[r][i] = a[r * row + (k + i) * a_step];
    long j = 0;
    for (; j + FX_LANES <= columns; j += FX_LANES) {
      fx_vector y[TERMS];
#pragma GCC unroll 8
      for (int i = 0; i < TERMS; ++i) {
        y[i] = *(const fx_vector*)(p + i * b_step + j);
        __builtin_prefetch(p + (i + 8) * b_step + j);
      }
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; ++r) {
        fx_vector* const to = (fx_vector*)(sums + r * width + j);
        fx_vector sum = *to;
#pragma GCC unroll 8
        for (int i = 0; i < TERMS; ++i) sum += y[i] * x[r][i];
        *to = sum;
      }
    }
    for (; j < columns; ++j)
      for (int r = 0; r < ROWS; ++r)
        for (int i = 0; i < TERMS; ++i) sums[r * width + j] += p[i * b_step + j] * x[r][i];
  }
  for (; k < depth; ++k)
    for (int r = 0; r < ROWS; ++r)
      for (long j = 0; j < columns; ++j)
        sums[r * width + j] += b[k * b_step + j] * a[r * row + k * a_step];
}

// sums[ROWS][width] = a few rows of A times B; ROWS * width is at most FX_ACROSS * FX_FEW.
template <int ROWS>
static void fx_rows_across(
    const float* a, long row, long a_step, const float* b, long b_step, long columns, long depth,
    float* sums, long width) {
  alignas(64) float part[FX_ACROSS * FX_FEW];
  for (long i = 0; i < ROWS * width; ++i) sums[i] = 0;
  for (long k = 0; k < depth; k += FX_DEPTH) {
    const long count = depth - k < FX_DEPTH ? depth - k : FX_DEPTH;
    float* const to = k ? part : sums;
    if (k)
      for (long i = 0; i < ROWS * width; ++i) part[i] = 0;
    fx_add_across<ROWS>(
        a + k * a_step, row, a_step, b + k * b_step, b_step, columns, count, to, width);
    if (k)
      for (long i = 0; i < ROWS * width; ++i) sums[i] += part[i];
  }
}

// The same where threads share the depth, so that each reads rows of B as they follow each other:
// sums[0] of sums[FX_SHARES][ROWS * columns] is the result.
template <int ROWS>
static void fx_rows_shared(
    const float* a, long row, long a_step, const float* b, long b_step, long columns, long depth,
    float* sums, long threads) {
  const long size = (depth + FX_SHARES - 1) / FX_SHARES, all = ROWS * columns;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
#pragma omp for schedule(static)
    for (long part = 0; part < FX_SHARES; ++part) {
      const long first = part * size < depth ? part * size : depth;
      const long last = first + size < depth ? first + size : depth;
      fx_rows_across<ROWS>(
          a + first * a_step, row, a_step, b + first * b_step, b_step, columns, last - first,
          sums + part * all, columns);
    }
#pragma omp for schedule(static)
    for (long i = 0; i < all; i += FX_LANES) {
      const long count = all - i < FX_LANES ? all - i : FX_LANES;
      for (long part = 1; part < FX_SHARES; ++part)
        for (long j = i; j < i + count; ++j) sums[j] += sums[part * all + j];
    }
  }
}

// sums[rows][FX_COLUMNS] = A[rows, depth] B[depth, columns]; strides are in elements. What is known
// of a product when a kernel is written is told, as each way to multiply takes its time to compile:
// whether rows of A lie along memory, the fewest vectors of columns, and whether rows may be few.
template <bool IS_ROW_MAJOR, int FEWEST, bool MAY_BE_FEW>
static void fx_product(
    const float* a, long row, long a_step, const float* b, long b_step, long column, long rows,
    long columns, long depth, float* sums) {
  if constexpr (IS_ROW_MAJOR && MAY_BE_FEW)
    if (rows <= 4 && b_step == 1) {
      if (rows > 2) return fx_few_rows<4>(a, row, b, column, rows, columns, depth, sums);
      if (rows == 2) return fx_few_rows<2>(a, row, b, column, rows, columns, depth, sums);
      return fx_few_rows<1>(a, row, b, column, rows, columns, depth, sums);
    }
  const bool is_panel = rows <= 2 * FX_TILE && column == 1 && columns == FX_COLUMNS;
  alignas(64) float packed[FX_DEPTH * FX_COLUMNS];
  for (long k = 0; k < depth; k += FX_DEPTH) {
    const long count = depth - k < FX_DEPTH ? depth - k : FX_DEPTH;
    if (!is_panel) fx_pack(b + k * b_step, b_step, column, count, columns, packed);
    const long on = k + count < depth ? (k + count) * b_step : FX_COLUMNS * column;
    fx_ahead next = {b + on, column, FX_DEPTH / 16, columns, 0};
    if (b_step != 1) next = {b + on, b_step, FX_COLUMNS / 16, column == 1 ? FX_DEPTH : 0, 0};
    const float* panel = is_panel ? b + k * b_step : packed;
    const long step = is_panel ? b_step : FX_COLUMNS;
    fx_panel<IS_ROW_MAJOR, FEWEST>(
        a + k * a_step, row, a_step, panel, step, rows, count, columns, sums, k == 0, next);
  }
}
