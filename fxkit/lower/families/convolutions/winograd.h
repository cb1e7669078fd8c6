// Convolutions by windows of 3 x 3 in Winograd's way, F(2 x 2, 3 x 3): four neighbouring results
// take 16 multiplications for each channel instead of 36. Of a patch d of 4 x 4 pixels and a window
// g, the results are A'((G g G') * (B' d B)) A, where * multiplies element by element; summed over
// the channels, each of the 16 elements is a product of matrices, a row for each patch.
// (Lavin and Gray, Fast algorithms for convolutional neural networks, 2016.)
//
// A result adds up errors of several products. Sums over FX_CHANNELS, then over such sums, make up
// for that: errors are near those of plain sums that are FX_TERMS long. Of Inf differences would
// make NaN, so that pixels near a result that is not finite are summed plainly.

enum { FX_PATCHES = 24, FX_ELEMENTS = 16, FX_CHANNELS = FX_DEPTH / 2 };

// t = B' d, for one column of a patch, or one row of it.
#define FX_PATCH_OF(t, d0, d1, d2, d3) \
  t[0] = d0 - d2, t[1] = d1 + d2, t[2] = d2 - d1, t[3] = d1 - d3

struct fx_many { typedef fx_vector type; };
struct fx_single { typedef float type; };

template <typename KIND>
static inline __attribute__((always_inline)) void fx_turn_patch(
    const float* const* pixels, long c, float* to, long element) {
  typedef typename KIND::type T;
  T columns[4][4];
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const T d0 = *(const T*)(pixels[j] + c), d1 = *(const T*)(pixels[4 + j] + c);
    const T d2 = *(const T*)(pixels[8 + j] + c), d3 = *(const T*)(pixels[12 + j] + c);
    FX_PATCH_OF(columns[j], d0, d1, d2, d3);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    T t[4];
    FX_PATCH_OF(t, columns[0][i], columns[1][i], columns[2][i], columns[3][i]);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) *(T*)(to + (4 * i + j) * element + c) = t[j];
  }
}

// Some channels of patches: patches[FX_ELEMENTS][FX_PATCHES][FX_CHANNELS]. A patch is counted along
// a row of patches, `across` of them in a row; the first row begins with row `top` of the result.
static void fx_turn_patches(
    const fx_geometry& g, long top, long across, long first, long count, long from, long channels,
    float* patches) {
  for (long n = 0; n < count; ++n) {
    const long y = top + (first + n) / across * 2 - g.above, x = (first + n) % across * 2 - g.left;
    const float* pixels[16];
    for (int i = 0; i < 16; ++i) {
      const long h = y + i / 4, w = x + i % 4;
      const bool is_within = h >= 0 && h < g.height && w >= 0 && w < g.width;
      pixels[i] = is_within ? g.image + h * g.row + w * g.pixel + from : fx_noughts;
    }
    float* const to = patches + n * FX_CHANNELS;
    long c = 0;
    for (; c + FX_LANES <= channels; c += FX_LANES)
      fx_turn_patch<fx_many>(pixels, c, to, FX_PATCHES * FX_CHANNELS);
    for (; c < channels; ++c) fx_turn_patch<fx_single>(pixels, c, to, FX_PATCHES * FX_CHANNELS);
  }
}

// Windows of some channels for a panel of columns: turned[FX_ELEMENTS][channels][FX_COLUMNS], of
// which `count` channels are written from `from` on.
static void fx_turn_windows(
    const fx_geometry& g, const float* weight, long from, long count, long columns,
    float* turned) {
  alignas(64) float panel[FX_TERMS * FX_COLUMNS];
  fx_pack_windows(g, weight + from * g.next_channel, count, columns, panel);
  for (long c = 0; c < count; ++c)
    for (long j = 0; j < FX_COLUMNS; j += FX_LANES) {
      fx_vector rows[4][3];
#pragma GCC unroll 3
      for (int w = 0; w < 3; ++w) {
        const float* const at = panel + c * FX_COLUMNS + j;
        const fx_vector g0 = *(const fx_vector*)(at + w * count * FX_COLUMNS);
        const fx_vector g1 = *(const fx_vector*)(at + (3 + w) * count * FX_COLUMNS);
        const fx_vector g2 = *(const fx_vector*)(at + (6 + w) * count * FX_COLUMNS);
        const fx_vector ends = (g0 + g2) * 0.5f, middle = g1 * 0.5f;
        rows[0][w] = g0, rows[1][w] = ends + middle, rows[2][w] = ends - middle, rows[3][w] = g2;
      }
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const fx_vector* const r = rows[i];
        const fx_vector ends = (r[0] + r[2]) * 0.5f, middle = r[1] * 0.5f;
        const fx_vector found[4] = {r[0], ends + middle, ends - middle, r[2]};
#pragma GCC unroll 4
        for (int k = 0; k < 4; ++k)
          *(fx_vector*)(turned + ((4 * i + k) * g.channels + from + c) * FX_COLUMNS + j) = found[k];
      }
    }
}

