// Rows of an embedding in tensor-train form from its two half tables, and the gradients of the tables.
//
// row(id) = left[id / B] (H, R) @ right[id % B] (R, K), flattened and cut to E columns; all sums in float32. Forward
// makes every row anew, since the tables stay in cache. Backward takes the ids in sorted order and sums twice: gradient
// rows of the same id, then products of the distinct ids that use the same row of a table. Both lists are cut into
// pieces of a fixed length, a block each, so that an id or a table row that is everywhere is the work of many blocks; a
// second launch adds up what lies in several pieces. Sizes depend on shapes only, and not on the vocabulary; there are
// no atomics, and the bits are the same each time.
#include "fragments.h"

namespace {

constexpr int LOOKUP_THREADS = 128;
constexpr int PLACES = 32;      // of the sorted ids, in a piece
constexpr int ENTRIES = 8;      // of the distinct ids, in a piece
constexpr int READS = 8;        // of a thread, on their way at once
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

struct GradRows {
  const void* grad;                    // (T, E)
  const int64_t *order, *sorted_ids;   // token of each place in sorted order, and its id
  float* grad_rows;                    // (T, E): for each distinct id the sum, at its first place
  int64_t num_tokens, limit;           // ids from `limit` on get no gradient; they come last
  int columns;
};

// Sums each run of an id within a piece, in the order of the places, and writes it at the run's first place.
template <class Element>
KERNEL LAUNCH_BOUNDS(LOOKUP_THREADS, 8) run_sums_kernel(GradRows a) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * PLACES;
  const int64_t end = first + PLACES < a.num_tokens ? first + PLACES : a.num_tokens;
  const int column = blockIdx.y * LOOKUP_THREADS + threadIdx.x;
  if (column >= a.columns || a.sorted_ids[first] >= a.limit) return;
  int64_t begin = first, id = a.sorted_ids[first];
  float sum = 0.0f;
  for (int64_t group = first; group < end; group += READS) {
    int64_t ids[READS];
    float numbers[READS];
#pragma unroll
    for (int i = 0; i < READS; i++) {
      const int64_t place = group + i < end ? group + i : end - 1;  // read again and left out, instead of a branch
      ids[i] = group + i < end ? a.sorted_ids[place] : a.limit;
      numbers[i] = to_float(static_cast<const Element*>(a.grad)[a.order[place] * a.columns + column]);
    }
#pragma unroll
    for (int i = 0; i < READS; i++) {
      if (ids[i] != id) {
        if (id < a.limit) a.grad_rows[begin * a.columns + column] = sum;
        begin = group + i, id = ids[i], sum = 0.0f;
      }
      sum += numbers[i];
    }
  }
  if (id < a.limit) a.grad_rows[begin * a.columns + column] = sum;
}

// Adds up the sums of an id whose run goes on after the piece it begins in; blocks are the pieces but the last.
KERNEL LAUNCH_BOUNDS(LOOKUP_THREADS, 8) long_runs_kernel(GradRows a) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * PLACES, next = first + PLACES, id = a.sorted_ids[next - 1];
  const int column = blockIdx.y * LOOKUP_THREADS + threadIdx.x;
  if (column >= a.columns || id >= a.limit || a.sorted_ids[next] != id) return;
  int64_t begin = first;
  if (a.sorted_ids[first] != id)
    for (begin = next - 1; a.sorted_ids[begin - 1] == id;) begin--;
  else if (first > 0 && a.sorted_ids[first - 1] == id) return;  // began in a piece before
  float sum = a.grad_rows[begin * a.columns + column];
  bool goes_on = true;
  for (int64_t group = next; goes_on; group += READS * PLACES) {
    float numbers[READS];
#pragma unroll
    for (int i = 0; i < READS; i++) {
      const int64_t place = group + i * PLACES;
      goes_on = place < a.num_tokens && a.sorted_ids[place < a.num_tokens ? place : 0] == id;
      numbers[i] = a.grad_rows[(goes_on ? place : begin) * a.columns + column];
      if (!goes_on) numbers[i] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < READS; i++) sum += numbers[i];
  }
  a.grad_rows[begin * a.columns + column] = sum;
}

