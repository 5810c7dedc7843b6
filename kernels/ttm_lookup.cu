// Rows of an embedding in tensor-train form from its two half tables, and the gradients of the tables.
//
// row(id) = left[id / B] (H, R) @ right[id % B] (R, K), flattened and cut to E columns; all sums in float32. Forward
// makes every row anew, since the tables stay in cache. Backward takes the ids in sorted order: 1. one gradient row for
// each distinct id, 2. for each row of a table the products with all distinct ids that use it, in shares. Sizes depend
// on shapes only, there are no atomics, and the bits are the same each time.
#include "fragments.h"

namespace {

constexpr int LOOKUP_THREADS = 128;
constexpr int SHARES = 8;       // blocks that share the ids of one row of a table
constexpr int PRODUCTS = 4;     // of a thread, each for 4 numbers
constexpr int MAX_ROW = 8192;   // numbers of an embedding row in shared memory, with its padding

struct Lookup {
  const int64_t* ids;
  const float *left, *right;  // (A, R, H4) and (B, R, K)
  void* rows;                 // (T, E)
  int64_t num_embeddings;
  int h, h4, r4, k, num_right, columns, rows_are_bf16;
};

struct Four {
  float number[4];
};

DEVICE void add_outer(Four& sum, const float* four, float one) {
  const float4 v = *reinterpret_cast<const float4*>(four);  // in global or shared memory
  sum.number[0] += v.x * one;
  sum.number[1] += v.y * one;
  sum.number[2] += v.z * one;
  sum.number[3] += v.w * one;
}

KERNEL LAUNCH_BOUNDS(LOOKUP_THREADS, 8) rows_kernel(Lookup a) {
  const int64_t token = blockIdx.x, id = a.ids[token];
  const bool inside = id >= 0 && id < a.num_embeddings;
  const float* left = a.left + (inside ? id / a.num_right : 0) * a.r4 * a.h4;
  const float* right = a.right + (inside ? id % a.num_right : 0) * a.r4 * a.k;
  for (int item = threadIdx.x; item < a.h4 / 4 * a.k; item += LOOKUP_THREADS) {
    const int h = item / a.k * 4, k = item % a.k;
    Four sum = {};
#pragma unroll 4
    for (int r = 0; r < a.r4; r++) add_outer(sum, left + r * a.h4 + h, right[r * a.k + k]);
    for (int i = 0; i < 4; i++) {
      const int column = (h + i) * a.k + k;
      if (column >= a.columns || h + i >= a.h) continue;
      const float number = inside ? sum.number[i] : NAN;  // an id outside the table shows, as it must
      const int64_t place = token * a.columns + column;
      if (a.rows_are_bf16) from_float(static_cast<uint16_t*>(a.rows)[place], number);
      else static_cast<float*>(a.rows)[place] = number;
    }
  }
}

struct Gradients {
  const void* grad;                            // (T, E)
  const int64_t *order, *sorted_ids, *starts;  // token of each place in sorted order, its id, first place of each id
  float* grad_rows;                            // (T, E): for each distinct id the sum, at its first place
  const float *left, *right;                   // (A, H, R4) and (B, K, R4)
  float *left_shares, *right_shares;           // (SHARES, A, H4, R4) and (SHARES, B, R4, K)
  int64_t num_tokens, num_embeddings, padding_id;
  int h, h4, r4, k, num_left, num_right, columns, grad_is_bf16;
};

// Blocks are places in sorted order; the first place of an id sums all its rows, in the order of the tokens.
KERNEL LAUNCH_BOUNDS(LOOKUP_THREADS, 8) grad_rows_kernel(Gradients a) {
  const int64_t place = blockIdx.x, id = a.sorted_ids[place];
  if (place > 0 && a.sorted_ids[place - 1] == id) return;
  if (id < 0 || id >= a.num_embeddings || id == a.padding_id) return;
  const int64_t end = a.starts[id + 1];
  for (int column = threadIdx.x; column < a.columns; column += LOOKUP_THREADS) {
    float sum = 0.0f;
#pragma unroll 4
    for (int64_t i = place; i < end; i++) {
      const int64_t number = a.order[i] * a.columns + column;
      sum += a.grad_is_bf16 ? to_float(static_cast<const uint16_t*>(a.grad)[number])
                            : static_cast<const float*>(a.grad)[number];
    }
    a.grad_rows[place * a.columns + column] = sum;
  }
}

// Puts a gradient row into shared memory, as (H, K) for the right table or (K, H4) for the left one.
template <bool LEFT>
DEVICE void read_grad_row(float* shared, const Gradients& a, int64_t place) {
  for (int i = threadIdx.x; i < a.h4 * a.k; i += LOOKUP_THREADS) {
    const int h = LEFT ? i % a.h4 : i / a.k, k = LEFT ? i / a.h4 : i % a.k;
    const int column = h * a.k + k;
    shared[i] = h < a.h && column < a.columns ? a.grad_rows[place * a.columns + column] : 0.0f;
  }
}

// Axis x is the row of the table, axis y the share of the ids that use it, axis z a part of the row's numbers.
// Left: dleft (H4, R4) = sum over ids of grad^T (K, H4)^T right (K, R4); right: dright (R4, K) = left (H, R4)^T grad.
template <bool LEFT>
KERNEL LAUNCH_BOUNDS(LOOKUP_THREADS, 4) table_kernel(Gradients a) {
  alignas(16) SHARED float grad_row[MAX_ROW];
  const int row = blockIdx.x, share = blockIdx.y, first_item = blockIdx.z * PRODUCTS * LOOKUP_THREADS + threadIdx.x;
  const int num_others = LEFT ? a.num_right : a.num_left, others = (num_others + SHARES - 1) / SHARES;
  const int width = LEFT ? a.r4 : a.k, items = (LEFT ? a.h4 : a.r4) / 4 * width, depth = LEFT ? a.k : a.h;
  Four sum[PRODUCTS] = {};
  for (int other = share * others; other < num_others && other < (share + 1) * others; other++) {
    const int64_t id = LEFT ? static_cast<int64_t>(row) * a.num_right + other
                            : static_cast<int64_t>(other) * a.num_right + row;
    if (id >= a.num_embeddings || id == a.padding_id || a.starts[id] == a.starts[id + 1]) continue;
    __syncthreads();
    read_grad_row<LEFT>(grad_row, a, a.starts[id]);
    __syncthreads();
    const float* table = LEFT ? a.right + static_cast<int64_t>(other) * a.k * a.r4
                              : a.left + static_cast<int64_t>(other) * a.h * a.r4;
#pragma unroll
    for (int j = 0; j < PRODUCTS; j++) {
      const int item = first_item + j * LOOKUP_THREADS;
      if (item >= items) continue;
      const int four = item / width * 4, one = item % width;
      for (int s = 0; s < depth; s++) {
        if (LEFT) add_outer(sum[j], grad_row + s * a.h4 + four, table[s * a.r4 + one]);
        else add_outer(sum[j], table + s * a.r4 + four, grad_row[s * a.k + one]);
      }
    }
  }
  const int64_t size = static_cast<int64_t>(items) * 4, rows = LEFT ? a.num_left : a.num_right;
  float* result = (LEFT ? a.left_shares : a.right_shares) + (share * rows + row) * size;
#pragma unroll
  for (int j = 0; j < PRODUCTS; j++) {
    const int item = first_item + j * LOOKUP_THREADS;
    if (item >= items) continue;
    for (int i = 0; i < 4; i++) result[(item / width * 4 + i) * width + item % width] = sum[j].number[i];
  }
}

template <bool LEFT>
int launch_table(const Gradients& a, void* stream) {
  const int items = LEFT ? a.h4 / 4 * a.r4 : a.r4 / 4 * a.k, per_block = PRODUCTS * LOOKUP_THREADS;
  const dim3 grid(LEFT ? a.num_left : a.num_right, SHARES, (items + per_block - 1) / per_block);
  return launch(table_kernel<LEFT>, grid, LOOKUP_THREADS, stream, a);
}

}  // namespace

