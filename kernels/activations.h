// Nonlinearities and their derivatives, chosen at run time; the numbers are those of ops/cuda/tiled_mlp.py.
#pragma once
#include "portable.h"

enum Activation { SILU = 1, GELU = 2, GELU_TANH = 3, RELU = 4 };

DEVICE float sigmoid(float z) { return 1.0f / (1.0f + expf(-z)); }
DEVICE float normal_probability(float z) { return 0.5f * (1.0f + erff(z * 0.70710678118654752f)); }
DEVICE float normal_density(float z) { return 0.39894228040143268f * expf(-0.5f * z * z); }

DEVICE float activate(int activation, float z) {
  switch (activation) {
    case SILU: return z * sigmoid(z);
    case GELU: return z * normal_probability(z);
    case GELU_TANH: return 0.5f * z * (1.0f + tanhf(0.79788456080286536f * (z + 0.044715f * z * z * z)));
    default: return z > 0.0f ? z : 0.0f;  // RELU
  }
}

template <int NUMBER>
struct ActivationNumber {
  static constexpr int value = NUMBER;
};

// Calls run(ActivationNumber<...>), so that one choice serves all numbers of a fragment.
template <class Run>
DEVICE void with_activation(int activation, const Run& run) {
  switch (activation) {
    case SILU: return run(ActivationNumber<SILU>{});
    case GELU: return run(ActivationNumber<GELU>{});
    case GELU_TANH: return run(ActivationNumber<GELU_TANH>{});
    default: return run(ActivationNumber<RELU>{});
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
    default: return z > 0.0f ? 1.0f : 0.0f;  // RELU
  }
}
