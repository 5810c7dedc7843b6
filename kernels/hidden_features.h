// Launch 2 of tiled_mlp_backward.cu: gradients of 16 hidden features, kept by a warp while it runs through tokens.
//
// The features are the rows of all its products: those that make the hidden layer anew sum over ranks, and their
// results lie in the registers as the left operand of those that sum over tokens.
#pragma once
#include "tiled_mlp.h"

constexpr int FEATURES = 16;  // of a warp
constexpr int FEATURE_WARPS = 4;
constexpr int FEATURE_THREADS = 32 * FEATURE_WARPS;

// Where in the gradients those of an input, of left, and of the biases begin; `total` is their length.
struct Places {
  int64_t right[2], left, bias[2], total;
};

// The token of a tile of 8 that is column `n` of an mma: pairs of columns are tokens as StepRows orders them.
template <int P>
DEVICE int tile_token(int n) {
  return P == BF16 ? n : n / 2 + n % 2 * 4;
}

// 16 columns of a matrix (R, H) for each warp, as left operands: features are rows, and ranks are summed in the order
// in which times_latent() reads them. In shared memory, where a lane has words of its own, so there is no barrier.
template <int P, int RANK>
struct alignas(16) FeatureRows {
  uint4 words[RANK / Format<P>::STEP][FEATURE_THREADS];

  DEVICE void read(const void* matrix, int rank, int feature, int columns) {
    constexpr int GROUP = 4 * Format<P>::VECTOR;
    for (int step = 0; step < RANK / Format<P>::STEP; step++) {
      uint32_t word[4];
#pragma unroll
      for (int w = 0; w < 4; w++) {
        const int column = feature + lane_row() + w % 2 * 8;
        const int r = step / 2 * GROUP + Format<P>::VECTOR * lane_quad() + PAIR<P> * (step % 2 * 2 + w / 2);
        const auto* element = static_cast<const Element<P>*>(matrix) + static_cast<int64_t>(r) * columns + column;
        const bool inside = r < rank && column < columns;
        if constexpr (P == BF16) word[w] = inside ? element[0] | static_cast<uint32_t>(element[columns]) << 16 : 0;
        else word[w] = inside ? bits_of(*element) : 0;
      }
      words[step][threadIdx.x] = uint4{word[0], word[1], word[2], word[3]};
    }
  }
  DEVICE LeftOperand<P> operand(int step, int thread) const {
    const uint4 word = words[step][thread];
    LeftOperand<P> a;
    set_word<P>(a, 0, word.x);
    set_word<P>(a, 1, word.y);
    set_word<P>(a, 2, word.z);
    set_word<P>(a, 3, word.w);
    return a;
  }
};

// sum (16 features, 8 tokens) += rows (16 features, R) @ latent (8 tokens from `token` on, R)^T.
template <int P, int RANK>
DEVICE void times_latent(float (&sum)[4], const FeatureRows<P, RANK>& rows, const void* latent, int rank, int64_t token,
                       int64_t end) {
  int thread = threadIdx.x;
  forget(thread);  // or all operands would move to registers, which cannot hold them
  const int64_t t = token + tile_token<P>(lane_row());
#pragma unroll
  for (int group = 0; group < RANK / (4 * Format<P>::VECTOR); group++) {
    const Words words = load_row<P, true>(static_cast<const Element<P>*>(latent) + t * rank,
                                          Format<P>::VECTOR * (4 * group + lane_quad()), rank, t < end);
#pragma unroll
    for (int step = 0; step < 2; step++) {
      RightOperand<P> b;
      set_word<P>(b, 0, words.word[2 * step]);
      set_word<P>(b, 1, words.word[2 * step + 1]);
      multiply_add<P>(sum, rows.operand(2 * group + step, thread), b);
    }
  }
}

// Ranks that a lane reads of a token at once in add_product(), and how often.
template <int P, int RANK>
constexpr int RANKS_READ = RANK / 8 < Format<P>::VECTOR ? RANK / 8 : Format<P>::VECTOR;
template <int P, int RANK>
constexpr int READS = RANK / 8 / RANKS_READ<P, RANK>;

// sum (16 features, R) += slab (16 features, STEP tokens) @ latent (STEP tokens from `token` on, R).
template <int P, int RANK>
DEVICE void add_product(float (&sum)[RANK / 8][4], const float (&slab)[Format<P>::STEP / 8][4], const void* latent,
                        int rank, int64_t token, int64_t end) {
  constexpr int COUNT = RANKS_READ<P, RANK>;
  LeftOperand<P> a;
#pragma unroll
  for (int w = 0; w < 4; w++) {
    if constexpr (P == BF16) set_word<P>(a, w, pack_bf16(slab[w / 2][w % 2 * 2], slab[w / 2][w % 2 * 2 + 1]));
    else set_word<P>(a, w, bits_of(slab[0][w % 2 * 2 + w / 2]));
  }
#pragma unroll
  for (int part = 0; part < READS<P, RANK>; part++) {
    StepRows<P, COUNT> rows;
    rows.template read<true>(static_cast<const Element<P>*>(latent), token, end, COUNT * (8 * part + lane_row()), rank);
#pragma unroll
    for (int j = 0; j < COUNT; j++) {
      RightOperand<P> b;
      set_word<P>(b, 0, rows.word(j, 0));
      set_word<P>(b, 1, rows.word(j, 1));
      multiply_add<P>(sum[COUNT * part + j], a, b);
    }
  }
}

