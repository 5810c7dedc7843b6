// Number formats and how a warp holds pieces of matrices for mma.sync.
//
// A warp is 8 rows ("row" = lane / 4) of 4 lanes ("quad" = lane % 4). mma.sync wants each lane to hold a few scattered
// numbers. No order of the summed axis, and no order of output columns, changes a product as long as both sides use
// the same one, so we choose orders in which every lane reads and writes 16 neighbouring bytes:
// - summed axis contiguous in memory: lane holds numbers VECTOR * quad ... of a group of 4 * VECTOR; its 4 words serve
//   two mma steps, words 0 and 1 the first, 2 and 3 the second;
// - columns contiguous in memory: lane reads VECTOR columns of a slab of 8 * VECTOR, column c of them belongs to mma
//   number c; a lane's results are then columns VECTOR * quad ... and VECTOR * (quad + 4) ... of the slab.
#pragma once
#include "portable.h"

enum Precision { BF16 = 0, TF32 = 1, FP32 = 2 };

// Errors of the C functions; positive ones are CUDA's.
enum Status { OK = 0, UNSUPPORTED_RANK = -1, UNSUPPORTED_PRECISION = -2, UNSUPPORTED_ACTIVATION = -3, BAD_SIZE = -4 };

template <int P>
struct Format {  // TF32, and FP32 as three products of tf32 parts: a b = hi hi + hi lo + lo hi, up to 2^-22
  using Element = float;
  static constexpr int VECTOR = 4;  // numbers in 16 bytes
  static constexpr int STEP = 8;    // numbers of the summed axis in an mma
  static constexpr int PARTS = P == FP32 ? 2 : 1;
  static constexpr int PADDING = 4;  // floats after a row of a tile in shared memory, against bank conflicts
};
template <>
struct Format<BF16> {
  using Element = uint16_t;
  static constexpr int VECTOR = 8;
  static constexpr int STEP = 16;
  static constexpr int PARTS = 1;
  static constexpr int PADDING = 8;
};
template <int P>
using Element = typename Format<P>::Element;

struct Words {
  uint32_t word[4];
};
template <int P>
struct LeftOperand {  // (16 rows, STEP): row and row + 8, first and second half of the step
  uint32_t word[Format<P>::PARTS][4];
};
template <int P>
struct RightOperand {  // (STEP, 8 columns)
  uint32_t word[Format<P>::PARTS][2];
};

DEVICE int lane_row() { return threadIdx.x % 32 / 4; }
DEVICE int lane_quad() { return threadIdx.x % 4; }

DEVICE float to_float(float value) { return value; }
DEVICE float to_float(uint16_t value) { return float_of(static_cast<uint32_t>(value) << 16); }
DEVICE void from_float(float& element, float value) { element = value; }
DEVICE void from_float(uint16_t& element, float value) { element = static_cast<uint16_t>(pack_bf16(value, 0.0f)); }
// The value as the format would hold it in memory.
template <int P>
DEVICE float rounded(float value) {
  return P == BF16 ? float_of(pack_bf16(0.0f, value)) : value;
}

template <int P, class Operand>
DEVICE void set_word(Operand& operand, int index, uint32_t bits) {
  if constexpr (P == BF16) {
    operand.word[0][index] = bits;
  } else {
    // FP32: of an infinity the low part is NaN, and so are sums with it; docs/kernels.md says so, NOTES.md why.
    operand.word[0][index] = to_tf32(float_of(bits));
    if constexpr (P == FP32) operand.word[1][index] = to_tf32(float_of(bits) - float_of(operand.word[0][index]));
  }
}

template <int P>
DEVICE void multiply_add(float (&c)[4], const LeftOperand<P>& a, const RightOperand<P>& b) {
  if constexpr (P == BF16) {
    mma_bf16(c, a.word[0], b.word[0]);
  } else {
    if constexpr (P == FP32) {
      mma_tf32(c, a.word[1], b.word[0]);
      mma_tf32(c, a.word[0], b.word[1]);
    }
    mma_tf32(c, a.word[0], b.word[0]);
  }
}

// `COUNT` (2, 4 or 8) neighbouring numbers from `column` on, of a row of `columns`; zeros beyond it and where !valid.
template <int P, bool ALIGNED, int COUNT = Format<P>::VECTOR>
DEVICE Words load_row(const Element<P>* row, int column, int columns, bool valid) {
  Words result = {};
  constexpr int BYTES = COUNT * sizeof(Element<P>);
  if constexpr (ALIGNED) {
    if constexpr (BYTES == 16) {
      const uint4 v = load_or_zero(reinterpret_cast<const uint4*>(row + column), valid && column < columns);
      result = {{v.x, v.y, v.z, v.w}};
    } else {
      const uint2 v = load_or_zero(reinterpret_cast<const uint2*>(row + column), valid && column < columns);
      result = {{v.x, v.y, 0, 0}};
    }
  } else {
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      Element<P> element = 0;
      if (valid && column + i < columns) element = row[column + i];
      if constexpr (P == BF16) result.word[i / 2] |= static_cast<uint32_t>(element) << (i % 2 * 16);
      else result.word[i] = bits_of(element);
    }
  }
  return result;
}

// Writes VECTOR neighbouring numbers, those inside a row of `columns`.
template <int P, bool ALIGNED>
DEVICE void store_row(Element<P>* row, int column, int columns, const float (&value)[Format<P>::VECTOR]) {
  if constexpr (ALIGNED) {
    if (column >= columns) return;
    if constexpr (P == BF16)
      store(row + column, uint4{pack_bf16(value[0], value[1]), pack_bf16(value[2], value[3]),
                                pack_bf16(value[4], value[5]), pack_bf16(value[6], value[7])});
    else
      store(row + column, uint4{bits_of(value[0]), bits_of(value[1]), bits_of(value[2]), bits_of(value[3])});
  } else {
#pragma unroll
    for (int i = 0; i < Format<P>::VECTOR; i++)
      if (column + i < columns) from_float(row[column + i], value[i]);
  }
}

// Rows of a matrix whose row number is the summed axis, for one mma step from row `k` on: (k, columns contiguous).
template <int P, int COUNT = Format<P>::VECTOR>
struct StepRows {
  Words row[P == BF16 ? 4 : 2];

  template <bool ALIGNED>
  DEVICE void read(const Element<P>* matrix, int64_t k, int64_t rows, int column, int columns) {
    const int quad = lane_quad();
#pragma unroll
    for (int i = 0; i < (P == BF16 ? 4 : 2); i++) {
      const int64_t r = k + (P == BF16 ? 2 * quad + i % 2 + i / 2 * 8 : quad + 4 * i);
      row[i] = load_row<P, ALIGNED, COUNT>(matrix + r * columns, column, columns, r < rows);
    }
  }
  // Word of the first (half = 0) or second half of the step, for column `c` of the lane's.
  DEVICE uint32_t word(int c, int half) const {
    if constexpr (P == BF16) {
      const uint32_t even = row[2 * half].word[c / 2], odd = row[2 * half + 1].word[c / 2];
      return c % 2 ? high_halves(even, odd) : low_halves(even, odd);
    } else {
      return row[half].word[c];
    }
  }
};

// First of a lane's columns in a slab of 8 * COUNT, when it reads operands; results lie at quad and quad + 4.
template <int P, int COUNT = Format<P>::VECTOR>
DEVICE int slab_column() {
  return COUNT * (lane_row() / 2 + lane_row() % 2 * 4);
}
