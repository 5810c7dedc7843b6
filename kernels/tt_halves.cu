// Halves of many tensor trains in one launch: each side's cores are multiplied, in float32, to a (R, N) matrix.
//
// A side is left (cores (1, n, r), ..., (r, n, R), multiplied from the first on and written transposed) or right (cores
// (R, n, r), ..., (r, n, 1), multiplied from the last on). Rows from the true rank to R are zeros; features beyond N are
// cut off. A few blocks do one side: each repeats the short products and does its share of the last, which is most of it.
#include "fragments.h"

namespace {

constexpr int MAX_CORES = 8;
constexpr int SPLITS = 4;  // blocks of a side
constexpr int HALVES_THREADS = 256;
constexpr int HALVES_WARPS = HALVES_THREADS / 32;
constexpr int ROWS = 8;  // of the product that a warp does at once, with 32 * COLUMNS columns
constexpr int COLUMNS = 2;

struct Core {
  const void* numbers;
  int64_t left_rank, size, right_rank;
};

// One row of the table that the caller puts into device memory; 64-bit integers throughout.
struct Side {
  int64_t num_cores, is_left, features, padded_rank;
  void* half;
  Core core[MAX_CORES];
};

struct Halves {
  const Side* sides;
  float* scratch;  // two matrices for each block
  int64_t scratch_size;
  int cores_are_bf16, halves_are_bf16;
};

struct Matrix {
  const void* numbers;
  bool is_bf16;
  DEVICE float operator[](int64_t i) const {
    return is_bf16 ? to_float(static_cast<const uint16_t*>(numbers)[i]) : static_cast<const float*>(numbers)[i];
  }
};

// Calls write(row, column, number) for a (m, k) b (k, n); warps take items `first`, `first + step`, ...
template <class Write>
DEVICE void multiply(const Matrix& a, const Matrix& b, int m, int k, int n, int first, int step, const Write& write) {
  const int lane = threadIdx.x % 32, column_blocks = (n + 32 * COLUMNS - 1) / (32 * COLUMNS);
  const int items = (m + ROWS - 1) / ROWS * column_blocks;
  for (int item = first; item < items; item += step) {
    const int row = item / column_blocks * ROWS, column = item % column_blocks * 32 * COLUMNS + lane;
    float sum[ROWS][COLUMNS] = {};
#pragma unroll 2
    for (int i = 0; i < k; i++) {
      float number[COLUMNS];
#pragma unroll
      for (int c = 0; c < COLUMNS; c++)
        number[c] = column + 32 * c < n ? b[static_cast<int64_t>(i) * n + column + 32 * c] : 0.0f;
#pragma unroll
      for (int r = 0; r < ROWS; r++) {
        const float factor = row + r < m ? a[static_cast<int64_t>(row + r) * k + i] : 0.0f;
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) sum[r][c] += factor * number[c];
      }
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
      for (int c = 0; c < COLUMNS; c++)
        if (row + r < m && column + 32 * c < n) write(row + r, column + 32 * c, sum[r][c]);
  }
}

struct Output {
  const Side& side;
  bool is_bf16;
  int64_t true_rank;
  DEVICE void write(int64_t rank, int64_t feature, float number) const {
    if (feature >= side.features) return;
    const int64_t i = rank * side.features + feature;
    if (is_bf16) from_float(static_cast<uint16_t*>(side.half)[i], number);
    else static_cast<float*>(side.half)[i] = number;
  }
  // Number `column` of row `row` of the last product: (..., n R) of a left side, (R n, ...) of a right one.
  DEVICE void write_product(int64_t row, int64_t column, int64_t num_columns, float number) const {
    if (side.is_left) {
      write(column % true_rank, row * (num_columns / true_rank) + column / true_rank, number);
    } else {
      const int64_t size = side.core[0].size;
      write(row / size, row % size * num_columns + column, number);
    }
  }
};

KERNEL LAUNCH_BOUNDS(HALVES_THREADS, 2) halves_kernel(Halves a) {
  const Side& side = a.sides[blockIdx.x];
  const int last = static_cast<int>(side.num_cores) - 1, warp = threadIdx.x / 32, split = blockIdx.y;
  const int64_t thread = split * HALVES_THREADS + threadIdx.x, num_threads = SPLITS * HALVES_THREADS;
  const Output output{side, a.halves_are_bf16 != 0, side.is_left ? side.core[last].right_rank : side.core[0].left_rank};
  for (int64_t i = thread; i < (side.padded_rank - output.true_rank) * side.features; i += num_threads)
    output.write(output.true_rank + i / side.features, i % side.features, 0.0f);

  // `running` is the product so far: (rows, r) of a left side, (r, columns) of a right one.
  const Core& start = side.core[side.is_left ? 0 : last];
  Matrix running{start.numbers, a.cores_are_bf16 != 0};
  int64_t extent = start.size;
  if (last == 0) {
    for (int64_t i = thread; i < output.true_rank * extent; i += num_threads) {
      if (side.is_left) output.write(i % output.true_rank, i / output.true_rank, running[i]);
      else output.write(i / extent, i % extent, running[i]);
    }
    return;
  }
  float* scratch = a.scratch + (static_cast<int64_t>(blockIdx.x) * SPLITS + split) * 2 * a.scratch_size;
  for (int step = 1; step <= last; step++) {
    const Core& core = side.core[side.is_left ? step : last - step];
    const Matrix matrix{core.numbers, a.cores_are_bf16 != 0};
    const int64_t m = side.is_left ? extent : core.left_rank * core.size;
    const int64_t k = side.is_left ? core.left_rank : core.right_rank;
    const int64_t n = side.is_left ? core.size * core.right_rank : extent;
    const Matrix first = side.is_left ? running : matrix, second = side.is_left ? matrix : running;
    if (step == last) {
      multiply(first, second, m, k, n, split * HALVES_WARPS + warp, SPLITS * HALVES_WARPS,
               [&](int row, int column, float number) { output.write_product(row, column, n, number); });
    } else {
      multiply(first, second, m, k, n, warp, HALVES_WARPS,
               [&](int row, int column, float number) { scratch[row * n + column] = number; });
      __syncthreads();
      running = Matrix{scratch, false};
      scratch += step % 2 ? a.scratch_size : -a.scratch_size;
    }
    extent *= core.size;
  }
}

}  // namespace

// How many 64-bit integers a row of the table has, and how many blocks do one side.
extern "C" int hf_comera_tt_halves_row() { return sizeof(Side) / sizeof(int64_t); }
extern "C" int hf_comera_tt_halves_splits() { return SPLITS; }

// sides: `num_sides` rows in device memory: number of cores (1 to 8), whether left, N, R, pointer of the half (R, N),
// then for each core pointer, left rank, size, right rank. scratch: num_sides * splits * 2 * scratch_size floats.
extern "C" int hf_comera_tt_halves(const void* sides, int num_sides, float* scratch, int64_t scratch_size,
                                   int cores_are_bf16, int halves_are_bf16, void* stream) {
  if (num_sides < 0) return BAD_SIZE;
  if (num_sides == 0) return OK;
  const Halves arguments{static_cast<const Side*>(sides), scratch, scratch_size, cores_are_bf16, halves_are_bf16};
  return launch(halves_kernel, dim3(num_sides, SPLITS), HALVES_THREADS, stream, arguments);
}
