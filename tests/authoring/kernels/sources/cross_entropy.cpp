// The loss of each row in one pass over its logits: block by block, with the largest logit and the
// sum of exponentials so far, which is scaled when a larger one comes.
#include <algorithm>
#include <cmath>
#include <cstdint>

namespace {

constexpr int64_t BLOCK = 256;

double row_loss(const float* row, int64_t n, int64_t label) {
  double top = -INFINITY, sum = 0;
  for (int64_t begin = 0; begin < n; begin += BLOCK) {
    const int64_t end = std::min(begin + BLOCK, n);
    float largest = row[begin];
    for (int64_t i = begin; i < end; ++i) largest = row[i] > largest ? row[i] : largest;
    if (largest > top) {
      sum *= std::exp(top - largest);
      top = largest;
    }
    for (int64_t i = begin; i < end; ++i) sum += std::exp(row[i] - (float)top);
  }
  return top + std::log(sum) - row[label];
}

}  // namespace

void cross_entropy(const float* logits, const int64_t* labels, float* out, int64_t rows,
                   int64_t logits_size_last, int64_t ignored) {
  double sum = 0;
  int64_t counted = 0;
  for (int64_t r = 0; r < rows; ++r) {
    if (labels[r] == ignored) continue;
    sum += row_loss(logits + r * logits_size_last, logits_size_last, labels[r]);
    ++counted;
  }
  *out = (float)(sum / (double)counted);
}
