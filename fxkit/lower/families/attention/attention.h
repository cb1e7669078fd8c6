// Attention: softmax(scale Q K^T + mask) V for a block of queries. The scores of a block stay in the
// cache; what no query may see is left out of the sums.

struct fx_attention_block {
  const float *query, *key, *value;
  long query_row, query_step, key_row, key_step, value_row, value_step;
  long rows, keys, depth, width, stride;
  float scale;
};

// The same for a few queries: keys whose elements lie side by side are read where they lie, some at a
// time, so that sums of their products are added up together.
FX_FUSED static void fx_few_scores(const fx_attention_block& s, float* scores) {
  alignas(64) float parts[FX_LANES * FX_LANES], turned[FX_LANES * FX_LANES];
  for (long from = 0; from < s.keys; from += FX_LANES) {
    const long count = s.keys - from < FX_LANES ? s.keys - from : FX_LANES;
    for (long r = 0; r < s.rows; ++r) {
      const float* const query = s.query + r * s.query_row;
      for (long j = 0; j < count; ++j) {
        const float* const key = s.key + (from + j) * s.key_row;
        fx_vector sum = {};
        long k = 0;
        for (; k + FX_LANES <= s.depth; k += FX_LANES)
          sum += *(const fx_vector*)(query + k) * *(const fx_vector*)(key + k);
        for (; k < s.depth; ++k) sum[0] += query[k] * key[k];
        *(fx_vector*)(parts + j * FX_LANES) = sum;
      }
      fx_transpose(parts, FX_LANES, turned, FX_LANES);
      fx_vector sums = {};
      for (long i = 0; i < FX_LANES; ++i) sums += *(const fx_vector*)(turned + i * FX_LANES);
      for (long j = 0; j < count; ++j) scores[r * s.stride + from + j] = sums[j] * s.scale;
    }
  }
}

// scores[rows][stride] = scale * query . key
template <bool IS_ROW_MAJOR, bool MAY_BE_FEW>
static void fx_scores(const fx_attention_block& s, float* scores) {
  if (MAY_BE_FEW && s.rows <= FX_FEW && s.query_step == 1 && s.key_step == 1)
    return fx_few_scores(s, scores);
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

// The same for a few queries, of VECTORS of a value from its element `at` on: values are read where they
// lie. Sums of many are sums of sums of FX_DEPTH, so that errors do not grow.
template <int VECTORS>
FX_FUSED static void fx_few_weighted(const fx_attention_block& s, long at, const float* weights,
                                     const float* factors, float* out, long out_row, long out_step) {
  for (long r = 0; r < s.rows; ++r) {
    fx_vector total[VECTORS] = {};
    for (long from = 0; from < s.keys; from += FX_DEPTH) {
      const long to = s.keys - from < FX_DEPTH ? s.keys : from + FX_DEPTH;
      fx_vector sum[VECTORS] = {};
      for (long j = from; j < to; ++j)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v)
          sum[v] += *(const fx_vector*)(s.value + j * s.value_row + at + v * FX_LANES) *
              weights[r * s.stride + j];
      for (int v = 0; v < VECTORS; ++v) total[v] += sum[v];
    }
    for (int v = 0; v < VECTORS; ++v)
      for (long i = 0; i < FX_LANES; ++i)
        out[r * out_row + (at + v * FX_LANES + i) * out_step] = total[v][i] * factors[r];
  }
}

// out[rows][width] = weights . value, each row times its factor
template <bool MAY_BE_FEW>
static void fx_weighted(
    const fx_attention_block& s, const float* weights, const float* factors, float* out,
    long out_row, long out_step) {
  if (MAY_BE_FEW && s.rows <= FX_FEW && s.value_step == 1 && s.width % FX_LANES == 0) {
    long at = 0;
    for (; at + 4 * FX_LANES <= s.width; at += 4 * FX_LANES)
      fx_few_weighted<4>(s, at, weights, factors, out, out_row, out_step);
    for (; at < s.width; at += FX_LANES)
      fx_few_weighted<1>(s, at, weights, factors, out, out_row, out_step);
    return;
  }
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
