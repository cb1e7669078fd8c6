// Attention: softmax(scale Q K^T + mask) V for a block of queries. The scores of a block stay in the
// cache; what no query may see is left out of the sums.

struct fx_attention_block {
  const float *query, *key, *value;
  long query_row, query_step, key_row, key_step, value_row, value_step;
  long rows, keys, depth, width, stride;
  float scale;
};

// scores[rows][stride] = scale * query . key
template <bool IS_ROW_MAJOR, bool MAY_BE_FEW>
static void fx_scores(const fx_attention_block& s, float* scores) {
  alignas(64) float sums[FX_QUERIES * FX_COLUMNS];
  for (long from = 0; from < s.keys; from += FX_COLUMNS) {
    const long count = s.keys - from < FX_COLUMNS ? s.keys - from : FX_COLUMNS;
    fx_product<IS_ROW_MAJOR, 1, MAY_BE_FEW>(
        s.query, s.query_row, s.query_step, s.key + from * s.key_row, s.key_step, s.key_row,
        s.rows, count, s.depth, sums);
    for (long r = 0; r < s.rows; ++r)
      for (long j = 0; j < count; ++j)
        scores[r * s.stride + from + j] = sums[r * FX_COLUMNS + j] * s.scale;
  }
}

// Replace a row of scores by exp(score - greatest score); return one over their sum. A row that may
// see nothing gives zeros, as torch has it.
static float fx_weights(float* row, long keys) {
  float greatest = -__builtin_inff();
#pragma omp simd reduction(max : greatest)
  for (long j = 0; j < keys; ++j) greatest = row[j] > greatest ? row[j] : greatest;
  if (greatest == -__builtin_inff()) greatest = 0;
  fx_floats sums = fx_all(0.0f);
  FX_SIMD(reduction(+ : sums))
  for (long j = 0; j < keys; j += FX_WIDE) {
    const fx_mask on = fx_first(keys - j);
    const fx_floats score = fx_load(row + j, on) - fx_all(greatest);
    // What a mask hides is 0 at once: to find that a result is too small takes some hundred cycles.
    const fx_floats weight =
        score < -104.0f ? fx_all(0.0f) : fx_exp_down(score < -104.0f ? fx_all(0.0f) : score);
    fx_store(row + j, weight, on);
    sums += fx_present(weight, on);
  }
  const float sum = fx_sum(sums);
  return sum == 0 ? 0 : 1 / sum;
}

// out[rows][width] = weights . value, each row times its factor
static void fx_weighted(
    const fx_attention_block& s, const float* weights, const float* factors, float* out,
    long out_row, long out_step) {
  alignas(64) float sums[FX_QUERIES * FX_COLUMNS];
  for (long from = 0; from < s.width; from += FX_COLUMNS) {
    const long count = s.width - from < FX_COLUMNS ? s.width - from : FX_COLUMNS;
    fx_product<true, 1, false>(
        weights, s.stride, 1, s.value + from * s.value_step, s.value_row, s.value_step, s.rows,
        count, s.keys, sums);
    for (long r = 0; r < s.rows; ++r)
      for (long j = 0; j < count; ++j)
        out[r * out_row + (from + j) * out_step] = sums[r * FX_COLUMNS + j] * factors[r];
  }
}
