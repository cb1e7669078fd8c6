// Exact convolutions of 8-bit integers: the windows of a block of pixels are gathered into rows, and
// those multiplied by the weight as matrices are. What lies beyond an image is its zero point.
static const long FX_TILE_ROWS = 16;

// An image, how its windows lie in it, and how wide a result is; down, then across. Channels of a
// pixel lie side by side.
template <class Left>
struct fx_windows_of {
  const Left* first;
  long height, width, row, pixel, channels;
  long window_height, window_width, down, across, above, left, row_step, step;
  long result_width;
};

typedef char fx_eight __attribute__((vector_size(8), aligned(1), may_alias));
typedef char fx_sixteen __attribute__((vector_size(16), aligned(1), may_alias));
typedef char fx_sixty_four __attribute__((vector_size(64), aligned(1), may_alias));

// Copies a few hundred bytes at most: a call of the library would take longer. What is left of a
// vector is copied with what is in front of it.
static inline void fx_copy_bytes(char* to, const char* from, long count) {
  long i = 0;
  for (; i + 64 <= count; i += 64) *(fx_sixty_four*)(to + i) = *(const fx_sixty_four*)(from + i);
  if (i == count) return;
  if (count >= 16) {
    for (; i + 16 <= count; i += 16) *(fx_sixteen*)(to + i) = *(const fx_sixteen*)(from + i);
    *(fx_sixteen*)(to + count - 16) = *(const fx_sixteen*)(from + count - 16);
  } else if (count >= 8) {
    *(fx_eight*)to = *(const fx_eight*)from;
    *(fx_eight*)(to + count - 8) = *(const fx_eight*)(from + count - 8);
  } else {
    for (; i < count; ++i) to[i] = from[i];
  }
}

static inline void fx_fill_bytes(char* to, char value, long count) {
  for (long i = 0; i < count; ++i) to[i] = value;
}

// Bytes from begin to end of a line of count bytes, those from low to high from memory, the others
// the zero point.
static inline void fx_part_of_line(char* to, const char* line, long begin, long end, long low, long high,
                                   char zero) {
  low = low < begin ? begin : low > end ? end : low;
  high = high < low ? low : high > end ? end : high;
  fx_fill_bytes(to, zero, low - begin);
  fx_copy_bytes(to + low - begin, line + low, high - low);
  fx_fill_bytes(to + high - begin, zero, end - high);
}

// Terms from begin to end of the window of one pixel, whose terms are counted row by row of the
// window, element by element, channel by channel.
template <class Left>
static inline void fx_gather_window(const fx_windows_of<Left>& g, long at, long begin, long end,
                                    char zero, char* to) {
  const long y = at / g.result_width * g.down - g.above;
  const long x = at % g.result_width * g.across - g.left;
  const long length = g.window_width * g.channels;
  const bool is_line = g.step == 1 && g.pixel == g.channels;
  if (is_line && begin == 0 && end == g.window_height * length && g.row_step == 1 && y >= 0 &&
      x >= 0 && y + g.window_height <= g.height && x + g.window_width <= g.width) {
    const char* from = (const char*)g.first + y * g.row + x * g.pixel;
    for (long h = 0; h < g.window_height; ++h, from += g.row, to += length)
      fx_copy_bytes(to, from, length);
    return;
  }
  for (long h = begin / length; h * length < end; ++h) {
    const long from = begin > h * length ? begin - h * length : 0;
    const long stop = end < (h + 1) * length ? end - h * length : length;
    const long at_row = y + h * g.row_step;
    if (at_row < 0 || at_row >= g.height) {
      fx_fill_bytes(to, zero, stop - from);
      to += stop - from;
      continue;
    }
    const char* const row = (const char*)g.first + at_row * g.row;
    if (is_line) {
      fx_part_of_line(to, row + x * g.pixel, from, stop, -x * g.pixel, (g.width - x) * g.pixel, zero);
      to += stop - from;
      continue;
    }
    for (long w = from / g.channels; w * g.channels < stop; ++w) {
      const long one = w * g.channels, column = x + w * g.step;
      const long low = from > one ? from - one : 0;
      const long high = stop < one + g.channels ? stop - one : g.channels;
      const bool is_within = column >= 0 && column < g.width;
      if (is_within)
        fx_copy_bytes(to, row + column * g.pixel + low, high - low);
      else
        fx_fill_bytes(to, zero, high - low);
      to += high - low;
    }
  }
}