// Of one table. An entry is a distinct id, as its key: row of this table * rows of the other table + row of the other.
struct TableGradient {
  const float* grad_rows;          // (T, E)
  const int64_t *keys, *places;    // of the entries, in the order of their keys: the key, and where its gradient row is
  const int64_t* bounds;           // (rows + 1): first entry of each row of the table
  const float* other;              // the other table: right as (B, K, R4), left as (A, H, R4)
  float *partials, *result;        // (rows + pieces, numbers), (rows, numbers): numbers are (H4, R4) or (R4, K)
  int64_t num_entries, num_rows, num_others;  // entries with keys from rows * others on are none
  int h, h4, r4, k, columns;
};

// Puts a gradient row into shared memory, as (H, K) for the right table or (K, H4) for the left one.
template <bool LEFT>
DEVICE void read_grad_row(float* shared, const TableGradient& a, int64_t place) {
  for (int i = threadIdx.x; i < a.h4 * a.k; i += LOOKUP_THREADS) {
    const int h = LEFT ? i % a.h4 : i / a.k, k = LEFT ? i / a.h4 : i % a.k;
    const int column = h * a.k + k;
    shared[i] = h < a.h && column < a.columns ? a.grad_rows[place * a.columns + column] : 0.0f;
  }
}

// Numbers of a row of the gradient, and the width of one of its lines.
template <bool LEFT>
DEVICE int num_numbers(const TableGradient& a) {
  return LEFT ? a.h4 * a.r4 : a.r4 * a.k;
}
template <bool LEFT>
DEVICE int width_of(const TableGradient& a) {
  return LEFT ? a.r4 : a.k;
}

template <bool LEFT>
DEVICE void write_partial(const TableGradient& a, int64_t index, int first_item, Four (&sum)[PRODUCTS]) {
  const int numbers = num_numbers<LEFT>(a), width = width_of<LEFT>(a);
#pragma unroll
  for (int j = 0; j < PRODUCTS; j++) {
    const int item = first_item + j * LOOKUP_THREADS;
    if (item < numbers / 4)
      for (int i = 0; i < 4; i++)
        a.partials[index * numbers + (item / width * 4 + i) * width + item % width] = sum[j].number[i];
    sum[j] = {};
  }
}

// Axis x is the piece, axis y a part of a row's numbers. Each run of entries of a table row within the piece gives a
// partial sum, at row + piece: along the list either grows from run to run, so no two runs share a place.
// Left: dleft (H4, R4) = sum over ids of grad^T (K, H4)^T right (K, R4); right: dright (R4, K) = left (H, R4)^T grad.
template <bool LEFT>
KERNEL LAUNCH_BOUNDS(LOOKUP_THREADS, 4) table_kernel(TableGradient a) {
  alignas(16) SHARED float grad_row[MAX_ROW];
  const int64_t piece = blockIdx.x, limit = a.num_rows * a.num_others;
  const int first_item = blockIdx.y * PRODUCTS * LOOKUP_THREADS + threadIdx.x;
  const int width = width_of<LEFT>(a), items = num_numbers<LEFT>(a) / 4, depth = LEFT ? a.k : a.h;
  int64_t row = -1;
  Four sum[PRODUCTS] = {};
  for (int64_t entry = piece * ENTRIES; entry < (piece + 1) * ENTRIES && entry < a.num_entries; entry++) {
    const int64_t key = a.keys[entry];
    if (key >= limit) break;
    if (key / a.num_others != row) {
      if (row >= 0) write_partial<LEFT>(a, row + piece, first_item, sum);
      row = key / a.num_others;
    }
    __syncthreads();
    read_grad_row<LEFT>(grad_row, a, a.places[entry]);
    __syncthreads();
    const float* table = a.other + key % a.num_others * depth * a.r4;
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
  if (row >= 0) write_partial<LEFT>(a, row + piece, first_item, sum);
}

// Axis x is the row of the table, axis y a part of its numbers; rows that no id uses get zeros.
template <bool LEFT>
KERNEL LAUNCH_BOUNDS(LOOKUP_THREADS, 8) table_sum_kernel(TableGradient a) {
  const int64_t row = blockIdx.x, begin = a.bounds[row], end = a.bounds[row + 1];
  const int number = blockIdx.y * LOOKUP_THREADS + threadIdx.x, numbers = num_numbers<LEFT>(a);
  if (number >= numbers) return;
  float sum = 0.0f;
  const int64_t pieces_end = begin < end ? (end - 1) / ENTRIES + 1 : 0;
#pragma unroll 8
  for (int64_t piece = begin / ENTRIES; piece < pieces_end; piece++) sum += a.partials[(row + piece) * numbers + number];
  a.result[row * numbers + number] = sum;
}

unsigned pieces(int64_t size, int length) { return static_cast<unsigned>((size + length - 1) / length); }

template <bool LEFT>
int launch_table(const TableGradient& a, void* stream) {
  const int numbers = LEFT ? a.h4 * a.r4 : a.r4 * a.k;
  if (a.num_entries) {
    const dim3 grid(pieces(a.num_entries, ENTRIES), pieces(numbers / 4, PRODUCTS * LOOKUP_THREADS));
    if (const int status = launch(table_kernel<LEFT>, grid, LOOKUP_THREADS, stream, a)) return status;
  }
  const dim3 grid(static_cast<unsigned>(a.num_rows), pieces(numbers, LOOKUP_THREADS));
  return launch(table_sum_kernel<LEFT>, grid, LOOKUP_THREADS, stream, a);
}

}  // namespace

