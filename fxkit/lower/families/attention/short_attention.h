// Attention over few keys, all of which are columns of one panel, be their number known to the
// compiler or not. Queries are copied into rows of a
// known length, and tiles are always whole: what lies beyond the last row or column is 0, or is not
// looked at. So of a short sequence little is done that is no product and no exponential.

// Keys of a panel, and rows that a tile has, of two vectors each: their sums, two vectors of the
// panel and one number of the left side are in registers.
enum { FX_FEW_KEYS = 64, FX_HIGH = FX_LANES == 16 ? 12 : 6, FX_LOW = FX_HIGH / 2 };
enum { FX_SHORT_ROWS = (FX_QUERIES + FX_LOW - 1) / FX_LOW * FX_LOW, FX_TWO = 2 * FX_LANES };

// What a query sees: null, or conditions, or numbers that are added to its scores.
template <class Kind>
struct fx_seen {
  const Kind* mask;
  long row, step;
  bool is_causal;
  long first;  // the place of the first query
};

// Where the operands of the next block begin. Their rows lie apart, so that no processor guesses
// them: each row of scores asks for its share.
struct fx_next {
  const float *query, *key, *value;
};

FX_INLINE void fx_ask_for_rows(const fx_attention_block& s, const fx_next& next, long r) {
#pragma GCC unroll 1
  for (long k = 0; k < s.depth; k += 16) __builtin_prefetch(next.query + r * s.query_row + k);
#pragma GCC unroll 1
  for (long j = r; j < s.keys; j += s.rows) {
#pragma GCC unroll 1
    for (long k = 0; k < s.depth; k += 16) __builtin_prefetch(next.key + j * s.key_row + k);
#pragma GCC unroll 1
    for (long k = 0; k < s.width; k += 16) __builtin_prefetch(next.value + j * s.value_row + k);
  }
}

// sums[ROWS][sums_row] = rows of A times VECTORS vectors of columns of a panel
template <int ROWS, int VECTORS, int ROW>
FX_FUSED static inline __attribute__((always_inline)) void fx_short_tile(
    const float* __restrict a, const float* __restrict panel, long panel_step, long depth,
    float* __restrict sums, long sums_row) {
  fx_vector total[ROWS][VECTORS] = {};
  for (long k = 0; k < depth; ++k) {
    fx_vector b[VECTORS];
#pragma GCC unroll 2
    for (int v = 0; v < VECTORS; ++v)
      b[v] = *(const fx_vector*)(panel + k * panel_step + v * FX_LANES);
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
      for (int v = 0; v < VECTORS; ++v) total[r][v] += b[v] * a[r * ROW + k];
  }
#pragma GCC unroll 12
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < VECTORS; ++v)
      *(fx_vector*)(sums + r * sums_row + v * FX_LANES) = total[r][v];
}

// All rows, in tiles of FX_HIGH, and of FX_LOW where no more are left.
template <int VECTORS, int ROW>
FX_FUSED static void fx_short_rows(
    const float* a, const float* panel, long panel_step, long rows, long depth, float* sums,
    long sums_row) {
  for (long r = 0; r < rows;) {
    const float* const from = a + r * ROW;
    float* const to = sums + r * sums_row;
    if (rows - r > FX_LOW) {
      fx_short_tile<FX_HIGH, VECTORS, ROW>(from, panel, panel_step, depth, to, sums_row);
      r += FX_HIGH;
    } else {
      fx_short_tile<FX_LOW, VECTORS, ROW>(from, panel, panel_step, depth, to, sums_row);
      r += FX_LOW;
    }
  }
}

template <int ROW>
static void fx_short_product(
    const float* a, const float* panel, long panel_step, long rows, long columns, long depth,
    float* sums, long sums_row) {
  for (long from = 0; from < columns; from += FX_TWO)
    if (columns - from > FX_LANES)
      fx_short_rows<2, ROW>(a, panel + from, panel_step, rows, depth, sums + from, sums_row);
    else
      fx_short_rows<1, ROW>(a, panel + from, panel_step, rows, depth, sums + from, sums_row);
}

