// Halves of many tensor trains in one launch: each side's chain of cores, gates folded in, multiplied in float32.
//
// Rows from the true rank to the padded one are zeros; features beyond those that are wanted are cut off. A few blocks
// do one side: each repeats the short products and does its share of the last, which is most of it.
#include "tt_chains.h"

namespace {

using namespace chains;

template <class Number>
KERNEL LAUNCH_BOUNDS(THREADS, 2) halves_kernel(const GRID_CONSTANT Table table) {
  const Chain<Number> chain(table);
  const int last = chain.length() - 1, features = static_cast<int>(chain.side.features);
  const Link<Number> link = chain.link(last);
  const auto write = [&](int rank, int feature, float number) {
    if (feature >= features) return;
    const int place = rank * features + feature;
    if (table.halves_are_bf16) from_float(static_cast<uint16_t*>(chain.side.half)[place], number);
    else static_cast<float*>(chain.side.half)[place] = number;
  };
  const int thread = blockIdx.y * THREADS + threadIdx.x;
  const int padding = static_cast<int>(chain.side.padded_rank) - link.middles;
  for (int i = thread; i < padding * features; i += SPLITS * THREADS)
    write(link.middles + i / features, i % features, 0.0f);
  const float* level = make_levels(chain, last, chain.side.scratch + blockIdx.y * chain.levels(last + 1), false);
  grow(link, level, chain.extent(last), Share::of_splits(), write);
}

}  // namespace

// How many blocks do one side; each needs scratch memory of its own.
extern "C" int hf_comera_tt_halves_splits() { return SPLITS; }

// rows: `num_sides` rows of the table of tt_chains.h in host memory, `row_words` long. A side's scratch holds levels 0
// to num_cores - 1, `splits` times.
extern "C" int hf_comera_tt_halves(const int64_t* rows, int num_sides, int row_words, int cores_are_bf16,
                                   int halves_are_bf16, void* stream) {
  const auto kernel = cores_are_bf16 ? halves_kernel<uint16_t> : halves_kernel<float>;
  return launch_table(kernel, rows, num_sides, row_words, halves_are_bf16, SPLITS, stream);
}
