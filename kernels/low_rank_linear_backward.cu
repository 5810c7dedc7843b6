// Backward of ops/low_rank.py in three launches, no atomics, the same bits each time:
// 1. gradient of the latent and dx = dlatent left, as the forward does its two products;
// 2. dleft = dlatent^T x, dright = latent^T dy and dbias = column sums of dy, each block for a chunk of the tokens;
// 3. sums over the chunks, in their order.
// x and dy are read a second time by launch 2; at usual batch sizes they are in the L2 cache then.
#include "low_rank_tiles.h"

namespace {

struct Backward {
  const void *grad_y, *grad_latent, *x, *latent, *left, *right;
  void *dx, *dlatent;
  float *dleft, *dright, *dbias, *partials;
  int64_t num_tokens, chunk_tokens;
  int in_features, out_features, rank;
  int64_t num_chunks;
};

// ---- Launch 1

template <int P, int RANK, bool ALIGNED>
KERNEL LAUNCH_BOUNDS(THREADS, ALIGNED ? 2 : 1) latent_gradient_kernel(Backward a) {
  SHARED Tile<P, RANK> tile;
  const int64_t token = static_cast<int64_t>(blockIdx.x) * TOKENS;
  const auto* right = static_cast<const Element<P>*>(a.right);
  contract<P, RANK, ALIGNED>(tile, static_cast<const Element<P>*>(a.grad_y), right, token, a.num_tokens,
                             a.out_features, a.rank);
  __syncthreads();
  const auto* grad_latent = static_cast<const Element<P>*>(a.grad_latent);
  finish_sums<P, RANK>(tile, token, a.num_tokens, a.rank, [&](int64_t t, int r, float sum) {
    const int64_t i = t * a.rank + r;
    if (grad_latent) sum += to_float(grad_latent[i]);
    from_float(static_cast<Element<P>*>(a.dlatent)[i], sum);
    return sum;
  });
  if (!a.dx) return;
  __syncthreads();
  expand_all<P, RANK, ALIGNED>(tile, static_cast<const Element<P>*>(a.left), static_cast<const Element<P>*>(nullptr),
                               static_cast<Element<P>*>(a.dx), token, a.num_tokens, a.rank, a.in_features);
}

// ---- Launch 2

constexpr int PRODUCT_WARPS = 4;
constexpr int PRODUCT_THREADS = 32 * PRODUCT_WARPS;
constexpr int WANTED_BLOCKS = 384;  // of launch 2; about three for each multiprocessor of a large GPU

// Warps share the ranks in RANK / 32 ways and the tokens of a chunk in SLOTS ways.
template <int P, int RANK>
struct alignas(16) ProductTile {
  static constexpr int SLOTS = PRODUCT_WARPS / (RANK / 32);
  static constexpr int SLAB = 8 * Format<P>::VECTOR;
  float number[SLOTS][RANK][SLAB];
  float column_sum[SLOTS][SLAB];
};

// Sum over the lane's rows of this step, for each of its columns.
template <int P>
DEVICE void add_columns(float (&total)[Format<P>::VECTOR], const StepRows<P>& rows) {
#pragma unroll
  for (int i = 0; i < (P == BF16 ? 4 : 2); i++)
#pragma unroll
    for (int c = 0; c < Format<P>::VECTOR; c++) {
      const uint32_t word = rows.row[i].word[P == BF16 ? c / 2 : c];
      total[c] += float_of(P != BF16 ? word : c % 2 ? word & 0xffff0000u : word << 16);
    }
}

// This warp's share of `narrow (T, R)^T @ wide (T, N)` for one slab, and the sums of the slab's columns.
template <int P, int RANK, bool ALIGNED>
DEVICE void transposed_product(ProductTile<P, RANK>& tile, const Element<P>* narrow, const Element<P>* wide,
                               const Backward& a, int slab, int columns) {
  constexpr int VECTOR = Format<P>::VECTOR, STEP = Format<P>::STEP, SLOTS = ProductTile<P, RANK>::SLOTS;
  const int warp = threadIdx.x / 32, row = lane_row(), quad = lane_quad();
  const int slot = warp % SLOTS, rank_base = warp / SLOTS * 32;
  const int64_t begin = blockIdx.y * a.chunk_tokens;
  const int64_t end = begin + a.chunk_tokens < a.num_tokens ? begin + a.chunk_tokens : a.num_tokens;
  float sum[2][VECTOR][4] = {}, total[VECTOR] = {};
  for (int64_t k = begin + slot * STEP; k < end; k += SLOTS * STEP) {
    StepRows<P, 4> n;
    StepRows<P> w;
    n.template read<ALIGNED>(narrow, k, end, rank_base + 4 * row, a.rank);
    w.template read<ALIGNED>(wide, k, end, slab + slab_column<P>(), columns);
    add_columns<P>(total, w);
    LeftOperand<P> left[2];
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int j = 0; j < 4; j++) set_word<P>(left[i], j, n.word(2 * i + j % 2, j / 2));
#pragma unroll
    for (int c = 0; c < VECTOR; c++) {
      RightOperand<P> b;
      set_word<P>(b, 0, w.word(c, 0));
      set_word<P>(b, 1, w.word(c, 1));
#pragma unroll
      for (int i = 0; i < 2; i++) multiply_add<P>(sum[i][c], left[i], b);
    }
  }
#pragma unroll
  for (int i = 0; i < 2; i++)
#pragma unroll
    for (int c = 0; c < VECTOR; c++)
#pragma unroll
      for (int j = 0; j < 4; j++)
        tile.number[slot][rank_base + 4 * row + 2 * i + j / 2][VECTOR * (quad + j % 2 * 4) + c] = sum[i][c][j];
#pragma unroll
  for (int c = 0; c < VECTOR; c++) {
    total[c] += shuffle_xor(total[c], 1);
    total[c] += shuffle_xor(total[c], 2);
    if (rank_base == 0 && quad == 0) tile.column_sum[slot][slab_column<P>() + c] = total[c];
  }
}