// How many shares the gradients of a table come in.
extern "C" int hf_comera_ttm_shares() { return SHARES; }

// ids (T), left (A, R4, H4), right (B, R4, K) -> rows (T, E). H4 and R4: H and R with zeros up to a multiple of 4.
extern "C" int hf_comera_ttm_rows(const int64_t* ids, const float* left, const float* right, void* rows,
                                  int64_t num_tokens, int64_t num_embeddings, int h, int r4, int k, int num_right,
                                  int columns, int rows_are_bf16, void* stream) {
  if (num_tokens == 0) return OK;
  const Lookup arguments{ids, left, right, rows, num_embeddings, h, (h + 3) / 4 * 4, r4, k, num_right, columns,
                         rows_are_bf16};
  return launch(rows_kernel, dim3(static_cast<unsigned>(num_tokens)), LOOKUP_THREADS, stream, arguments);
}

// grad (T, E), order, sorted_ids (T), starts (V + 1), left (A, H, R4), right (B, K, R4) -> left_shares (shares, A, H4,
// R4), right_shares (shares, B, R4, K), to be added up. Scratch: grad_rows (T, E).
extern "C" int hf_comera_ttm_gradients(const void* grad, const int64_t* order, const int64_t* sorted_ids,
                                       const int64_t* starts, float* grad_rows, const float* left, const float* right,
                                       float* left_shares, float* right_shares, int64_t num_tokens,
                                       int64_t num_embeddings, int64_t padding_id, int h, int r4, int k, int num_left,
                                       int num_right, int columns, int grad_is_bf16, void* stream) {
  const Gradients a{grad, order, sorted_ids, starts, grad_rows, left, right, left_shares, right_shares, num_tokens,
                    num_embeddings, padding_id, h, (h + 3) / 4 * 4, r4, k, num_left, num_right, columns, grad_is_bf16};
  if (a.h4 * k > MAX_ROW) return BAD_SIZE;
  if (num_tokens)
    if (const int status = launch(grad_rows_kernel, dim3(static_cast<unsigned>(num_tokens)), LOOKUP_THREADS, stream, a))
      return status;
  if (const int status = launch_table<true>(a, stream)) return status;
  return launch_table<false>(a, stream);
}
