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
constexpr int ROWS = 8;       // of a product that a warp does at once, with 32 or 64 columns
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
  // How far apart neighbours of an axis lie in the core, and among the features that this link and those before make.
  DEVICE int start_step() const { return is_left ? size * middles : 1; }
  DEVICE int n_step() const { return is_left ? middles : starts; }
  DEVICE int middle_step() const { return is_left ? 1 : size * starts; }
  DEVICE int feature_of_n(int extent) const { return is_left ? 1 : extent; }
  DEVICE int feature_of_before() const { return is_left ? size : 1; }
  DEVICE int place(int start, int n, int middle) const {
    return start * start_step() + n * n_step() + middle * middle_step();
  }
  // The number at a place, as a core with folded gates holds it; `gate_place` is that of its gate.
  template <bool GATED>
  DEVICE float read(int place, int gate_place) const {
    const float number = to_float(numbers[place]);
    return GATED ? rounded<sizeof(Number) == 2 ? BF16 : FP32>(number * gate[gate_place]) : number;
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
// Of a product; the summed axis is `outer` times `inner` long, and `missing` shorter in the end.
struct Sizes {
  int rows, columns, outer, inner, missing;
};

// Calls write(row, column, number) for a product. left(row) and right(column) are made once, and read their numbers by
// (o, i) then: no division, no condition and no branch is between one load and the next. Beyond the last row or column
// the last one is read once more. What is summed over i is added up over o, so that in long sums errors grow less.
template <int COLUMNS, class Left, class Right, class Write>
DEVICE void multiply(const Sizes& sizes, const Share& share, const Left& left, const Right& right,
                     const Write& write) {
  const int lane = threadIdx.x % 32, column_blocks = (sizes.columns + 32 * COLUMNS - 1) / (32 * COLUMNS);
  const int items = (sizes.rows + ROWS - 1) / ROWS * column_blocks;
  for (int item = share.first; item < items; item += share.step) {
    const int row = item / column_blocks * ROWS, column = item % column_blocks * 32 * COLUMNS + lane;
    const auto at_row = [&](int r) { return left(row + r < sizes.rows ? row + r : sizes.rows - 1); };
    const auto at_column = [&](int c) { return right(c < sizes.columns ? c : sizes.columns - 1); };
    const decltype(left(0)) rows[ROWS] = {at_row(0), at_row(1), at_row(2), at_row(3),
                                          at_row(4), at_row(5), at_row(6), at_row(7)};
    const decltype(right(0)) columns[2] = {at_column(column), at_column(column + 32 * (COLUMNS - 1))};
    float sum[ROWS][COLUMNS] = {};
    for (int o = 0; o < sizes.outer; o++) {
      const int inner = sizes.inner - (o + 1 == sizes.outer ? sizes.missing : 0);
      float part[ROWS][COLUMNS] = {};
#pragma unroll 2
      for (int i = 0; i < inner; i++) {
        float number[COLUMNS];
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) number[c] = columns[c](o, i);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
          const float factor = rows[r](o, i);
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
template <bool GATED, class Number, class Write>
DEVICE void grow(const Link<Number>& link, const float* level, int extent, const Share& share, const Write& write) {
  const int step = link.start_step(), gate_step = link.is_left ? 0 : 1;
  multiply<2>(
      {link.middles * link.size, extent, 1, link.starts, 0}, share,
      [&](int row) {
        const int middle = row / link.size, place = link.place(0, row % link.size, middle);
        const int gate = link.is_left ? middle : 0;
        return [=](int, int start) {
          return link.template read<GATED>(place + start * step, gate + start * gate_step);
        };
      },
      [&](int before) { return [=](int, int start) { return level[start * extent + before]; }; },
      [&](int row, int before, float number) {
        const int n = row % link.size * link.feature_of_n(extent);
        write(row / link.size, n + before * link.feature_of_before(), number);
      });
}
template <class Number, class Write>
DEVICE void grow(const Link<Number>& link, const float* level, int extent, const Share& share, const Write& write) {
  if (link.gate) grow<true>(link, level, extent, share, write);
  else grow<false>(link, level, extent, share, write);
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
