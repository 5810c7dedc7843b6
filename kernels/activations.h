// Nonlinearities and their derivatives, chosen at run time; the numbers are those of ops/low_rank_kernels.py.
#pragma once
#include "portable.h"

enum Activation { NO_ACTIVATION = 0, SILU = 1, GELU = 2, GELU_TANH = 3, RELU = 4, NUM_ACTIVATIONS = 5 };

DEVICE float sigmoid(float z) { return 1.0f / (1.0f + expf(-z)); }
DEVICE float normal_probability(float z) { return 0.5f * (1.0f + erff(z * 0.70710678118654752f)); }
DEVICE float normal_density(float z) { return 0.39894228040143268f * expf(-0.5f * z * z); }

DEVICE float activate(int activation, float z) {
  switch (activation) {
    case SILU: return z * sigmoid(z);
    case GELU: return z * normal_probability(z);
    case GELU_TANH: return 0.5f * z * (1.0f + tanhf(0.79788456080286536f * (z + 0.044715f * z * z * z)));
    case RELU: return z > 0.0f ? z : 0.0f;
    default: return z;
  }
}

template <int ACTIVATION, int COUNT>
DEVICE void activate_each(float (&z)[COUNT][4]) {
#pragma unroll
  for (int c = 0; c < COUNT; c++)
#pragma unroll
    for (int i = 0; i < 4; i++) z[c][i] = activate(ACTIVATION, z[c][i]);
}

// One choice for all numbers of a fragment.
template <int COUNT>
DEVICE void activate_all(int activation, float (&z)[COUNT][4]) {
  switch (activation) {
    case SILU: return activate_each<SILU>(z);
    case GELU: return activate_each<GELU>(z);
    case GELU_TANH: return activate_each<GELU_TANH>(z);
    case RELU: return activate_each<RELU>(z);
    default: return;
  }
}

DEVICE float activation_slope(int activation, float z) {
  switch (activation) {
    case SILU: {
      const float s = sigmoid(z);
      return s * (1.0f + z * (1.0f - s));
    }
    case GELU: return normal_probability(z) + z * normal_density(z);
    case GELU_TANH: {
      const float t = tanhf(0.79788456080286536f * (z + 0.044715f * z * z * z));
      const float inner = 0.79788456080286536f * (1.0f + 0.134145f * z * z);
      return 0.5f * (1.0f + t) + 0.5f * z * (1.0f - t * t) * inner;
    }
    case RELU: return z > 0.0f ? 1.0f : 0.0f;
    default: return 1.0f;
  }
}