// Tells whether each window is one pixel, and pixels follow each other.
template <class Left>
static inline bool fx_is_matrix(const fx_windows_of<Left>& g) {
  return g.window_height * g.window_width * g.down * g.across == 1 && g.above + g.left == 0 &&
      g.pixel == g.channels && g.row == g.width * g.pixel;
}

// How many rows of windows are multiplied for so many: whole tiles, where there are any.
template <bool HAS_TILES>
static inline long fx_rows_for(long rows) {
  return HAS_TILES && rows > FX_FEW_ROWS ? (rows + FX_TILE_ROWS - 1) / FX_TILE_ROWS * FX_TILE_ROWS
                                         : rows;
}

// Sums of windows that are too long for the room that there is, gathered part by part.
template <bool HAS_TILES, class Left>
static void fx_parts_of_windows(const fx_windows_of<Left>& g, const signed char* weight, long columns,
                                long first, long rows, int zero, unsigned char* windows, long room,
                                int* sums) {
  const long depth = g.window_height * g.window_width * g.channels;
  const long height = fx_rows_for<HAS_TILES>(rows), most = room / height / 64 * 64;
  for (long k = 0; k < depth; k += most) {
    const long terms = depth - k < most ? depth - k : most;
    for (long r = 0; r < rows; ++r)
      fx_gather_window(g, first + r, k, k + terms, (char)zero, (char*)windows + r * most);
    fx_add_product<HAS_TILES, true>((const Left*)windows, most, weight + k, depth, height, columns,
                                    terms, {nullptr, 0, zero}, k == 0, sums);
  }
}

// sums[last - first][64]: pixels of the result, counted row by row, by up to 64 channels of the result,
// whose windows of the weight follow each other. The windows have room for whole tiles of rows of a multiple of 64 bytes;
// HOLDS tells that all of them were gathered before.
template <bool HAS_TILES, class Left>
static void fx_integer_convolution(const fx_windows_of<Left>& g, const signed char* weight, long columns,
                                   long first, long last, int zero, unsigned char* windows, long room,
                                   bool holds, int* sums) {
  const fx_zeros zeros = {nullptr, 0, zero};
  const long depth = g.window_height * g.window_width * g.channels, rows = last - first;
  const long height = fx_rows_for<HAS_TILES>(rows), row = (depth + 63) / 64 * 64;
  if (fx_is_matrix(g)) {
    const Left* const from = g.first + first * depth;
    if (!HAS_TILES || row == depth || rows <= FX_FEW_ROWS) {
      fx_integer_product<HAS_TILES>(from, depth, weight, 1, depth, rows, columns, depth, zeros, sums);
      return;
    }
    const bool is_end = (last - 1) * depth + row > g.height * g.width * depth;
    if (!is_end) {
      fx_add_product<HAS_TILES, true>(
          from, depth, weight, depth, rows, columns, depth, zeros, true, sums);
      return;
    }
  }
  if (height * row > room) {
    fx_parts_of_windows<HAS_TILES>(g, weight, columns, first, rows, zero, windows, room, sums);
    return;
  }
  if (!holds)
    for (long r = 0; r < rows; ++r)
      fx_gather_window(g, first + r, 0, depth, (char)zero, (char*)windows + r * row);
  const Left* const from = (const Left*)windows;
  if (height <= FX_FEW_ROWS) {
    fx_rows_as_they_lie(from, row, weight, depth, height, columns, depth, zeros, sums);
    return;
  }
  fx_add_product<HAS_TILES, true>(
      from, row, weight, depth, height, columns, depth, zeros, true, sums);
}
