// The two products of a low-rank layer for a tile of TOKENS tokens: contract (wide -> rank) and expand (rank -> wide).
//
// Shapes: T = tokens, K = features that are summed, N = features that come out, R = rank, a multiple of 8.
#pragma once
#include <initializer_list>

#include "fragments.h"

constexpr int TOKENS = 32;  // of a block
constexpr int WARPS = 8;    // of a block
constexpr int THREADS = 32 * WARPS;

// A block's sums over K in shared memory. Warps share K in SLOTS ways and ranks in RANK / 32 ways.
template <int P, int RANK>
struct alignas(16) Tile {
  static constexpr int SLOTS = WARPS / (RANK / 32);
  static constexpr int STRIDE = RANK + Format<P>::PADDING;
  float number[SLOTS][TOKENS][STRIDE];
};

// Partial sums of `input (T, K) @ first (R, K)^T` for tokens from `token` on, one slot for each share of K.
template <int P, int RANK, bool ALIGNED>
DEVICE void contract(Tile<P, RANK>& tile, const Element<P>* input, const Element<P>* first, int64_t token,
                     int64_t num_tokens, int features, int rank) {
  constexpr int GROUP = 4 * Format<P>::VECTOR;
  const int warp = threadIdx.x / 32, row = lane_row(), quad = lane_quad();
  const int slot = warp % Tile<P, RANK>::SLOTS, rank_base = warp / Tile<P, RANK>::SLOTS * 32;
  // Beyond the last token and rank the last one is read again; finish_sums drops what comes of it.
  const Element<P>*x_row[4], *first_row[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int64_t t = token + 8 * i + row;
    const int r = rank_base + 8 * i + row;
    x_row[i] = input + (t < num_tokens ? t : num_tokens - 1) * features;
    first_row[i] = first + static_cast<int64_t>(r < rank ? r : rank - 1) * features;
  }
  float sum[2][4][4] = {};
#pragma unroll(ALIGNED&& P != FP32 ? 2 : 1)
  for (int k = slot * GROUP; k < features; k += Tile<P, RANK>::SLOTS * GROUP) {
    const int column = k + Format<P>::VECTOR * quad;
    Words x[2][2], f[4];
#pragma unroll
    for (int i = 0; i < 4; i++) x[i / 2][i % 2] = load_row<P, ALIGNED>(x_row[i], column, features, true);
#pragma unroll
    for (int j = 0; j < 4; j++) f[j] = load_row<P, ALIGNED>(first_row[j], column, features, true);
#pragma unroll
    for (int step = 0; step < 2; step++) {
      LeftOperand<P> a[2];
#pragma unroll
      for (int i = 0; i < 2; i++)
#pragma unroll
        for (int w = 0; w < 4; w++) set_word<P>(a[i], w, x[i][w % 2].word[2 * step + w / 2]);
#pragma unroll
      for (int j = 0; j < 4; j++) {
        RightOperand<P> b;
        set_word<P>(b, 0, f[j].word[2 * step]);
        set_word<P>(b, 1, f[j].word[2 * step + 1]);
#pragma unroll
        for (int i = 0; i < 2; i++) multiply_add<P>(sum[i][j], a[i], b);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 4; i++)
#pragma unroll
    for (int j = 0; j < 4; j++)
      *reinterpret_cast<float2*>(&tile.number[slot][8 * i + row][rank_base + 8 * j + 2 * quad]) =
          float2{sum[i / 2][j][i % 2 * 2], sum[i / 2][j][i % 2 * 2 + 1]};
}

// Adds the slots in their order and puts `middle(token, rank, sum)` in slot 0, zero outside the matrix.
template <int P, int RANK, class Middle>
DEVICE void finish_sums(Tile<P, RANK>& tile, int64_t token, int64_t num_tokens, int rank, const Middle& middle) {
  for (int i = threadIdx.x; i < TOKENS * RANK; i += THREADS) {
    const int t = i / RANK, r = i % RANK;
    float sum = 0.0f;
#pragma unroll
    for (int slot = 0; slot < Tile<P, RANK>::SLOTS; slot++) sum += tile.number[slot][t][r];
    tile.number[0][t][r] = token + t < num_tokens && r < rank ? middle(token + t, r, sum) : 0.0f;
  }
}

// 16 tokens (half 0 or 1 of the tile) of `slot 0 @ second (R, N)` for the slab of columns from `column` on.
template <int P, int RANK, bool ALIGNED>
DEVICE void expand(float (&sum)[Format<P>::VECTOR][4], const Tile<P, RANK>& tile, int half, const Element<P>* second,
                   int rank, int column, int columns) {
  const int row = lane_row(), quad = lane_quad();
#pragma unroll
  for (int k = 0; k < RANK; k += Format<P>::STEP) {
    StepRows<P> rows;
    rows.template read<ALIGNED>(second, k, rank, column + slab_column<P>(), columns);
    LeftOperand<P> a;
#pragma unroll
    for (int w = 0; w < 4; w++) {
      const float* tokens = tile.number[0][16 * half + row + w % 2 * 8];
      if constexpr (P == BF16) {
        const float2 pair = *reinterpret_cast<const float2*>(&tokens[k + 2 * quad + w / 2 * 8]);
        set_word<P>(a, w, pack_bf16(pair.x, pair.y));
      } else {
        set_word<P>(a, w, bits_of(tokens[k + quad + w / 2 * 4]));
      }
    }
#pragma unroll
    for (int c = 0; c < Format<P>::VECTOR; c++) {
      RightOperand<P> b;
      set_word<P>(b, 0, rows.word(c, 0));
      set_word<P>(b, 1, rows.word(c, 1));
      multiply_add<P>(sum[c], a, b);
    }
  }
}

// Adds a bias (or nothing, where it is null) to what `expand` left, in the lane's columns.
template <int P, bool ALIGNED, int COUNT>
DEVICE void add_bias(float (&sum)[COUNT][4], const Element<P>* bias, int column, int columns) {
  if (!bias) return;
#pragma unroll
  for (int part = 0; part < 2; part++) {
    const int first = column + COUNT * (lane_quad() + 4 * part);
    const Words words = load_row<P, ALIGNED, COUNT>(bias, first, columns, true);
#pragma unroll
    for (int c = 0; c < COUNT; c++) {
      const uint32_t word = words.word[P == BF16 ? c / 2 : c];
      const float value = float_of(P != BF16 || c % 2 ? (P == BF16 ? word & 0xffff0000u : word) : word << 16);
      sum[c][part] += value;
      sum[c][2 + part] += value;
    }
  }
}

// Writes what `expand` left to `output (T, N)`.
template <int P, bool ALIGNED>
DEVICE void write_slab(Element<P>* output, const float (&sum)[Format<P>::VECTOR][4], int64_t token,
                       int64_t num_tokens, int column, int columns) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int64_t t = token + lane_row() + i / 2 * 8;
    float value[Format<P>::VECTOR];
#pragma unroll
    for (int c = 0; c < Format<P>::VECTOR; c++) value[c] = sum[c][i];
    const int first = column + Format<P>::VECTOR * (lane_quad() + i % 2 * 4);
    if (t < num_tokens) store_row<P, ALIGNED>(output + t * columns, first, columns, value);
  }
}

