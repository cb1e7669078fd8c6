// Attention of integers: softmax(scale (Q - zero) (K - zero)^T + mask), rounded to bytes, by V, for a block
// of queries; weights may be rounded before they are divided by their sum. Both products are exact; scores of a block stay in the cache.
template <class Query, class Weight>
struct fx_integer_block {
  const Query* query;
  const signed char *key, *value;
  long query_row, query_step, key_row, key_step, value_row, value_step;
  long rows, keys, depth, width, stride;
  float scale;
  int query_zero, key_zero, value_zero;
  // A weight w is stored as round(w * steps) + weight_zero, within bounds.
  float steps;
  int weight_zero, low, high;
};

// scores[rows][stride] = scale * (query - zero) . (key - zero)
template <bool HAS_TILES, class Query, class Weight>
static void fx_integer_scores(const fx_integer_block<Query, Weight>& s, float* scores) {
  alignas(64) int sums[FX_QUERIES * FX_PANEL_COLUMNS];
  int moved[FX_QUERIES];
  for (long r = 0; r < s.rows; ++r) {
    int total = 0;
    for (long k = 0; k < s.depth; ++k) total += s.query[r * s.query_row + k];
    moved[r] = s.key_zero * (total - (int)s.depth * s.query_zero);
  }
  for (long from = 0; from < s.keys; from += FX_PANEL_COLUMNS) {
    const long count = s.keys - from < FX_PANEL_COLUMNS ? s.keys - from : FX_PANEL_COLUMNS;
    fx_integer_product<HAS_TILES>(s.query, s.query_row, s.key + from * s.key_row, s.key_step, s.key_row,
                                  s.rows, count, s.depth, fx_zeros{nullptr, 0, s.query_zero}, sums);
    for (long r = 0; r < s.rows; ++r) {
      float* const to = scores + r * s.stride + from;
      for (long j = 0; j < count; ++j)
        to[j] = (float)(sums[r * FX_PANEL_COLUMNS + j] - moved[r]) * s.scale;
    }
  }
}

// Rounds a row of weights, each times its factor. NaN is stored as 0, if bounds let it.
template <class Query, class Weight>
static void fx_rounded_weights(const fx_integer_block<Query, Weight>& s, const float* row, float factor,
                               Weight* to) {
  const long some = 64;
  alignas(64) int near[some];
  const float low = s.low - s.weight_zero, high = s.high - s.weight_zero;
  for (long from = 0; from < s.keys; from += some) {
    const long count = s.keys - from < some ? s.keys - from : some;
#pragma omp simd
    for (long j = 0; j < count; ++j) {
      const float step = __builtin_rintf(row[from + j] * factor * s.steps);
      const float bounded = step < low ? low : step > high ? high : step;
      near[j] = step == step ? (int)bounded + s.weight_zero : 0;
    }
    for (long j = 0; j < count; ++j) to[from + j] = (Weight)near[j];
  }
}

// out[rows][width] = factors * (weights - zero) . (value - zero)
template <bool HAS_TILES, class Query, class Weight>
static void fx_integer_values(const fx_integer_block<Query, Weight>& s, const Weight* weights,
                              const float* factors, float* out, long out_row, long out_step) {
  alignas(64) int sums[FX_QUERIES * FX_PANEL_COLUMNS];
  int moved[FX_QUERIES];
  for (long r = 0; r < s.rows; ++r) {
    int total = 0;
    for (long j = 0; j < s.keys; ++j) total += weights[r * s.stride + j];
    moved[r] = s.value_zero * (total - (int)s.keys * s.weight_zero);
  }
  for (long from = 0; from < s.width; from += FX_PANEL_COLUMNS) {
    const long count = s.width - from < FX_PANEL_COLUMNS ? s.width - from : FX_PANEL_COLUMNS;
    fx_integer_product<HAS_TILES>(weights, s.stride, s.value + from * s.value_step, s.value_row,
                                  s.value_step, s.rows, count, s.keys,
                                  fx_zeros{nullptr, 0, s.weight_zero}, sums);
    for (long r = 0; r < s.rows; ++r)
      for (long j = 0; j < count; ++j)
        out[r * out_row + (from + j) * out_step] =
            (float)(sums[r * FX_PANEL_COLUMNS + j] - moved[r]) * factors[r];
  }
}