// What add_product() summed, to `output (rank, columns)`.
template <int P, int RANK>
DEVICE void write_product(float* output, const float (&sum)[RANK / 8][4], int rank, int feature, int columns) {
  constexpr int COUNT = RANKS_READ<P, RANK>;
#pragma unroll
  for (int j = 0; j < RANK / 8; j++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int r = COUNT * (j / COUNT * 8 + 2 * lane_quad() + i % 2) + j % COUNT;
      const int column = feature + lane_row() + i / 2 * 8;
      if (r < rank && column < columns) output[static_cast<int64_t>(r) * columns + column] = sum[j][i];
    }
}

// The factor of dropout for result i of tile c of 8 tokens.
template <int P>
struct FeatureKeeps {
  const WideLayer& a;
  int64_t token;
  int feature;
  DEVICE float operator()(int c, int i) const {
    if (!a.keeps) return 1.0f;
    const int64_t t = token + 8 * c + tile_token<P>(2 * lane_quad() + i % 2);
    const int column = feature + lane_row() + i / 2 * 8;
    const bool inside = t < a.num_tokens && column < a.hidden_features;
    return inside && a.keeps[t * a.hidden_features + column] ? a.scale : 0.0f;
  }
};

// The lane's part of a bias, or of its gradient: features lane_row() and lane_row() + 8.
template <int P>
DEVICE void read_bias(float (&bias)[2], const void* values, int feature, int columns) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int column = feature + lane_row() + 8 * i;
    bias[i] = values && column < columns ? to_float(static_cast<const Element<P>*>(values)[column]) : 0.0f;
  }
}
DEVICE void write_bias(float* output, float (&sum)[2], int feature, int columns) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    sum[i] += shuffle_xor(sum[i], 1);
    sum[i] += shuffle_xor(sum[i], 2);
    const int column = feature + lane_row() + 8 * i;
    if (lane_quad() == 0 && column < columns) output[column] = sum[i];
  }
}

// What a warp sums. `rows` are those of each right, and of left.
template <int P, int RANK, int INPUTS>
struct FeatureGradients {
  static constexpr int TILES = Format<P>::STEP / 8;
  FeatureRows<P, RANK>* rows;
  float bias[INPUTS][2] = {}, dright[INPUTS][RANK / 8][4] = {}, dleft[RANK / 8][4] = {}, dbias[INPUTS][2] = {};

  DEVICE void read(const WideLayer& a, int feature) {
#pragma unroll
    for (int n = 0; n < INPUTS; n++) {
      rows[n].read(a.input[n].right, a.input[n].rank, feature, a.hidden_features);
      read_bias<P>(bias[n], a.input[n].bias, feature, a.hidden_features);
    }
    rows[INPUTS].read(a.left, a.rank_out, feature, a.hidden_features);
  }
  // Takes in STEP tokens.
  DEVICE void add(const WideLayer& a, const void* grad_out, int feature, int64_t token, int64_t end) {
    float wide[INPUTS][TILES][4], gradient[TILES][4] = {};
#pragma unroll
    for (int c = 0; c < TILES; c++) {
#pragma unroll
      for (int n = 0; n < INPUTS; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) wide[n][c][i] = bias[n][i / 2];
        times_latent<P, RANK>(wide[n][c], rows[n], a.input[n].latent, a.input[n].rank, token + 8 * c, end);
      }
      times_latent<P, RANK>(gradient[c], rows[INPUTS], grad_out, a.rank_out, token + 8 * c, end);
    }
    differentiate(a.activation, wide, gradient, FeatureKeeps<P>{a, token, feature});
    add_product<P, RANK>(dleft, gradient, grad_out, a.rank_out, token, end);
#pragma unroll
    for (int n = 0; n < INPUTS; n++) {
      add_product<P, RANK>(dright[n], wide[n], a.input[n].latent, a.input[n].rank, token, end);
#pragma unroll
      for (int c = 0; c < TILES; c++)
#pragma unroll
        for (int i = 0; i < 4; i++) dbias[n][i / 2] += wide[n][c][i];
    }
  }
  DEVICE void write(float* output, const Places& place, const WideLayer& a, int feature) {
    write_product<P, RANK>(output + place.left, dleft, a.rank_out, feature, a.hidden_features);
#pragma unroll
    for (int n = 0; n < INPUTS; n++) {
      write_product<P, RANK>(output + place.right[n], dright[n], a.input[n].rank, feature, a.hidden_features);
      write_bias(output + place.bias[n], dbias[n], feature, a.hidden_features);
    }
  }
};