// All columns of `slot 0 @ second (R, N) + bias`, shared out among the warps, to `output (T, N)`.
template <int P, int RANK, bool ALIGNED>
DEVICE void expand_all(const Tile<P, RANK>& tile, const Element<P>* second, const Element<P>* bias,
                       Element<P>* output, int64_t token, int64_t num_tokens, int rank, int columns) {
  constexpr int SLAB = 8 * Format<P>::VECTOR;
  const int warp = threadIdx.x / 32, half = warp % 2;
  for (int column = warp / 2 * SLAB; column < columns; column += WARPS / 2 * SLAB) {
    float sum[Format<P>::VECTOR][4] = {};
    expand<P, RANK, ALIGNED>(sum, tile, half, second, rank, column, columns);
    add_bias<P, ALIGNED>(sum, bias, column, columns);
    write_slab<P, ALIGNED>(output, sum, token + 16 * half, num_tokens, column, columns);
  }
}

// Calls `run.template operator()<P, RANK, ALIGNED>()` for the smallest tile that holds the rank.
template <int P, class Run>
int choose_rank(int rank, bool aligned, const Run& run) {
  if (rank <= 32) return aligned ? run.template operator()<P, 32, true>() : run.template operator()<P, 32, false>();
  if (rank <= 64) return aligned ? run.template operator()<P, 64, true>() : run.template operator()<P, 64, false>();
  return aligned ? run.template operator()<P, 128, true>() : run.template operator()<P, 128, false>();
}
template <class Run>
int choose_kernel(int precision, int rank, bool aligned, const Run& run) {
  switch (precision) {
    case BF16: return choose_rank<BF16>(rank, aligned, run);
    case TF32: return choose_rank<TF32>(rank, aligned, run);
    case FP32: return choose_rank<FP32>(rank, aligned, run);
    default: return UNSUPPORTED_PRECISION;
  }
}

// Whether rows of `a` and `b` numbers, and every pointer, start at multiples of 16 bytes.
inline bool is_aligned(int precision, int a, int b, std::initializer_list<const void*> pointers) {
  const int vector = precision == BF16 ? 8 : 4;
  bool aligned = a % vector == 0 && b % vector == 0;
  for (const void* pointer : pointers) aligned = aligned && reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
  return aligned;
}

inline int check_sizes(int precision, int rank, int64_t num_tokens, int a, int b) {
  if (precision < BF16 || precision > FP32) return UNSUPPORTED_PRECISION;
  if (rank < 8 || rank > 128 || rank % 8) return UNSUPPORTED_RANK;
  if (num_tokens < 0 || num_tokens > int64_t{1} << 35 || a < 0 || b < 0) return BAD_SIZE;
  return OK;
}

inline unsigned num_token_tiles(int64_t num_tokens) { return static_cast<unsigned>((num_tokens + TOKENS - 1) / TOKENS); }
