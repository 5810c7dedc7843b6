// Chains of tensor-train cores: the table that says where they lie, and products along them in float32.
//
// A side of a train is a chain of links from the outer end of the train, where the rank is 1, to its middle: the cores
// of a left side in their order, those of a right side backwards. Link k is (start rank, size, middle rank); what its
// elements are multiplied with, level k, is (start rank, extent), the extent being the product of the sizes before k.
// So left and right differ only in where an element lies, and in whether a new factor is the fastest or the slowest
// in the order of features. Gates are multiplied in where a core is read, and rounded as a core with folded gates is.
#pragma once
#include <cstring>

#include "fragments.h"

namespace chains {

constexpr int MAX_CORES = 8;  // of a side
constexpr int SPLITS = 8;     // blocks that share the last link of a side, which is most of the work
constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
constexpr int ROWS = 8;  // of a product that a warp does at once, with 32 or 64 columns
constexpr int ARGUMENT_WORDS = 500;  // arguments of a kernel are at most 4 KB

// The table has a row for each side, of 64-bit words throughout: a Side, its cores in the order of the train, padding.
struct Side {
  int64_t num_cores, is_left, features, padded_rank, left_rank;
  void* half;  // (padded rank, features), or its gradient
  float* scratch;
};
struct Core {
  const void* numbers;  // (left rank, size, right rank)
  const float* gate;    // (right rank), or null
  int64_t size, right_rank;
  void* gradient;       // of the same shapes; backward only
  float* gate_gradient;
};
constexpr int SIDE_WORDS = sizeof(Side) / sizeof(int64_t), CORE_WORDS = sizeof(Core) / sizeof(int64_t);

struct Table {
  int64_t words[ARGUMENT_WORDS];
  int row_words, halves_are_bf16;
};
static_assert(sizeof(Table) <= 4096, "arguments of a kernel");

template <class Number>
struct Link {
  const Number* numbers;
  const float* gate;
  int starts, size, middles;
  bool is_left;

  DEVICE int count() const { return starts * size * middles; }
  DEVICE int place(int start, int n, int middle) const {
    return is_left ? (start * size + n) * middles + middle : (middle * size + n) * starts + start;
  }
  // Where feature `n` of this link comes to lie among those of an extent before it.
  DEVICE int feature(int n, int before, int extent) const { return is_left ? before * size + n : n * extent + before; }
  DEVICE float operator()(int start, int n, int middle) const {
    const float number = to_float(numbers[place(start, n, middle)]);
    if (!gate) return number;
    return rounded<sizeof(Number) == 2 ? BF16 : FP32>(number * gate[is_left ? middle : start]);
  }
};

template <class Number>
struct Chain {
  const Side& side;
  const Core* cores;

