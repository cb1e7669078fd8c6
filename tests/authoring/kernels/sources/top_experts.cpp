// The two likeliest experts of each token, and their probabilities: one pass, and no sort.
#include <cmath>
#include <cstdint>

#include "exponential.h"

void top_experts(const float* logits, float* shares, int64_t* experts, int64_t tokens,
                 int64_t logits_size_last) {
  const int64_t n = logits_size_last;
  for (int64_t t = 0; t < tokens; ++t) {
    const float* row = logits + t * n;
    int64_t first = 0, second = -1;
    for (int64_t e = 1; e < n; ++e) {
      if (row[e] > row[first]) {
        second = first;
        first = e;
      } else if (second < 0 || row[e] > row[second]) {
        second = e;
      }
    }
    float sum = 0;
    for (int64_t e = 0; e < n; ++e) sum += exponential(row[e] - row[first]);
    shares[2 * t] = 1 / sum;
    shares[2 * t + 1] = exponential(row[second] - row[first]) / sum;
    experts[2 * t] = first;
    experts[2 * t + 1] = second;
  }
}