// How many distinct ids make a piece, each of which adds a row to the partial sums.
extern "C" int hf_comera_ttm_entries() { return ENTRIES; }

// ids (T), left (A, R4, H4), right (B, R4, K) -> rows (T, E). H4 and R4: H and R with zeros up to a multiple of 4.
extern "C" int hf_comera_ttm_rows(const int64_t* ids, const float* left, const float* right, void* rows,
                                  int64_t num_tokens, int64_t num_embeddings, int h, int r4, int k, int num_right,
                                  int columns, int rows_are_bf16, void* stream) {
  if (num_tokens == 0) return OK;
  const Lookup arguments{ids, left, right, rows, num_embeddings, h, (h + 3) / 4 * 4, r4, k, num_right, columns,
                         rows_are_bf16};
  return launch(rows_kernel, dim3(static_cast<unsigned>(num_tokens)), LOOKUP_THREADS, stream, arguments);
}

// grad (T, E), order, sorted_ids (T) -> grad_rows (T, E), written at the first place of each id below `limit` (and
// where pieces begin).
extern "C" int hf_comera_ttm_grad_rows(const void* grad, const int64_t* order, const int64_t* sorted_ids,
                                       float* grad_rows, int64_t num_tokens, int64_t limit, int columns,
                                       int grad_is_bf16, void* stream) {
  if (num_tokens == 0) return OK;
  const GradRows a{grad, order, sorted_ids, grad_rows, num_tokens, limit, columns};
  const dim3 grid(pieces(num_tokens, PLACES), pieces(columns, LOOKUP_THREADS));
  const auto run_sums = grad_is_bf16 ? run_sums_kernel<uint16_t> : run_sums_kernel<float>;
  if (const int status = launch(run_sums, grid, LOOKUP_THREADS, stream, a)) return status;
  return grid.x == 1 ? OK : launch(long_runs_kernel, dim3(grid.x - 1, grid.y), LOOKUP_THREADS, stream, a);
}

// grad_rows (T, E), keys, places (N), bounds (rows + 1), the other table -> result (rows, H4, R4) for the left table,
// (rows, R4, K) for the right one. Scratch: partials, as large for rows + N / entries (rounded up) rows.
extern "C" int hf_comera_ttm_table_gradient(int is_left, const float* grad_rows, const int64_t* keys,
                                            const int64_t* places, const int64_t* bounds, const float* other,
                                            float* partials, float* result, int64_t num_entries, int64_t num_rows,
                                            int64_t num_others, int h, int r4, int k, int columns, void* stream) {
  const TableGradient a{grad_rows, keys, places, bounds, other, partials, result, num_entries, num_rows, num_others,
                        h, (h + 3) / 4 * 4, r4, k, columns};
  if (a.h4 * k > MAX_ROW) return BAD_SIZE;
  return is_left ? launch_table<true>(a, stream) : launch_table<false>(a, stream);
}
