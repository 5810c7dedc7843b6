// Forward of ops/low_rank.py: latent = x left^T, y = latent right + bias, in one launch. The latent is written once
// and never read back. One block does 32 tokens: its warps share the input features, add their sums in shared memory, and
// then share the output features.
#include "low_rank_tiles.h"

namespace {

struct Linear {
  const void *x, *left, *right, *bias;
  void *y, *latent;
  int64_t num_tokens;
  int in_features, out_features, rank;
};

template <int P, int RANK, bool ALIGNED>
KERNEL LAUNCH_BOUNDS(THREADS, ALIGNED ? 2 : 1) linear_kernel(Linear a) {
  SHARED Tile<P, RANK> tile;
  const int64_t token = static_cast<int64_t>(blockIdx.x) * TOKENS;
  contract<P, RANK, ALIGNED>(tile, static_cast<const Element<P>*>(a.x), static_cast<const Element<P>*>(a.left), token,
                             a.num_tokens, a.in_features, a.rank);
  __syncthreads();
  Element<P>* latent = static_cast<Element<P>*>(a.latent);
  finish_sums<P, RANK>(tile, token, a.num_tokens, a.rank, [&](int64_t t, int r, float sum) {
    from_float(latent[t * a.rank + r], sum);
    return sum;
  });
  __syncthreads();
  expand_all<P, RANK, ALIGNED>(tile, static_cast<const Element<P>*>(a.right), static_cast<const Element<P>*>(a.bias),
                               static_cast<Element<P>*>(a.y), token, a.num_tokens, a.rank, a.out_features);
}

struct LaunchLinear {
  const Linear& arguments;
  void* stream;
  template <int P, int RANK, bool ALIGNED>
  int operator()() const {
    return launch(linear_kernel<P, RANK, ALIGNED>, num_token_tiles(arguments.num_tokens), THREADS, stream, arguments);
  }
};

}  // namespace

// x (T, I), left (R, I), right (R, O), bias (O) or null -> y (T, O), latent (T, R).
extern "C" int hf_comera_low_rank_linear(int precision, const void* x, const void* left, const void* right,
                                         const void* bias, void* y, void* latent, int64_t num_tokens, int in_features,
                                         int out_features, int rank, void* stream) {
  if (const int status = check_sizes(precision, rank, num_tokens, in_features, out_features)) return status;
  if (num_tokens == 0) return OK;
  const Linear arguments{x, left, right, bias, y, latent, num_tokens, in_features, out_features, rank};
  const bool aligned = is_aligned(precision, in_features, out_features, {x, left, right, bias, y});
  return choose_kernel(precision, rank, aligned, LaunchLinear{arguments, stream});
}
