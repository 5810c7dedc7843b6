// A step of AdamW with both moments in E4M3, for many parameters in one launch: each number is read and written once.
//
// A warp does one group of up to 128 neighbours of a row: decodes both moments, takes the step with the new ones as
// they are, finds the extremes of the group, and encodes. The formulas and what is special (zeros, NaN, equal entries)
// are those of hf_comera/ops/fp8.py and hf_comera/optim/coat_adamw.py; all arithmetic is float32.
#include "fragments.h"

namespace {

constexpr int GROUP = 128;
constexpr int MINE = GROUP / 32;  // numbers of a lane, 32 apart
constexpr int STEP_THREADS = 256;
constexpr int STEP_WARPS = STEP_THREADS / 32;
constexpr int MAX_TENSORS = 48;  // of a launch: arguments of a kernel are at most 4 KB
constexpr float LARGEST = 448.0f, SMALLEST = 0.001953125f, BINARY_ORDERS = 17.807354922057606f;  // log2(448 / 2^-9)
constexpr float MOST = 9223372036854775808.0f;  // 2^63, of an entry of a gradient: its square is finite
constexpr float LEAST_EXPONENT = 0.5f, MOST_EXPONENT = 128.0f;

// One parameter and what is kept of it; 64-bit throughout, as the caller lays it out.
struct Parameter {
  void* value;
  const void* gradient;
  uint8_t* first;
  float* first_scales;
  uint8_t* second;
  float* second_scales;
  const float* step;
  int64_t num_rows, length;
};

struct Rule {
  const float* rate_pointer;  // or null
  float rate, decay, beta_1, beta_2, weight_1, weight_2, log_beta_1, log_beta_2, eps, weight_decay;
};

struct Step {
  Rule rule;
  int num_parameters, value_is_bf16, gradient_is_bf16;
  Parameter parameter[MAX_TENSORS];
};
static_assert(sizeof(Step) <= 4096, "arguments of a kernel");

DEVICE float maximum_of_warp(float number) {
  for (int mask = 16; mask; mask /= 2) number = fmaxf(number, shuffle_xor(number, mask));
  return number;
}

DEVICE float from_e4m3(uint32_t code) {
  const uint32_t magnitude = code & 0x7fu;
  const float number = magnitude == 0x7fu  ? NAN
                       : magnitude >= 8u ? float_of((magnitude << 20) + (120u << 23))
                                         : static_cast<float>(magnitude) * SMALLEST;
  return code & 0x80u ? -number : number;
}

// To the nearest, ties to even; for magnitudes up to 448, and NaN.
DEVICE uint32_t to_e4m3(float number) {
  const uint32_t bits = bits_of(number), magnitude = bits & 0x7fffffffu, sign = bits >> 24 & 0x80u;
  if (magnitude > 0x7f800000u) return sign | 0x7fu;
  // Beside 2^14 a float has steps of 2^-9, those of the smallest codes.
  if (magnitude < 0x3c800000u) return sign | (bits_of(float_of(magnitude) + 16384.0f) - bits_of(16384.0f));
  return sign | (((magnitude + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20) - (120u << 3));
}

// The numbers of a group that are this lane's, and those of its moment.
struct Group {
  int64_t first_number, index;
  int count;
  DEVICE int64_t place(int i) const { return first_number + threadIdx.x % 32 + 32 * i; }
  DEVICE bool has(int i) const { return static_cast<int>(threadIdx.x % 32) + 32 * i < count; }
};

DEVICE void decode(float (&moment)[MINE], const uint8_t* codes, const float* scales, const Group& group) {
  const float largest = scales[2 * group.index], inverse = scales[2 * group.index + 1];
#pragma unroll
  for (int i = 0; i < MINE; i++) {
    const float number = group.has(i) ? from_e4m3(codes[group.place(i)]) : 0.0f;
    moment[i] = copysignf(exp2f(log2f(fabsf(number) / LARGEST) * inverse) * largest, number);
  }
}

template <bool KEEP_POSITIVE>
DEVICE void encode(const float (&moment)[MINE], uint8_t* codes, float* scales, const Group& group) {
  float largest = 0.0f, logarithm[MINE], negative_smallest = -INFINITY;
#pragma unroll
  for (int i = 0; i < MINE; i++) {
    const float magnitude = fabsf(moment[i]);
    logarithm[i] = log2f(magnitude);
    if (!(magnitude < INFINITY)) continue;
    largest = fmaxf(largest, magnitude);
    if (magnitude > 0.0f) negative_smallest = fmaxf(negative_smallest, -logarithm[i]);
  }
  largest = maximum_of_warp(largest);
  const float smallest = -maximum_of_warp(negative_smallest);
  const float exponent =
      fminf(fmaxf(BINARY_ORDERS / (log2f(largest) - smallest), LEAST_EXPONENT), MOST_EXPONENT);
  const float shift = log2f(largest > 0.0f ? largest : 1.0f);
#pragma unroll
  for (int i = 0; i < MINE; i++) {
    if (!group.has(i)) continue;
    float scaled = exp2f((logarithm[i] - shift) * exponent) * LARGEST;
    if (!(fabsf(moment[i]) < INFINITY)) scaled = NAN;
    else if (KEEP_POSITIVE) scaled = moment[i] == 0.0f ? 0.0f : fmaxf(scaled, SMALLEST);
    codes[group.place(i)] = static_cast<uint8_t>(to_e4m3(copysignf(scaled, moment[i])));
  }
  if (threadIdx.x % 32 == 0) {
    scales[2 * group.index] = largest;
    scales[2 * group.index + 1] = 1.0f / exponent;
  }
}

DEVICE float read(const void* numbers, int is_bf16, int64_t place) {
  return is_bf16 ? to_float(static_cast<const uint16_t*>(numbers)[place]) : static_cast<const float*>(numbers)[place];
}

DEVICE void write(void* numbers, int is_bf16, int64_t place, float number) {
  if (is_bf16) from_float(static_cast<uint16_t*>(numbers)[place], number);
  else static_cast<float*>(numbers)[place] = number;
}

// As torch's lerp.
DEVICE float between(float from, float to, float weight) {
  return weight < 0.5f ? from + weight * (to - from) : to - (to - from) * (1.0f - weight);
}

DEVICE void step_group(const Step& a, const Parameter& p, const Group& group) {
  const Rule& rule = a.rule;
  const float step = *p.step, rate = rule.rate_pointer ? *rule.rate_pointer : rule.rate;
  const float kept = rule.rate_pointer ? 1.0f - rate * rule.weight_decay : rule.decay;
  const float correction_1 = -expm1f(step * rule.log_beta_1), root_2 = sqrtf(-expm1f(step * rule.log_beta_2));
  float first[MINE], second[MINE];
  decode(first, p.first, p.first_scales, group);
  decode(second, p.second, p.second_scales, group);
#pragma unroll
  for (int i = 0; i < MINE; i++) {
    if (!group.has(i)) continue;
    float gradient = read(p.gradient, a.gradient_is_bf16, group.place(i));
    if (fabsf(gradient) < INFINITY) gradient = fminf(fmaxf(gradient, -MOST), MOST);
    first[i] = between(first[i], gradient, rule.weight_1);
    second[i] = second[i] * rule.beta_2 + rule.weight_2 * gradient * gradient;
    const float denominator = (sqrtf(second[i]) / root_2 + rule.eps) * correction_1;
    const float value = read(p.value, a.value_is_bf16, group.place(i)) * kept;
    write(p.value, a.value_is_bf16, group.place(i), value - first[i] / denominator * rate);
  }
  encode<false>(first, p.first, p.first_scales, group);
  encode<true>(second, p.second, p.second_scales, group);
}

KERNEL LAUNCH_BOUNDS(STEP_THREADS, 4) coat_adamw_kernel(Step a) {
  int64_t index = static_cast<int64_t>(blockIdx.x) * STEP_WARPS + threadIdx.x / 32;
  for (int i = 0; i < a.num_parameters; i++) {
    const Parameter& p = a.parameter[i];
    const int64_t in_row = (p.length + GROUP - 1) / GROUP;
    if (index < p.num_rows * in_row) {
      const int64_t start = index % in_row * GROUP, left = p.length - start;
      return step_group(a, p, {index / in_row * p.length + start, index, static_cast<int>(left < GROUP ? left : GROUP)});
    }
    index -= p.num_rows * in_row;
  }
}

}  // namespace

// How many parameters a call takes at most.
extern "C" int hf_comera_coat_adamw_tensors() { return MAX_TENSORS; }

// `table` is in host memory: for each parameter value (rows, length), gradient, first and second moment as codes
// (rows, length) and scales (rows, groups of a row, 2), step () as addresses; rows; length. All but codes are float32,
// values and gradients perhaps bf16. `rate_pointer` is null, or the address of the rate, which then replaces `rate`.
extern "C" int hf_comera_coat_adamw(const void* table, int num_parameters, int value_is_bf16, int gradient_is_bf16,
                                    const float* rate_pointer, double rate, double beta_1, double beta_2, double eps,
                                    double weight_decay, void* stream) {
  if (num_parameters < 0 || num_parameters > MAX_TENSORS) return BAD_SIZE;
  Step a = {};
  a.rule = {rate_pointer,
            static_cast<float>(rate),
            static_cast<float>(1.0 - rate * weight_decay),
            static_cast<float>(beta_1),
            static_cast<float>(beta_2),
            static_cast<float>(1.0 - beta_1),
            static_cast<float>(1.0 - beta_2),
            static_cast<float>(log(beta_1)),
            static_cast<float>(log(beta_2)),
            static_cast<float>(eps),
            static_cast<float>(weight_decay)};
  a.num_parameters = num_parameters;
  a.value_is_bf16 = value_is_bf16;
  a.gradient_is_bf16 = gradient_is_bf16;
  int64_t groups = 0;
  for (int i = 0; i < num_parameters; i++) {
    a.parameter[i] = static_cast<const Parameter*>(table)[i];
    groups += a.parameter[i].num_rows * ((a.parameter[i].length + GROUP - 1) / GROUP);
  }
  if (groups == 0) return OK;
  const int64_t blocks = (groups + STEP_WARPS - 1) / STEP_WARPS;
  if (blocks > 0x7fffffff) return BAD_SIZE;
  return launch(coat_adamw_kernel, dim3(static_cast<unsigned>(blocks)), STEP_THREADS, stream, a);
}
