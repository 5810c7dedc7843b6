// A hidden layer that is made from latents, a slab of features for 16 tokens at a time, and never leaves the registers:
// hidden = act(latent_1 right_1 + bias_1) [* (latent_2 right_2 + bias_2)] [* kept entries / (1 - p)].
//
// Shapes: T = tokens, H = hidden features, R1, R2 = ranks in front, S = rank behind; all but T are multiples of 8, and
// every address is a multiple of 16. INPUTS is 2 where the second input gates the first.
#pragma once
#include "activations.h"
#include "low_rank_tiles.h"

struct WideInput {  // latent (T, rank), right (rank, H), bias (H) or null
  const void *latent, *right, *bias;
  int rank;
};

struct WideLayer {
  WideInput input[2];
  const void* left;      // (S, H)
  const uint8_t* keeps;  // (T, H) of 0 and 1, or null
  float scale;           // of what is kept
  int activation, rank_out, hidden_features;
  int64_t num_tokens;
};

constexpr int MAX_WIDE_RANK = 64;
constexpr int WIDE_SLOTS = WARPS / 2;  // shares of the hidden features; two warps have one share, for 16 tokens each
constexpr int COLUMNS = 4;             // neighbouring features that a lane reads; 8 would fill the registers in bf16
constexpr int SLAB = 8 * COLUMNS;      // features that a warp makes at once

// Numbers in a word of an operand.
template <int P>
constexpr int PAIR = P == BF16 ? 2 : 1;

// ---- The nonlinearity, on fragments of COUNT mma results

// wide[0] becomes the hidden layer; kept(c, i) is the factor of an entry.
template <int COUNT, int INPUTS, class Kept>
DEVICE void make_hidden(int activation, float (&wide)[INPUTS][COUNT][4], const Kept& kept) {
  with_activation(activation, [&](auto number) {
#pragma unroll
    for (int c = 0; c < COUNT; c++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float& z = wide[0][c][i];
        z = activate(decltype(number)::value, z) * kept(c, i);
        if constexpr (INPUTS == 2) z *= wide[1][c][i];
      }
  });
}

// `gradient` is that of the hidden layer and becomes the hidden layer; `wide` becomes its own gradient.
template <int COUNT, int INPUTS, class Kept>
DEVICE void differentiate(int activation, float (&wide)[INPUTS][COUNT][4], float (&gradient)[COUNT][4],
                          const Kept& kept) {
  with_activation(activation, [&](auto number) {
#pragma unroll
    for (int c = 0; c < COUNT; c++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float z = wide[0][c][i], factor = kept(c, i), from_behind = gradient[c][i] * factor;
        const float activated = activate(decltype(number)::value, z);
        wide[0][c][i] = from_behind * activation_slope(decltype(number)::value, z);
        gradient[c][i] = activated * factor;
        if constexpr (INPUTS == 2) {
          wide[0][c][i] *= wide[1][c][i];
          gradient[c][i] *= wide[1][c][i];
          wide[1][c][i] = from_behind * activated;
        }
      }
  });
}

// ---- Slabs: 16 tokens and SLAB features, laid out as fragments.h says

// 16 tokens and STEP ranks from `k` on of a latent (T, R); zeros beyond the last token and rank.
template <int P>
DEVICE LeftOperand<P> latent_operand(const void* latent, int64_t token, int64_t num_tokens, int k, int rank) {
  LeftOperand<P> a;
#pragma unroll
  for (int w = 0; w < 4; w++) {
    const int64_t t = token + lane_row() + w % 2 * 8;
    const int r = k + PAIR<P> * (lane_quad() + w / 2 * 4);
    const auto* element = static_cast<const Element<P>*>(latent) + t * rank + r;
    set_word<P>(a, w, t < num_tokens && r < rank ? *reinterpret_cast<const uint32_t*>(element) : 0);
  }
  return a;
}

// sum += latent (16 tokens from `token` on, R) @ matrix (R, H) for the slab of columns from `column` on.
// Two steps at a time: what is read for all of them would not fit into the registers.
template <int P, int RANK>
DEVICE void expand_latent(float (&sum)[COLUMNS][4], const void* latent, const void* matrix, int rank,
                        int64_t token, int column, const WideLayer& layer) {
  const auto* elements = static_cast<const Element<P>*>(matrix);
#pragma unroll 2
  for (int k = 0; k < RANK; k += Format<P>::STEP) {
    const LeftOperand<P> a = latent_operand<P>(latent, token, layer.num_tokens, k, rank);
    StepRows<P, COLUMNS> rows;
    rows.template read<true>(elements, k, rank, column + slab_column<P, COLUMNS>(), layer.hidden_features);
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
      RightOperand<P> b;
      set_word<P>(b, 0, rows.word(c, 0));
      set_word<P>(b, 1, rows.word(c, 1));
      multiply_add<P>(sum[c], a, b);
    }
  }
}

// The inputs of the nonlinearity for a slab.
template <int P, int RANK, int INPUTS>
DEVICE void make_wide(float (&wide)[INPUTS][COLUMNS][4], const WideLayer& a, int64_t token, int column) {
#pragma unroll
  for (int n = 0; n < INPUTS; n++) {
    expand_latent<P, RANK>(wide[n], a.input[n].latent, a.input[n].right, a.input[n].rank, token, column, a);
    add_bias<P, true>(wide[n], static_cast<const Element<P>*>(a.input[n].bias), column, a.hidden_features);
  }
}