// panel[depth][FX_FEW_KEYS] = keys, turned; 0 up to a whole vector of keys
static void fx_turned_keys(const fx_attention_block& s, float* panel) {
  const long whole = s.keys / FX_LANES * FX_LANES;
  const long wide = (s.keys + FX_LANES - 1) / FX_LANES * FX_LANES;
  long k = 0;
  if (s.key_step == 1)
    for (; k + FX_LANES <= s.depth; k += FX_LANES) {
      float* const to = panel + k * FX_FEW_KEYS;
      for (long j = 0; j < whole; j += FX_LANES)
        fx_transpose(s.key + j * s.key_row + k, s.key_row, to + j, FX_FEW_KEYS);
      if (whole == wide) continue;
      alignas(64) float last[FX_LANES * FX_LANES];
      for (long j = whole; j < wide; ++j)
        *(fx_vector*)(last + (j - whole) * FX_LANES) =
            j < s.keys ? *(const fx_vector*)(s.key + j * s.key_row + k) : fx_vector{};
      fx_transpose(last, FX_LANES, to + whole, FX_FEW_KEYS);
    }
  for (; k < s.depth; ++k)
    for (long j = 0; j < wide; ++j)
      panel[k * FX_FEW_KEYS + j] = j < s.keys ? s.key[j * s.key_row + k * s.key_step] : 0;
}

// shown[rows][FX_FEW_KEYS] = the mask, of one row where all queries have the same; from `whole` on
// where vectors are read of the mask itself. What is written number by number is read by vectors
// much later, as processors have it.
template <class Kind>
static void fx_shown(
    const fx_attention_block& s, const fx_seen<Kind>& seen, long whole, float* shown) {
  const long wide = (s.keys + FX_LANES - 1) / FX_LANES * FX_LANES;
  for (long r = 0; r < (seen.row ? s.rows : 1); ++r) {
    const Kind* const mask = seen.mask + r * seen.row;
    float* const to = shown + r * FX_FEW_KEYS;
    if (whole < wide) *(fx_vector*)(to + wide - FX_LANES) = fx_vector{};
#pragma GCC unroll 1
    for (long j = whole; j < s.keys; ++j) to[j] = mask[j * seen.step];
  }
}

#if FX_WIDE > 1
FX_INLINE fx_floats fx_shown_lanes(fx_floats score, const float* mask) {
  return score + fx_load(mask);
}
FX_INLINE fx_floats fx_shown_lanes(fx_floats score, const unsigned char* mask) {
  fx_ints on;
  asm("vpmovzxbd %1, %0" : "=v"(on) : "m"(*(const unsigned char(*)[16])mask));
  return on == 0 ? fx_all(-__builtin_inff()) : score;
}