  DEVICE explicit Chain(const Table& table)
      : side(*reinterpret_cast<const Side*>(table.words + blockIdx.x * table.row_words)),
        cores(reinterpret_cast<const Core*>(table.words + blockIdx.x * table.row_words + SIDE_WORDS)) {}
  DEVICE int length() const { return static_cast<int>(side.num_cores); }
  DEVICE const Core& core(int k) const { return cores[side.is_left ? k : length() - 1 - k]; }
  DEVICE Link<Number> link(int k) const {
    const Core& own = core(k);
    const int64_t left = &own == cores ? side.left_rank : (&own)[-1].right_rank, right = own.right_rank;
    return {static_cast<const Number*>(own.numbers),         own.gate,
            static_cast<int>(side.is_left ? left : right),   static_cast<int>(own.size),
            static_cast<int>(side.is_left ? right : left),   side.is_left != 0};
  }
  DEVICE int extent(int k) const {
    int product = 1;
    for (int i = 0; i < k; i++) product *= static_cast<int>(core(i).size);
    return product;
  }
  // Numbers of levels 0 to k - 1, one after the other.
  DEVICE int64_t levels(int k) const {
    int64_t sum = 0;
    for (int i = 0; i < k; i++) sum += static_cast<int64_t>(extent(i)) * link(i).starts;
    return sum;
  }
};

// What warps share: items `first`, `first + step`, ...
struct Share {
  int first, step;
  DEVICE static Share of_block() { return {static_cast<int>(threadIdx.x / 32), WARPS}; }
  DEVICE static Share of_splits() { return {static_cast<int>(blockIdx.y * WARPS + threadIdx.x / 32), SPLITS * WARPS}; }
};
struct Sizes {
  int rows, columns, outer, inner;
};

// Calls write(row, column, sum over o and i of left(row, o, i) right(o, i, column)). What is summed over i is added up
// over o, so that in long sums rounding errors grow less.
template <int COLUMNS, class Left, class Right, class Write>
DEVICE void multiply(const Sizes& sizes, const Share& share, const Left& left, const Right& right,
                     const Write& write) {
  const int lane = threadIdx.x % 32, column_blocks = (sizes.columns + 32 * COLUMNS - 1) / (32 * COLUMNS);
  const int items = (sizes.rows + ROWS - 1) / ROWS * column_blocks;
  for (int item = share.first; item < items; item += share.step) {
    const int row = item / column_blocks * ROWS, column = item % column_blocks * 32 * COLUMNS + lane;
    float sum[ROWS][COLUMNS] = {};
    for (int o = 0; o < sizes.outer; o++) {
      float part[ROWS][COLUMNS] = {};
#pragma unroll 2
      for (int i = 0; i < sizes.inner; i++) {
        float number[COLUMNS];
#pragma unroll
        for (int c = 0; c < COLUMNS; c++)
          number[c] = column + 32 * c < sizes.columns ? right(o, i, column + 32 * c) : 0.0f;
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
          const float factor = row + r < sizes.rows ? left(row + r, o, i) : 0.0f;
#pragma unroll
          for (int c = 0; c < COLUMNS; c++) part[r][c] += factor * number[c];
        }
      }
#pragma unroll
      for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) sum[r][c] += part[r][c];
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
      for (int c = 0; c < COLUMNS; c++)
        if (row + r < sizes.rows && column + 32 * c < sizes.columns) write(row + r, column + 32 * c, sum[r][c]);
  }
}

// Calls write(middle, feature, number) for the product of a link with the level (start, extent) before it.
template <class Number, class Write>
DEVICE void grow(const Link<Number>& link, const float* level, int extent, const Share& share, const Write& write) {
  multiply<2>(
      {link.middles * link.size, extent, 1, link.starts}, share,
      [&](int row, int, int start) { return link(start, row % link.size, row / link.size); },
      [&](int, int start, int before) { return level[start * extent + before]; },
      [&](int row, int before, float number) {
        write(row / link.size, link.feature(row % link.size, before, extent), number);
      });
}

// Writes levels 0 to `last`, one after the other, each block for itself; returns the last one, perhaps transposed.
template <class Number>
DEVICE const float* make_levels(const Chain<Number>& chain, int last, float* levels, bool transposed) {
  if (threadIdx.x == 0) levels[0] = 1.0f;
  __syncthreads();
  int extent = 1;
  for (int k = 0; k < last; k++) {
    const Link<Number> link = chain.link(k);
    float* next = levels + static_cast<int64_t>(extent) * link.starts;
    const int grown = extent * link.size;
    const bool turn = transposed && k + 1 == last;
    grow(link, levels, extent, Share::of_block(), [&](int middle, int feature, float number) {
      next[turn ? feature * link.middles + middle : middle * grown + feature] = number;
    });
    __syncthreads();
    levels = next;
    extent = grown;
  }
  return levels;
}

// Launches `kernel` for all rows of a table in host memory, as many at once as arguments have room for.
inline int launch_table(void (*kernel)(Table), const int64_t* rows, int num_sides, int row_words, int halves_are_bf16,
                        int blocks_a_side, void* stream) {
  if (num_sides < 0 || row_words < SIDE_WORDS || row_words > SIDE_WORDS + MAX_CORES * CORE_WORDS) return BAD_SIZE;
  Table table = {};
  table.row_words = row_words;
  table.halves_are_bf16 = halves_are_bf16;
  const int at_once = ARGUMENT_WORDS / row_words;
  for (int start = 0; start < num_sides; start += at_once) {
    const int count = num_sides - start < at_once ? num_sides - start : at_once;
    memcpy(table.words, rows + start * row_words, count * row_words * sizeof(int64_t));
    if (const int status = launch(kernel, dim3(count, blocks_a_side), THREADS, stream, table)) return status;
  }
  return OK;
}

}  // namespace chains