// Blocks of axis x are the slabs of x, then those of dy; axis y is the chunk of tokens.
template <int P, int RANK, bool ALIGNED>
KERNEL LAUNCH_BOUNDS(PRODUCT_THREADS, ALIGNED ? 3 : 1) product_kernel(Backward a) {
  SHARED ProductTile<P, RANK> tile;
  constexpr int SLAB = ProductTile<P, RANK>::SLAB;
  const int x_slabs = (a.in_features + SLAB - 1) / SLAB;
  const bool of_x = static_cast<int>(blockIdx.x) < x_slabs;
  const int slab = (static_cast<int>(blockIdx.x) - (of_x ? 0 : x_slabs)) * SLAB;
  const int columns = of_x ? a.in_features : a.out_features;
  transposed_product<P, RANK, ALIGNED>(tile, static_cast<const Element<P>*>(of_x ? a.dlatent : a.latent),
                                       static_cast<const Element<P>*>(of_x ? a.x : a.grad_y), a, slab, columns);
  __syncthreads();
  const int64_t left_size = static_cast<int64_t>(a.rank) * a.in_features;
  const int64_t right_size = static_cast<int64_t>(a.rank) * a.out_features;
  float* partial = a.partials + blockIdx.y * (left_size + right_size + a.out_features);
  for (int i = threadIdx.x; i < RANK * SLAB; i += PRODUCT_THREADS) {
    const int r = i / SLAB, c = i % SLAB;
    if (r >= a.rank || slab + c >= columns) continue;
    float sum = 0.0f;
    for (int slot = 0; slot < ProductTile<P, RANK>::SLOTS; slot++) sum += tile.number[slot][r][c];
    partial[(of_x ? 0 : left_size) + static_cast<int64_t>(r) * columns + slab + c] = sum;
  }
  for (int c = threadIdx.x; c < SLAB; c += PRODUCT_THREADS) {
    if (of_x || slab + c >= columns) continue;
    float sum = 0.0f;
    for (int slot = 0; slot < ProductTile<P, RANK>::SLOTS; slot++) sum += tile.column_sum[slot][c];
    partial[left_size + right_size + slab + c] = sum;
  }
}

// ---- Launch 3

constexpr int SUM_THREADS = 256;