// The windows of a weight, panel by panel: float[panels][FX_ELEMENTS][channels][FX_COLUMNS], to be
// freed; NULL where there is no memory for it.
static float* fx_turned_weight(
    const fx_geometry& g, const float* weight, long columns, long width, long threads) {
  enum { CHANNELS = 16 };
  const long channels = g.channels, panels = (columns + width - 1) / width;
  const long parts = (channels + CHANNELS - 1) / CHANNELS;
  const long size = FX_ELEMENTS * channels * FX_COLUMNS;
  float* const turned = (float*)__builtin_malloc(panels * size * sizeof(float));
  if (!turned) return turned;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (long n = 0; n < panels * parts; ++n) {
    const long panel = n / parts, from = n % parts * CHANNELS, first = panel * width;
    const long count = channels - from < CHANNELS ? channels - from : CHANNELS;
    fx_turn_windows(
        g, weight + first * channels * 9, from, count,
        columns - first < width ? columns - first : width, turned + panel * size);
  }
  return turned;
}

// Results of patches: sums[pixel][FX_COLUMNS], counted from the first pixel of the block. Returns
// nought, or NaN where a result is not finite.
static fx_vector fx_results(
    const float* products, long result_width, long across, long first, long count, long pixels,
    long columns, float* sums) {
  fx_vector check = {};
  for (long n = 0; n < count; ++n) {
    const long y = (first + n) / across * 2, x = (first + n) % across * 2;
    const long at = y * result_width + x;
    const bool has_right = x + 1 < result_width, has_below = at + result_width < pixels;
    for (long j = 0; j < columns; j += FX_LANES) {
      const float* const from = products + n * FX_COLUMNS + j;
      fx_vector upper[4], lower[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        fx_vector m[4];
#pragma GCC unroll 4
        for (int k = 0; k < 4; ++k)
          m[k] = *(const fx_vector*)(from + (4 * k + i) * FX_PATCHES * FX_COLUMNS);
        upper[i] = m[0] + m[1] + m[2], lower[i] = m[1] - m[2] - m[3];
      }
      const fx_vector found[4] = {
          upper[0] + upper[1] + upper[2], upper[1] - upper[2] - upper[3],
          lower[0] + lower[1] + lower[2], lower[1] - lower[2] - lower[3]};
      float* const to = sums + at * FX_COLUMNS + j;
      *(fx_vector*)to = found[0];
      check += found[0] * 0.0f;
      if (has_right) *(fx_vector*)(to + FX_COLUMNS) = found[1], check += found[1] * 0.0f;
      if (!has_below) continue;
      *(fx_vector*)(to + result_width * FX_COLUMNS) = found[2], check += found[2] * 0.0f;
      if (has_right)
        *(fx_vector*)(to + (result_width + 1) * FX_COLUMNS) = found[3], check += found[3] * 0.0f;
    }
  }
  return check;
}

// Do as `fx_convolution` for whole pairs of rows of the result, with a panel of `fx_turned_weight`,
// or as it does where there is none.
static void fx_winograd(
    const fx_geometry& g, const float* turned, const float* weight, long first, long last,
    long columns, float* sums) {
  const long width = g.result_width, pixels = last - first, across = (width + 1) / 2;
  const long patches = (pixels + 2 * width - 1) / (2 * width) * across;
  alignas(64) float left[FX_ELEMENTS * FX_PATCHES * FX_CHANNELS];
  alignas(64) float found[FX_ELEMENTS * FX_PATCHES * FX_COLUMNS];
  fx_vector check = {};
  for (long n = 0; turned && n < patches; n += FX_PATCHES) {
    const long count = patches - n < FX_PATCHES ? patches - n : FX_PATCHES;
    for (long c = 0; c < g.channels; c += FX_CHANNELS) {
      const long depth = g.channels - c < FX_CHANNELS ? g.channels - c : FX_CHANNELS;
      fx_turn_patches(g, first / width, across, n, count, c, depth, left);
      for (long e = 0; e < FX_ELEMENTS; ++e) {
        fx_ahead none = {};
        fx_panel<true, 1>(
            left + e * FX_PATCHES * FX_CHANNELS, FX_CHANNELS, 1,
            turned + (e * g.channels + c) * FX_COLUMNS, FX_COLUMNS, count, depth, columns,
            found + e * FX_PATCHES * FX_COLUMNS, c == 0, none);
      }
    }
    check += fx_results(found, width, across, n, count, pixels, columns, sums);
  }
  bool is_finite = turned;
  for (int i = 0; i < FX_LANES; ++i) is_finite = is_finite && check[i] == 0;
  if (is_finite) return;
  for (long from = first; from < last; from += FX_PIXELS)
    fx_convolution(
        g, weight, from, last - from < FX_PIXELS ? last : from + FX_PIXELS, columns,
        sums + (from - first) * FX_COLUMNS);
}
