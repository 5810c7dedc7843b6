// Forward of two low-rank layers with an activation between them, in one launch that never writes the hidden features:
// code_in = x left_in^T, hidden = act(code_in right_in + bias_in), code_out = hidden left_out^T, y = code_out right_out
// + bias_out. A warp makes 16 tokens of a slab of hidden features in registers, where they already lie as the operand
// of the next product.
#include "low_rank_tiles.h"

namespace {

struct Ffn {
  const void *x, *left_in, *right_in, *bias_in, *left_out, *right_out, *bias_out;
  void *y, *code_in, *code_out;
  int64_t num_tokens;
  int in_features, hidden_features, out_features, rank_in, rank_out, activation, rank_activation;
};

// sum (16 tokens, RANK) += hidden (16 tokens, slab from `column` on) @ first (R, H)^T.
template <int P, int RANK, bool ALIGNED>
DEVICE void contract_slab(float (&sum)[RANK / 8][4], const float (&hidden)[Format<P>::VECTOR][4],
                          const Element<P>* first, int rank, int column, int columns) {
  constexpr int VECTOR = Format<P>::VECTOR;
#pragma unroll
  for (int part = 0; part < 2; part++) {
    LeftOperand<P> a[2];
#pragma unroll
    for (int step = 0; step < 2; step++)
#pragma unroll
      for (int w = 0; w < 4; w++) {
        const int half = w % 2 * 2 + part, word = 2 * step + w / 2;
        if constexpr (P == BF16) set_word<P>(a[step], w, pack_bf16(hidden[2 * word][half], hidden[2 * word + 1][half]));
        else set_word<P>(a[step], w, bits_of(hidden[word][half]));
      }
#pragma unroll
    for (int j = 0; j < RANK / 8; j++) {
      const int r = 8 * j + lane_row();
      const Words f = load_row<P, ALIGNED>(first + static_cast<int64_t>(r) * columns,
                                           column + VECTOR * (lane_quad() + 4 * part), columns, r < rank);
#pragma unroll
      for (int step = 0; step < 2; step++) {
        RightOperand<P> b;
        set_word<P>(b, 0, f.word[2 * step]);
        set_word<P>(b, 1, f.word[2 * step + 1]);
        multiply_add<P>(sum[j], a[step], b);
      }
    }
  }
}

// From the first code in the tile to shares of the second code in it: WARPS / 2 slots.
template <int P, int RANK, bool ALIGNED>
DEVICE void through_hidden(Tile<P, RANK>& tile, const Ffn& a) {
  constexpr int SLAB = 8 * Format<P>::VECTOR;
  const int warp = threadIdx.x / 32, half = warp % 2, slot = warp / 2;
  float code[RANK / 8][4] = {};
  for (int column = slot * SLAB; column < a.hidden_features; column += WARPS / 2 * SLAB) {
    float hidden[Format<P>::VECTOR][4] = {};
    expand<P, RANK, ALIGNED>(hidden, tile, half, static_cast<const Element<P>*>(a.right_in), a.rank_in, column,
                             a.hidden_features);
    add_bias<P, ALIGNED>(hidden, static_cast<const Element<P>*>(a.bias_in), column, a.hidden_features);
    activate_all(a.activation, hidden);
    contract_slab<P, RANK, ALIGNED>(code, hidden, static_cast<const Element<P>*>(a.left_out), a.rank_out, column,
                                    a.hidden_features);
  }
  __syncthreads();  // the first code has been read
#pragma unroll
  for (int j = 0; j < RANK / 8; j++)
#pragma unroll
    for (int i = 0; i < 2; i++)
      *reinterpret_cast<float2*>(&tile.number[slot][16 * half + lane_row() + 8 * i][8 * j + 2 * lane_quad()]) =
          float2{code[j][2 * i], code[j][2 * i + 1]};
}

template <int P, int RANK, bool ALIGNED>
KERNEL LAUNCH_BOUNDS(THREADS, ALIGNED&& P == BF16 && RANK == 32 ? 2 : 1) ffn_kernel(Ffn a) {
  SHARED Tile<P, RANK> tile;
  const int64_t token = static_cast<int64_t>(blockIdx.x) * TOKENS;
  contract<P, RANK, ALIGNED>(tile, static_cast<const Element<P>*>(a.x), static_cast<const Element<P>*>(a.left_in),
                             token, a.num_tokens, a.in_features, a.rank_in);
  __syncthreads();
  finish_sums<P, RANK>(tile, token, a.num_tokens, a.rank_in, [&](int64_t t, int r, float sum) {
    from_float(static_cast<Element<P>*>(a.code_in)[t * a.rank_in + r], sum);
    return a.rank_activation == NO_ACTIVATION ? sum : activate(a.rank_activation, rounded<P>(sum));
  });
  __syncthreads();
  through_hidden<P, RANK, ALIGNED>(tile, a);
  __syncthreads();
  finish_sums<P, RANK, WARPS / 2>(tile, token, a.num_tokens, a.rank_out, [&](int64_t t, int r, float sum) {
    from_float(static_cast<Element<P>*>(a.code_out)[t * a.rank_out + r], sum);
    return a.rank_activation == NO_ACTIVATION ? sum : activate(a.rank_activation, rounded<P>(sum));
  });
  __syncthreads();
  expand_all<P, RANK, ALIGNED>(tile, static_cast<const Element<P>*>(a.right_out),
                               static_cast<const Element<P>*>(a.bias_out), static_cast<Element<P>*>(a.y), token,
                               a.num_tokens, a.rank_out, a.out_features);
}

struct LaunchFfn {
  const Ffn& arguments;
  void* stream;
  template <int P, int RANK, bool ALIGNED>
  int operator()() const {
    if constexpr (RANK > 64) return UNSUPPORTED_RANK;  // the tile has too few slots
    else return launch(ffn_kernel<P, RANK, ALIGNED>, num_token_tiles(arguments.num_tokens), THREADS, stream, arguments);
  }
};

}  // namespace

// x (T, I), left_in (R1, I), right_in (R1, H), bias_in (H) or null, left_out (R2, H), right_out (R2, O), bias_out (O)
// or null -> y (T, O), code_in (T, R1), code_out (T, R2), both before the rank activation. R1 and R2 up to 64.
extern "C" int hf_comera_low_rank_ffn(int precision, const void* x, const void* left_in, const void* right_in,
                                      const void* bias_in, const void* left_out, const void* right_out,
                                      const void* bias_out, void* y, void* code_in, void* code_out,
                                      int64_t num_tokens, int in_features, int hidden_features, int out_features,
                                      int rank_in, int rank_out, int activation, int rank_activation, void* stream) {
  if (const int status = check_sizes(precision, rank_in, activation, num_tokens, in_features, hidden_features))
    return status;
  if (const int status = check_sizes(precision, rank_out, rank_activation, num_tokens, hidden_features, out_features))
    return status;
  if (num_tokens == 0) return OK;
  const Ffn arguments{x,        left_in,    right_in,    bias_in,         left_out,     right_out, bias_out,
                      y,        code_in,    code_out,    num_tokens,      in_features,  hidden_features,
                      out_features, rank_in, rank_out, activation, rank_activation};
  const bool aligned = is_aligned(precision, in_features, out_features, {x, left_in, right_out, bias_out, y}) &&
                       is_aligned(precision, hidden_features, 0, {right_in, bias_in, left_out});
  return choose_kernel(precision, rank_in > rank_out ? rank_in : rank_out, aligned, LaunchFfn{arguments, stream});
}
