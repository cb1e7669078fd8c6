// x / sqrt(mean(x²) + ε) · w, row by row.

#include <cmath>
#include <cstdint>

template <class T>
void rms_norm(const T* x, const T* w, T* out, int64_t rows, int64_t w_size_0) {
  for (int64_t row = 0; row < rows; ++row) {
    const T* from = x + row * w_size_0;
    T* to = out + row * w_size_0;
    double sum = 0;
    for (int64_t i = 0; i < w_size_0; ++i) sum += (double)from[i] * (double)from[i];
    const T scale = (T)(1 / std::sqrt(sum / (double)w_size_0 + 1e-6));
    for (int64_t i = 0; i < w_size_0; ++i) to[i] = w[i] * (from[i] * scale);
  }
}
