// Gradients of the cores and gates of many tensor trains from those of their halves, in two launches, all in float32.
//
// With G (middle rank, features) the gradient of what link k gives, its own is level k times G, and G of the link
// before it is the link times G. The first launch does that for the last link of each chain, which is most of the
// work, in a few blocks that share it; each makes the levels anew. The second launch goes on to the outer end, one
// block a side, and sums up the gradients of gates. No atomics and no sum over blocks: the same bits each time.
#include "tt_chains.h"

namespace {

using namespace chains;

constexpr int GROUP = 16;  // features that are summed before their sum is added to that of others

// Gradient of a half as it came: (middle, features), zero beyond them.
template <class Number>
struct GradientOfHalf {
  const Number* numbers;
  int length;
  DEVICE float at(int line, int feature) const {
    const float number = to_float(numbers[line + (feature < length ? feature : 0)]);
    return feature < length ? number : 0.0f;
  }
};
struct GradientOfLevel {
  const float* numbers;
  int length;
  DEVICE float at(int line, int feature) const { return numbers[line + feature]; }
};

// Scratch memory of a side: levels, SPLITS times; gradients of levels; gradients of scaled links (middle, n, start).
template <class Number>
struct Scratch {
  const Chain<Number>& chain;
  DEVICE float* levels(int split) const { return chain.side.scratch + split * chain.levels(chain.length()); }
  DEVICE float* gradient_of_level(int k) const { return levels(SPLITS) + chain.levels(k); }
  DEVICE float* gradient_of_link(int k) const {
    float* place = levels(SPLITS + 1);
    for (int i = 0; i < k; i++) place += chain.link(i).count();
    return place;
  }
};

// Gradient of a link, gates included. Numbers of the level that it was multiplied with lie `start_step` and
// `before_step` apart.
template <class Number, class Gradient>
DEVICE void link_gradient(const Link<Number>& link, int extent, const float* level, int start_step, int before_step,
                          const Gradient& gradient, const Share& share, float* result) {
  const int groups = (extent + GROUP - 1) / GROUP, step = link.feature_of_before();
  multiply<1>(
      {link.middles * link.size, link.starts, groups, GROUP, groups * GROUP - extent}, share,
      [&](int row) {
        const int line = row / link.size * gradient.length, n = row % link.size * link.feature_of_n(extent);
        return [=](int group, int i) { return gradient.at(line, n + (group * GROUP + i) * step); };
      },
      [&](int start) {
        const float* numbers = level + start * start_step;
        return [=](int group, int i) { return numbers[(group * GROUP + i) * before_step]; };
      },
      [&](int row, int start, float number) { result[row * link.starts + start] = number; });
}

// Gradient of the level that a link was multiplied with.
template <bool GATED, class Number, class Gradient>
DEVICE void level_gradient(const Link<Number>& link, int extent, const Gradient& gradient, const Share& share,
                           float* result) {
  const int middle_step = link.middle_step(), n_step = link.n_step(), feature_of_n = link.feature_of_n(extent);
  const int gate_step = link.is_left ? 1 : 0;
  multiply<2>(
      {link.starts, extent, link.middles, link.size, 0}, share,
      [&](int start) {
        const int place = link.place(start, 0, 0), gate = link.is_left ? 0 : start;
        return [=](int middle, int n) {
          return link.template read<GATED>(place + middle * middle_step + n * n_step, gate + middle * gate_step);
        };
      },
      [&](int before) {
        const int feature = before * link.feature_of_before();
        return [=](int middle, int n) { return gradient.at(middle * gradient.length, feature + n * feature_of_n); };
      },
      [&](int start, int before, float number) { result[start * extent + before] = number; });
}
template <class Number, class Gradient>
DEVICE void level_gradient(const Link<Number>& link, int extent, const Gradient& gradient, const Share& share,
                           float* result) {
  if (link.gate) level_gradient<true>(link, extent, gradient, share, result);
  else level_gradient<false>(link, extent, gradient, share, result);
}

template <class Number, class HalfNumber>
KERNEL LAUNCH_BOUNDS(THREADS, 2) last_link_kernel(const GRID_CONSTANT Table table) {
  const Chain<Number> chain(table);
  const Scratch<Number> scratch{chain};
  const int last = chain.length() - 1, extent = chain.extent(last);
  const Link<Number> link = chain.link(last);
  const GradientOfHalf<HalfNumber> gradient{static_cast<const HalfNumber*>(chain.side.half),
                                            static_cast<int>(chain.side.features)};
  // transposed, so that lanes read neighbours
  const float* level = make_levels(chain, last, scratch.levels(blockIdx.y), true);
  link_gradient(link, extent, level, 1, link.starts, gradient, Share::of_splits(), scratch.gradient_of_link(last));
  if (last) level_gradient(link, extent, gradient, Share::of_splits(), scratch.gradient_of_level(last));
}

// Sums a gate's gradient over a link, a warp for each gate.
template <class Number>
DEVICE void sum_gate_gradient(const Link<Number>& link, const float* gradient, float* result) {
  const int gates = link.is_left ? link.middles : link.starts, others = link.count() / gates, warp = threadIdx.x / 32;
  for (int gate = warp; gate < gates; gate += WARPS) {
    float sum = 0.0f;
    for (int i = threadIdx.x % 32; i < others; i += 32) {
      const int n = i % link.size, other = i / link.size;
      const int start = link.is_left ? other : gate, middle = link.is_left ? gate : other;
      const float number = to_float(link.numbers[link.place(start, n, middle)]);
      sum += gradient[(middle * link.size + n) * link.starts + start] * number;
    }
    for (int mask = 16; mask; mask /= 2) sum += shuffle_xor(sum, mask);
    if (threadIdx.x % 32 == 0) result[gate] = sum;
  }
}

// From the gradient of a scaled link to those of core and gate, in the layout and format of the core.
template <class Number>
DEVICE void write_gradients(const Link<Number>& link, const Core& core, const float* gradient) {
  for (int i = threadIdx.x; i < link.count(); i += THREADS) {
    const int start = i % link.starts, n = i / link.starts % link.size, middle = i / link.starts / link.size;
    const float scale = link.gate ? link.gate[link.is_left ? middle : start] : 1.0f;
    from_float(static_cast<Number*>(core.gradient)[link.place(start, n, middle)], gradient[i] * scale);
  }
  if (link.gate) sum_gate_gradient(link, gradient, core.gate_gradient);
}

template <class Number>
KERNEL LAUNCH_BOUNDS(THREADS, 1) other_links_kernel(const GRID_CONSTANT Table table) {
  const Chain<Number> chain(table);
  const Scratch<Number> scratch{chain};
  for (int k = chain.length() - 2; k >= 0; k--) {
    const Link<Number> link = chain.link(k);
    const int extent = chain.extent(k);
    const float* level = scratch.levels(0) + chain.levels(k);  // of the first launch; transposed is only the last
    const GradientOfLevel gradient{scratch.gradient_of_level(k + 1), extent * link.size};
    link_gradient(link, extent, level, extent, 1, gradient, Share::of_block(), scratch.gradient_of_link(k));
    if (k) level_gradient(link, extent, gradient, Share::of_block(), scratch.gradient_of_level(k));
    __syncthreads();
  }
  for (int k = 0; k < chain.length(); k++)
    write_gradients(chain.link(k), chain.core(k), scratch.gradient_of_link(k));
}

template <class Number>
auto last_link(int halves_are_bf16) {
  return halves_are_bf16 ? last_link_kernel<Number, uint16_t> : last_link_kernel<Number, float>;
}

}  // namespace

// rows: as for hf_comera_tt_halves, with the gradient of the half in the place of the half, and where gradients go. A
// side's scratch holds levels 0 to num_cores - 1, `splits` + 1 times, and as many numbers as the cores together.
extern "C" int hf_comera_tt_halves_backward(const int64_t* rows, int num_sides, int row_words, int cores_are_bf16,
                                            int halves_are_bf16, void* stream) {
  const auto last = cores_are_bf16 ? last_link<uint16_t>(halves_are_bf16) : last_link<float>(halves_are_bf16);
  const auto others = cores_are_bf16 ? other_links_kernel<uint16_t> : other_links_kernel<float>;
  const int status = launch_table(last, rows, num_sides, row_words, halves_are_bf16, SPLITS, stream);
  if (status) return status;
  return launch_table(others, rows, num_sides, row_words, halves_are_bf16, 1, stream);
}
