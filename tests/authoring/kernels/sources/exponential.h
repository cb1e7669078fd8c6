// An exponential function that compilers turn into vectors: powers of two times a polynomial.
#pragma once
#include <cstdint>
#include <cstring>

inline float exponential(float x) {
  x = x < -87.0f ? -87.0f : x;
  const float power = __builtin_rintf(x * 1.44269504f);
  const float rest = (x - power * 0.693359375f) + power * 2.12194440e-4f;
  float sum = 1.9875691500e-4f;
  sum = sum * rest + 1.3981999507e-3f;
  sum = sum * rest + 8.3334519073e-3f;
  sum = sum * rest + 4.1665795894e-2f;
  sum = sum * rest + 1.6666665459e-1f;
  sum = sum * rest + 5.0000001201e-1f;
  sum = sum * rest * rest + rest + 1;
  const int32_t bits = ((int32_t)power + 127) << 23;
  float scale;
  std::memcpy(&scale, &bits, 4);
  return sum * scale;
}