// Which entries of a slab dropout keeps, one byte each.
struct SlabKeeps {
  uint32_t word[4];
  float scale;

  DEVICE SlabKeeps(const WideLayer& a, int64_t token, int column) : scale(a.keeps ? a.scale : 1.0f) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int64_t t = token + lane_row() + i / 2 * 8;
      const int first = column + COLUMNS * (lane_quad() + i % 2 * 4);
      const auto* bytes = reinterpret_cast<const uint32_t*>(a.keeps + t * a.hidden_features + first);
      const bool inside = t < a.num_tokens && first < a.hidden_features;
      word[i] = !a.keeps ? 0x01010101u : inside ? *bytes : 0;
    }
  }
  DEVICE float operator()(int c, int i) const { return word[i] >> 8 * c & 1u ? scale : 0.0f; }
};

// sum (16 tokens, R) += slab (16 tokens, from `column` on) @ matrix (R, H)^T.
template <int P, int RANK>
DEVICE void contract_slab(float (&sum)[RANK / 8][4], const float (&slab)[COLUMNS][4], const void* matrix, int rank,
                          int column, int columns) {
  constexpr int STEPS = COLUMNS / 2 / PAIR<P>;
#pragma unroll
  for (int part = 0; part < 2; part++) {
    LeftOperand<P> a[STEPS];
#pragma unroll
    for (int step = 0; step < STEPS; step++)
#pragma unroll
      for (int w = 0; w < 4; w++) {
        const int i = w % 2 * 2 + part, word = 2 * step + w / 2;
        if constexpr (P == BF16) set_word<P>(a[step], w, pack_bf16(slab[2 * word][i], slab[2 * word + 1][i]));
        else set_word<P>(a[step], w, bits_of(slab[word][i]));
      }
#pragma unroll
    for (int j = 0; j < RANK / 8; j++) {
      if (RANK > 32 && j % 4 == 0) forget(column);
      const int r = 8 * j + lane_row();
      const auto* row = static_cast<const Element<P>*>(matrix) + static_cast<int64_t>(r) * columns;
      const Words f =
          load_row<P, true, COLUMNS>(row, column + COLUMNS * (lane_quad() + 4 * part), columns, r < rank);
#pragma unroll
      for (int step = 0; step < STEPS; step++) {
        RightOperand<P> b;
        set_word<P>(b, 0, f.word[2 * step]);
        set_word<P>(b, 1, f.word[2 * step + 1]);
        multiply_add<P>(sum[j], a[step], b);
      }
    }
  }
}

// What the slots of a block have summed of a latent, in shared memory.
template <int P, int RANK>
struct alignas(16) CodeSums {
  float number[WIDE_SLOTS][TOKENS][RANK + Format<P>::PADDING];

  DEVICE void put(int slot, int half, const float (&sum)[RANK / 8][4]) {
#pragma unroll
    for (int j = 0; j < RANK / 8; j++)
#pragma unroll
      for (int i = 0; i < 2; i++)
        *reinterpret_cast<float2*>(&number[slot][16 * half + lane_row() + 8 * i][8 * j + 2 * lane_quad()]) =
            float2{sum[j][2 * i], sum[j][2 * i + 1]};
  }
  // Adds the slots in their order, for the block's tokens of a latent (T, rank).
  DEVICE void write(void* latent, int64_t token, int64_t num_tokens, int rank) const {
    for (int i = threadIdx.x; i < TOKENS * RANK; i += THREADS) {
      const int t = i / RANK, r = i % RANK;
      float sum = 0.0f;
#pragma unroll
      for (int slot = 0; slot < WIDE_SLOTS; slot++) sum += number[slot][t][r];
      if (token + t < num_tokens && r < rank) from_float(static_cast<Element<P>*>(latent)[(token + t) * rank + r], sum);
    }
  }
};

// ---- Host

// Calls `run.template operator()<P, RANK, INPUTS>()` for the smallest tile that holds the ranks.
template <int P, class Run>
int choose_inputs(int rank, bool gated, const Run& run) {
  if (rank <= 32) return gated ? run.template operator()<P, 32, 2>() : run.template operator()<P, 32, 1>();
  return gated ? run.template operator()<P, 64, 2>() : run.template operator()<P, 64, 1>();
}
template <class Run>
int choose_wide_kernel(int precision, const WideLayer& layer, const Run& run) {
  int rank = layer.rank_out;
  for (const WideInput& input : layer.input) rank = input.rank > rank ? input.rank : rank;
  const bool gated = layer.input[1].right;  // a latent of no tokens has no address
  switch (precision) {
    case BF16: return choose_inputs<BF16>(rank, gated, run);
    case TF32: return choose_inputs<TF32>(rank, gated, run);
    default: return choose_inputs<FP32>(rank, gated, run);
  }
}

inline int check_wide_layer(int precision, const WideLayer& layer) {
  if (layer.activation < SILU || layer.activation > RELU) return UNSUPPORTED_ACTIVATION;
  for (const int rank : {layer.input[0].rank, layer.input[1].right ? layer.input[1].rank : 8, layer.rank_out}) {
    if (rank > MAX_WIDE_RANK) return UNSUPPORTED_RANK;
    if (const int status = check_sizes(precision, rank, layer.num_tokens, layer.hidden_features, 0)) return status;
  }
  return layer.hidden_features % 8 ? BAD_SIZE : OK;
}
