// Convolutions over all channels: sums for a block of pixels and up to FX_COLUMNS channels of the
// result. For each element of the window it is a product of matrices, a row for each pixel; a pixel
// beyond the image is a row of noughts. Sums go over up to FX_TERMS terms, then over such sums.

enum { FX_TERMS = 192, FX_PIXELS = 384 };

struct fx_geometry {
  const float* image;
  long height, width, row, pixel, channels;
  long window_height, window_width, down, across, above, left, row_step, step;
  long result_width;
  long next_channel, next_element;  // strides of a weight's window, whose elements lie in one place
};

static const float fx_noughts[FX_TERMS] = {};

// Of one pixel of the result: where its window begins, and which rows and columns of the window lie
// within the image, as bits.
struct fx_place {
  long offset;
  unsigned rows, columns;
};

static unsigned fx_within(long from, long step, long count, long size) {
  unsigned bits = 0;
  for (long i = 0; i < count; ++i) bits |= (unsigned)(from + i * step >= 0 && from + i * step < size) << i;
  return bits;
}

static void fx_places(const fx_geometry& g, long first, long last, fx_place* places) {
  for (long at = first; at < last; ++at) {
    const long y = at / g.result_width * g.down - g.above;
    const long x = at % g.result_width * g.across - g.left;
    places[at - first].offset = y * g.row + x * g.pixel;
    places[at - first].rows = fx_within(y, g.row_step, g.window_height, g.height);
    places[at - first].columns = fx_within(x, g.step, g.window_width, g.width);
  }
}

// sums[p][j] += the part of a result that some channels make, for PIXELS pixels.
template <int PIXELS, int VECTORS>
FX_FUSED static inline __attribute__((always_inline)) void fx_windows(
    const fx_geometry& g, const fx_place* places, const float* image, const float* __restrict panel,
    long channels, float* __restrict sums, bool is_first) {
  fx_vector total[PIXELS][VECTORS] = {};
  for (long h = 0; h < g.window_height; ++h)
    for (long w = 0; w < g.window_width; ++w) {
      const long offset = h * g.row_step * g.row + w * g.step * g.pixel;
      const float* a[PIXELS];
#pragma GCC unroll 8
      for (int p = 0; p < PIXELS; ++p)
        a[p] = (places[p].rows >> h & places[p].columns >> w & 1)
            ? image + places[p].offset + offset : fx_noughts;
      for (long c = 0; c < channels; ++c) {
        fx_vector b[VECTORS];
#pragma GCC unroll 3
        for (int v = 0; v < VECTORS; ++v) b[v] = *(const fx_vector*)(panel + v * FX_LANES);
#pragma GCC unroll 8
        for (int p = 0; p < PIXELS; ++p)
#pragma GCC unroll 3
          for (int v = 0; v < VECTORS; ++v) total[p][v] += b[v] * a[p][c];
        panel += FX_COLUMNS;
      }
    }
#pragma GCC unroll 8
  for (int p = 0; p < PIXELS; ++p)
#pragma GCC unroll 3
    for (int v = 0; v < VECTORS; ++v) {
      fx_vector* sum = (fx_vector*)(sums + p * FX_COLUMNS + v * FX_LANES);
      *sum = is_first ? total[p][v] : *sum + total[p][v];
    }
}

// The same for all columns of a panel.
template <int PIXELS>
FX_FUSED static inline __attribute__((always_inline)) void fx_all_columns(
    const fx_geometry& g, const fx_place* places, const float* image, const float* panel,
    long channels, long columns, float* sums, bool is_first) {
  for (long from = 0; from < columns; from += FX_VECTORS * FX_LANES) {
    const long left = columns - from;
    const float* const b = panel + from;
    float* const to = sums + from;
    if (FX_VECTORS > 2 && left > 2 * FX_LANES)
      fx_windows<PIXELS, FX_VECTORS>(g, places, image, b, channels, to, is_first);
    else if (left > FX_LANES)
      fx_windows<PIXELS, 2>(g, places, image, b, channels, to, is_first);
    else
      fx_windows<PIXELS, 1>(g, places, image, b, channels, to, is_first);
  }
}

FX_FUSED static void fx_all_windows(
    const fx_geometry& g, const fx_place* places, long pixels, const float* image,
    const float* panel, long channels, long columns, float* sums, bool is_first) {
  long p = 0;
  for (; p + FX_TILE <= pixels; p += FX_TILE)
    fx_all_columns<FX_TILE>(
        g, places + p, image, panel, channels, columns, sums + p * FX_COLUMNS, is_first);
  if (FX_TILE > 4 && p + 4 <= pixels) {
    fx_all_columns<4>(
        g, places + p, image, panel, channels, columns, sums + p * FX_COLUMNS, is_first);
    p += 4;
  }
  for (; p < pixels; ++p)
    fx_all_columns<1>(
        g, places + p, image, panel, channels, columns, sums + p * FX_COLUMNS, is_first);
}

// Bring some channels of a weight into an order in which they lie channel by channel, for each
// element of the window: panel[size][channels][FX_COLUMNS].
static void fx_pack_windows(
    const fx_geometry& g, const float* weight, long channels, long columns, float* panel) {
  const long size = g.window_height * g.window_width, column = g.channels * size;
  alignas(64) float packed[FX_LANES * FX_COLUMNS] = {};
  const bool is_innermost = g.next_channel == 1 && size > 1;
  const long length = is_innermost ? channels : channels * size;
  for (long part = 0; part < (is_innermost ? size : 1); ++part) {
    const float* const from = weight + part * g.next_element;
    long c = 0, t = part;
    for (long k = 0; k < length; k += FX_LANES) {
      const long count = length - k < FX_LANES ? length - k : FX_LANES;
      long j = 0;
      for (; count == FX_LANES && j + FX_LANES <= columns; j += FX_LANES)
        fx_transpose(from + j * column + k, column, packed + j, FX_COLUMNS);
      for (; j < columns; ++j)
        for (long i = 0; i < count; ++i) packed[i * FX_COLUMNS + j] = from[j * column + k + i];
      for (long i = 0; i < count; ++i) {
        float* const to = panel + (t * channels + c) * FX_COLUMNS;
#pragma GCC unroll 12
        for (int v = 0; v < FX_COLUMNS; v += FX_LANES)
          *(fx_vector*)(to + v) = *(const fx_vector*)(packed + i * FX_COLUMNS + v);
        if (is_innermost || ++t == size) t = part, ++c;
      }
    }
  }
}

// sums[last - first][FX_COLUMNS]: pixels of the result, counted row by row, and channels.
static void fx_convolution(
    const fx_geometry& g, const float* weight, long first, long last, long columns, float* sums) {
  long most = FX_TERMS / (g.window_height * g.window_width);
  if (most > 8) most = most / 8 * 8;
  alignas(64) float panel[FX_TERMS * FX_COLUMNS];
  fx_place places[FX_PIXELS];
  fx_places(g, first, last, places);
  for (long c = 0; c < g.channels; c += most) {
    const long channels = g.channels - c < most ? g.channels - c : most;
    fx_pack_windows(g, weight + c * g.next_channel, channels, columns, panel);
    fx_all_windows(
        g, places, last - first, g.image + c, panel, channels, columns, sums, c == 0);
  }
}