KERNEL LAUNCH_BOUNDS(SUM_THREADS, 4) sum_kernel(Backward a) {
  const int64_t left_size = static_cast<int64_t>(a.rank) * a.in_features;
  const int64_t both = left_size + static_cast<int64_t>(a.rank) * a.out_features;
  const int64_t total = both + a.out_features;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * SUM_THREADS + threadIdx.x;
  if (i >= total) return;
  float sum = 0.0f;
#pragma unroll 8
  for (int64_t chunk = 0; chunk < a.num_chunks; chunk++) sum += a.partials[chunk * total + i];
  if (i < left_size) a.dleft[i] = sum;
  else if (i < both) a.dright[i - left_size] = sum;
  else if (a.dbias) a.dbias[i - both] = sum;
}

int num_slabs(int precision, int columns) {
  const int slab = precision == BF16 ? 64 : 32;
  return (columns + slab - 1) / slab;
}

// Tokens of a chunk: a multiple of what all warps do at once, and chunks enough to fill a GPU.
int64_t tokens_of_chunk(int precision, int64_t num_tokens, int in_features, int out_features) {
  const int slabs = num_slabs(precision, in_features) + num_slabs(precision, out_features);
  const int wanted = slabs ? (WANTED_BLOCKS + slabs - 1) / slabs : 1;
  const int64_t tokens = (num_tokens + wanted - 1) / wanted;
  return tokens < 64 ? 64 : (tokens + 63) / 64 * 64;
}

struct LaunchBackward {
  const Backward& arguments;
  int precision;
  void* stream;
  template <int P, int RANK, bool ALIGNED>
  int operator()() const {
    const Backward& a = arguments;
    const unsigned tiles = num_token_tiles(a.num_tokens);
    if (tiles)
      if (const int status = launch(latent_gradient_kernel<P, RANK, ALIGNED>, tiles, THREADS, stream, a)) return status;
    const unsigned slabs = num_slabs(P, a.in_features) + num_slabs(P, a.out_features);
    if (!slabs) return OK;
    const dim3 grid(slabs, static_cast<unsigned>(a.num_chunks));
    if (const int status = launch(product_kernel<P, RANK, ALIGNED>, grid, PRODUCT_THREADS, stream, a)) return status;
    const int64_t total = static_cast<int64_t>(a.rank) * (a.in_features + a.out_features) + a.out_features;
    return launch(sum_kernel, static_cast<unsigned>((total + SUM_THREADS - 1) / SUM_THREADS), SUM_THREADS, stream, a);
  }
};

}  // namespace

// In how many chunks the tokens are taken; `partials` needs as many times R I + R O + O floats.
extern "C" int64_t hf_comera_low_rank_linear_chunks(int precision, int64_t num_tokens, int in_features,
                                                    int out_features) {
  const int64_t tokens = tokens_of_chunk(precision, num_tokens, in_features, out_features);
  return num_tokens > tokens ? (num_tokens + tokens - 1) / tokens : 1;
}

// grad_y (T, O), grad_latent (T, R) or null, x (T, I), latent (T, R), left (R, I), right (R, O)
// -> dx (T, I), not computed where null; dleft (R, I), dright (R, O), dbias (O) or null, in float32.
// Scratch: dlatent (T, R).
extern "C" int hf_comera_low_rank_linear_backward(int precision, const void* grad_y, const void* grad_latent,
                                                  const void* x, const void* latent, const void* left,
                                                  const void* right, void* dx, float* dleft, float* dright,
                                                  float* dbias, void* dlatent, float* partials, int64_t num_tokens,
                                                  int in_features, int out_features, int rank, void* stream) {
  if (const int status = check_sizes(precision, rank, num_tokens, in_features, out_features)) return status;
  const Backward arguments{grad_y, grad_latent, x, latent, left, right, dx, dlatent, dleft, dright, dbias, partials,
                           num_tokens, tokens_of_chunk(precision, num_tokens, in_features, out_features),
                           in_features, out_features, rank,
                           hf_comera_low_rank_linear_chunks(precision, num_tokens, in_features, out_features)};
  const bool aligned = is_aligned(precision, in_features, out_features, {grad_y, x, latent, left, right, dx, dlatent});
  return choose_kernel(precision, rank, aligned, LaunchBackward{arguments, precision, stream});
}
