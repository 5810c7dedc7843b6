// Backward of ops/tiled_mlp.py in three launches, no atomics, the same bits each time; the hidden layer is made
// anew in the first two and never written:
// 1. gradients of the latents, as the forward goes: a block for some tokens, its warps share the hidden features;
// 2. gradients of right, left and the biases: a warp for 16 hidden features, which it keeps as rows of its products,
//    and a chunk of the tokens;
// 3. sums over the chunks, in their order.
#include "hidden_features.h"

namespace {

struct Backward {
  WideLayer layer;
  const void* grad_out;
  void* dlatent[2];
  float *gradients, *partials;  // dright_1, dright_2, dleft, dbias_1, dbias_2; partials once for each chunk
  Places place;
  int64_t chunk_tokens, num_chunks;
};

// ---- Launch 1

template <int P, int RANK, int INPUTS>
KERNEL LAUNCH_BOUNDS(THREADS, RANK == 32 && INPUTS == 1 ? 2 : 1) tiled_mlp_gradient_kernel(Backward arguments) {
  SHARED CodeSums<P, RANK> sums;
  const WideLayer& a = arguments.layer;
  const int warp = threadIdx.x / 32, half = warp % 2, slot = warp / 2;
  const int64_t first_token = static_cast<int64_t>(blockIdx.x) * TOKENS, token = first_token + 16 * half;
  float sum[INPUTS][RANK / 8][4] = {};
  for (int column = slot * SLAB; column < a.hidden_features; column += WIDE_SLOTS * SLAB) {
    float wide[INPUTS][COLUMNS][4] = {}, gradient[COLUMNS][4] = {};
    make_wide<P, RANK, INPUTS>(wide, a, token, column);
    expand_latent<P, RANK>(gradient, arguments.grad_out, a.left, a.rank_out, token, column, a);
    differentiate(a.activation, wide, gradient, SlabKeeps(a, token, column));
#pragma unroll
    for (int n = 0; n < INPUTS; n++)
      contract_slab<P, RANK>(sum[n], wide[n], a.input[n].right, a.input[n].rank, column, a.hidden_features);
  }
#pragma unroll
  for (int n = 0; n < INPUTS; n++) {
    if (n) __syncthreads();  // the sums before have been read
    sums.put(slot, half, sum[n]);
    __syncthreads();
    sums.write(arguments.dlatent[n], first_token, a.num_tokens, a.input[n].rank);
  }
}

// ---- Launch 2

constexpr int WANTED_WARPS = 2048;  // about 16 for each multiprocessor of a large GPU

// Axis x: hidden features; axis y: the chunk of tokens.
template <int P, int RANK, int INPUTS>
KERNEL LAUNCH_BOUNDS(FEATURE_THREADS, RANK == 32 && INPUTS == 1 ? 4 : 2)
    wide_feature_gradient_kernel(Backward arguments) {
  const WideLayer& a = arguments.layer;
  const int feature = (static_cast<int>(blockIdx.x) * FEATURE_WARPS + static_cast<int>(threadIdx.x) / 32) * FEATURES;
  const int64_t begin = blockIdx.y * arguments.chunk_tokens, wanted_end = begin + arguments.chunk_tokens;
  const int64_t end = wanted_end < a.num_tokens ? wanted_end : a.num_tokens;
  SHARED FeatureRows<P, RANK> rows[INPUTS + 1];
  FeatureGradients<P, RANK, INPUTS> sums{rows};
  sums.read(a, feature);
  for (int64_t token = begin; token < end; token += Format<P>::STEP)
    sums.add(a, arguments.grad_out, feature, token, end);
  sums.write(arguments.partials + blockIdx.y * arguments.place.total, arguments.place, a, feature);
}

// ---- Launch 3

constexpr int SUM_THREADS = 256;

KERNEL LAUNCH_BOUNDS(SUM_THREADS, 4) wide_sum_kernel(Backward a) {
  const int64_t total = a.place.total;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * SUM_THREADS + threadIdx.x;
  if (i >= total) return;
  float sum = 0.0f;
#pragma unroll 8
  for (int64_t chunk = 0; chunk < a.num_chunks; chunk++) sum += a.partials[chunk * total + i];
  a.gradients[i] = sum;
}

Places places(const WideLayer& a) {
  const int64_t columns = a.hidden_features, inputs = a.input[1].right ? 2 : 1;
  const int64_t right = a.input[0].rank * columns, left = right + (inputs - 1) * a.input[1].rank * columns;
  const int64_t bias = left + a.rank_out * columns;
  return {{0, right}, left, {bias, bias + columns}, bias + inputs * columns};
}

int64_t tokens_of_chunk(int64_t num_tokens, int hidden_features) {
  const int64_t warps = (hidden_features + FEATURES - 1) / FEATURES, wanted = (WANTED_WARPS + warps - 1) / warps;
  const int64_t tokens = (num_tokens + wanted - 1) / wanted;
  return tokens < 64 ? 64 : (tokens + 15) / 16 * 16;
}

struct LaunchBackward {
  Backward arguments;
  void* stream;
  template <int P, int RANK, int INPUTS>
  int operator()() const {
    const WideLayer& a = arguments.layer;
    const unsigned tiles = num_token_tiles(a.num_tokens);
    if (tiles)
      if (const int status = launch(tiled_mlp_gradient_kernel<P, RANK, INPUTS>, tiles, THREADS, stream, arguments))
        return status;
    constexpr int BLOCK = FEATURES * FEATURE_WARPS;
    const dim3 grid((a.hidden_features + BLOCK - 1) / BLOCK, static_cast<unsigned>(arguments.num_chunks));
    if (const int status =
            launch(wide_feature_gradient_kernel<P, RANK, INPUTS>, grid, FEATURE_THREADS, stream, arguments))
      return status;
    const unsigned blocks = static_cast<unsigned>((arguments.place.total + SUM_THREADS - 1) / SUM_THREADS);
    return launch(wide_sum_kernel, blocks, SUM_THREADS, stream, arguments);
  }
};

}  // namespace

