// Forward of ops/tiled_mlp.py: from latents to the latent behind a hidden layer, which is never written, in one launch.
// A warp makes 16 tokens of a slab of hidden features in registers, where they already lie as the operand of the
// product with `left`, and keeps its share of the latent behind for all its slabs.
#include "tiled_mlp.h"

namespace {

struct Forward {
  WideLayer layer;
  void* latent_out;
};

template <int P, int RANK, int INPUTS>
KERNEL LAUNCH_BOUNDS(THREADS, RANK == 32 ? 2 : 1) tiled_mlp_kernel(Forward arguments) {
  SHARED CodeSums<P, RANK> sums;
  const WideLayer& a = arguments.layer;
  const int warp = threadIdx.x / 32, half = warp % 2, slot = warp / 2;
  const int64_t first_token = static_cast<int64_t>(blockIdx.x) * TOKENS, token = first_token + 16 * half;
  float sum[RANK / 8][4] = {};
  for (int column = slot * SLAB; column < a.hidden_features; column += WIDE_SLOTS * SLAB) {
    float wide[INPUTS][COLUMNS][4] = {};
    make_wide<P, RANK, INPUTS>(wide, a, token, column);
    make_hidden(a.activation, wide, SlabKeeps(a, token, column));
    contract_slab<P, RANK>(sum, wide[0], a.left, a.rank_out, column, a.hidden_features);
  }
  sums.put(slot, half, sum);
  __syncthreads();
  sums.write(arguments.latent_out, first_token, a.num_tokens, a.rank_out);
}

struct LaunchForward {
  Forward arguments;
  void* stream;
  template <int P, int RANK, int INPUTS>
  int operator()() const {
    return launch(tiled_mlp_kernel<P, RANK, INPUTS>, num_token_tiles(arguments.layer.num_tokens), THREADS, stream,
                  arguments);
  }
};

}  // namespace

// latent_1 (T, R1), right_1 (R1, H), bias_1 (H) or null, those of the gate or nulls, left (S, H), keeps (T, H) or null
// -> latent_out (T, S).
extern "C" int hf_comera_tiled_mlp(int precision, const void* latent_1, const void* right_1, const void* bias_1,
                                   const void* latent_2, const void* right_2, const void* bias_2, const void* left,
                                   const void* keeps, void* latent_out, int64_t num_tokens, int hidden_features,
                                   int rank_1, int rank_2, int rank_out, int activation, double scale, void* stream) {
  const WideLayer layer{{{latent_1, right_1, bias_1, rank_1}, {latent_2, right_2, bias_2, rank_2}},
                        left, static_cast<const uint8_t*>(keeps), static_cast<float>(scale),
                        activation, rank_out, hidden_features, num_tokens};
  if (const int status = check_wide_layer(precision, layer)) return status;
  if (num_tokens == 0) return OK;
  return choose_wide_kernel(precision, layer, LaunchForward{{layer, latent_out}, stream});
}