// What all lanes of x fold to, in each of them.
template <class Fold>
FX_INLINE fx_floats fx_in_all(fx_floats x, Fold fold) {
  x = fold(x, __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
  x = fold(x, __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
  x = fold(x, __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
  x = fold(x, __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
  return x;
}
#endif

// Replace rows of query . key by exp(score - greatest score); factors are one over their sums. What
// lies beyond the last key becomes 0.
template <int VECTORS, class Kind>
static void fx_short_weights(
    const fx_attention_block& s, const fx_seen<Kind>& seen, const fx_next& next, const float* shown,
    long whole, float* scores, float* factors) {
  for (long r = 0; r < s.rows; ++r) {
    fx_ask_for_rows(s, next, r);
    float* const row = scores + r * FX_FEW_KEYS;
    const long last = seen.first + r + 1;
    const long count = seen.is_causal && last < s.keys ? last : s.keys;
#if FX_WIDE > 1
    const fx_ints lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const fx_floats hidden = fx_all(-__builtin_inff());
    fx_floats score[VECTORS], greatest = hidden, sum = fx_all(0.0f);
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) {
      fx_floats one = fx_load(row + v * FX_WIDE) * s.scale;
      if (seen.mask && v * FX_WIDE < whole) {
        one = fx_shown_lanes(one, seen.mask + r * seen.row + v * FX_WIDE);
      } else if (seen.mask) {
        const fx_floats more = fx_load(shown + (seen.row ? r : 0) * FX_FEW_KEYS + v * FX_WIDE);
        one = sizeof(Kind) == 1 ? (more == 0.0f ? hidden : one) : one + more;
      }
      score[v] = lane + v * FX_WIDE < (int)count ? one : hidden;
      greatest = fx_larger(score[v], greatest);
    }
    greatest = fx_in_all(greatest, [](fx_floats x, fx_floats y) { return fx_larger(x, y); });
    greatest = greatest == hidden ? fx_all(0.0f) : greatest;
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) {
      const fx_floats x = score[v] - greatest;
      const fx_floats weight =
          x < -104.0f ? fx_all(0.0f) : fx_exp_within(x < -104.0f ? fx_all(0.0f) : x);
      fx_store(row + v * FX_WIDE, weight);
      sum += weight;
    }
    factors[r] = fx_sum(sum);
#else
    for (long j = 0; j < count; ++j) row[j] *= s.scale;
    if (seen.mask) {
      const Kind* const mask = seen.mask + r * seen.row;
      for (long j = 0; j < count; ++j) {
        const Kind one = mask[j * seen.step];
        row[j] = sizeof(Kind) == 4 ? row[j] + one : one ? row[j] : -__builtin_inff();
      }
    }
    for (long j = count; j < s.keys; ++j) row[j] = -__builtin_inff();
    factors[r] = fx_weights(row, s.keys);
#endif
  }
#if FX_WIDE > 1
  for (long r = 0; r < s.rows; r += FX_WIDE) {
    const fx_floats sum = fx_load(factors + r);
    fx_store(factors + r, sum == 0.0f ? fx_all(0.0f) : 1.0f / sum);
  }
#endif
}

// out[rows][width] = weights . value, each row times its factor
static void fx_short_weighted(
    const fx_attention_block& s, const float* weights, const float* factors, long rows, float* room,
    float* out, long out_row, long out_step) {
  alignas(64) float sums[FX_SHORT_ROWS * FX_TWO];
  for (long from = 0; from < s.width; from += FX_TWO) {
    const long count = s.width - from < FX_TWO ? s.width - from : FX_TWO;
    const float* value = s.value + from * s.value_step;
    long value_row = s.value_row;
    if (s.value_step != 1 || count % FX_LANES) {
      for (long j = 0; j < s.keys; ++j)
        for (long w = 0; w < FX_TWO; ++w)
          room[j * FX_TWO + w] = w < count ? value[j * value_row + w * s.value_step] : 0;
      value = room, value_row = FX_TWO;
    }
    fx_short_product<FX_FEW_KEYS>(weights, value, value_row, rows, count, s.keys, sums, FX_TWO);
    for (long r = 0; r < s.rows; ++r) {
      float* const to = out + r * out_row + from * out_step;
      const float* const sum = sums + r * FX_TWO;
      if (out_step == 1 && count == FX_TWO) {
        *(fx_vector*)to = *(const fx_vector*)sum * factors[r];
        *(fx_vector*)(to + FX_LANES) = *(const fx_vector*)(sum + FX_LANES) * factors[r];
      } else {
        for (long w = 0; w < count; ++w) to[w * out_step] = sum[w] * factors[r];
      }
    }
  }
}

// A block of queries over at most FX_FEW_KEYS keys of at most FX_DEPTH numbers.
template <class Kind>
static void fx_short_attention(
    const fx_attention_block& s, const fx_seen<Kind>& seen, const fx_next& next, float* out,
    long out_row, long out_step) {
  alignas(64) float query[FX_SHORT_ROWS * FX_DEPTH];
  alignas(64) float panel[FX_DEPTH * FX_FEW_KEYS];
  alignas(64) float scores[FX_SHORT_ROWS * FX_FEW_KEYS];
  alignas(64) float factors[FX_QUERIES];
  alignas(64) float shown[FX_QUERIES * FX_FEW_KEYS];
  const long whole = seen.step == 1 ? s.keys / FX_LANES * FX_LANES : 0;
  if (FX_WIDE > 1 && seen.mask) fx_shown(s, seen, whole, shown);
  fx_turned_keys(s, panel);
  for (long r = 0; r < s.rows; ++r) {
    const float* const from = s.query + r * s.query_row;
    float* const to = query + r * FX_DEPTH;
    long k = 0;
    if (s.query_step == 1)
      for (; k + FX_LANES <= s.depth; k += FX_LANES)
        *(fx_vector*)(to + k) = *(const fx_vector*)(from + k);
    for (; k < s.depth; ++k) to[k] = from[k * s.query_step];
  }
  const long rows = (s.rows + FX_LOW - 1) / FX_LOW * FX_LOW;
  for (long r = s.rows; r < rows; ++r)
    for (long k = 0; k < s.depth; ++k) query[r * FX_DEPTH + k] = 0;
  fx_short_product<FX_DEPTH>(
      query, panel, FX_FEW_KEYS, rows, s.keys, s.depth, scores, FX_FEW_KEYS);
  if (FX_WIDE == 1 || s.keys > 3 * FX_LANES)
    fx_short_weights<4>(s, seen, next, shown, whole, scores, factors);
  else if (s.keys > 2 * FX_LANES)
    fx_short_weights<3>(s, seen, next, shown, whole, scores, factors);
  else if (s.keys > FX_LANES)
    fx_short_weights<2>(s, seen, next, shown, whole, scores, factors);
  else
    fx_short_weights<1>(s, seen, next, shown, whole, scores, factors);
  fx_short_weighted(s, scores, factors, rows, panel, out, out_row, out_step);
}