// In how many chunks the tokens are taken; `partials` needs as many times the floats of `gradients`.
extern "C" int64_t hf_comera_tiled_mlp_chunks(int64_t num_tokens, int hidden_features) {
  const int64_t tokens = tokens_of_chunk(num_tokens, hidden_features);
  return num_tokens > tokens ? (num_tokens + tokens - 1) / tokens : 1;
}

// As hf_comera_tiled_mlp, and grad_out (T, S) -> dlatent_1 (T, R1), dlatent_2 (T, R2) with a gate; in float32, one after
// the other, dright_1 (R1, H), dright_2 (R2, H) with a gate, dleft (S, H), dbias_1 (H), dbias_2 (H) with a gate.
extern "C" int hf_comera_tiled_mlp_backward(int precision, const void* latent_1, const void* right_1, const void* bias_1,
                                            const void* latent_2, const void* right_2, const void* bias_2,
                                            const void* left, const void* keeps, const void* grad_out, void* dlatent_1,
                                            void* dlatent_2, float* gradients, float* partials, int64_t num_tokens,
                                            int hidden_features, int rank_1, int rank_2, int rank_out, int activation,
                                            double scale, void* stream) {
  const WideLayer layer{{{latent_1, right_1, bias_1, rank_1}, {latent_2, right_2, bias_2, rank_2}},
                        left, static_cast<const uint8_t*>(keeps), static_cast<float>(scale),
                        activation, rank_out, hidden_features, num_tokens};
  if (const int status = check_wide_layer(precision, layer)) return status;
  const Backward arguments{layer, grad_out, {dlatent_1, dlatent_2}, gradients, partials,
                           places(layer), tokens_of_chunk(num_tokens, hidden_features),
                           hf_comera_tiled_mlp_chunks(num_tokens, hidden_features)};
  return choose_wide_kernel(precision, layer, LaunchBackward{arguments, stream});
}
