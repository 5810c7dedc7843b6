// CUDA on a CPU for tests: threads are fibers of one system thread, blocks run one after the other.
//
// It shows wrong indices, layouts, formulas and barriers that not all threads reach. A fiber runs until it waits, so a
// missing barrier shows as a result that changes with HF_COMERA_EMULATION_ORDER: a number that decides which threads
// run first and which warps fall behind. Races between fewer instructions than that stay unseen. Only portable.h
// includes it.
#pragma once
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

struct alignas(16) uint4 { uint32_t x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) uint2 { uint32_t x, y; };
struct alignas(8) float2 { float x, y; };
struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

#define KERNEL void
#define DEVICE inline
#define SHARED static
#define GRID_CONSTANT
#define LAUNCH_BOUNDS(threads, blocks)

namespace emulation {

constexpr int WARP = 32;
constexpr size_t STACK_BYTES = 128 << 10;
constexpr size_t SLOT_BYTES = 64;

// Where threads meet: a generation ends when all have arrived.
struct Meeting {
  int arrived = 0;
  unsigned generation = 0;
};

struct Warp {
  Meeting meeting;
  alignas(16) char slots[WARP][SLOT_BYTES];
};

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack{new char[STACK_BYTES]};
  const Meeting* waits_at = nullptr;
  unsigned waits_since = 0;
  bool done = false;
};

struct Block {
  ucontext_t scheduler;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  Meeting barrier;
  void (*run)(void*) = nullptr;
  void* work = nullptr;
  int current = 0;
  unsigned order = 0;  // 0: threads in their order; else another order in every turn
  uint64_t turns = 0;
};

inline thread_local Block* block = nullptr;
inline thread_local dim3 thread_index, block_index, grid_size, block_size;

inline void wait_at(Meeting& meeting) {
  Fiber& fiber = block->fibers[block->current];
  fiber.waits_at = &meeting;
  fiber.waits_since = meeting.generation;
  swapcontext(&fiber.context, &block->scheduler);
}

// Returns after `size` threads have come; `last` is run by the one that comes last, before anybody goes on.
template <class Last>
void meet(Meeting& meeting, int size, Last last) {
  if (++meeting.arrived < size) return wait_at(meeting);
  last();
  meeting.arrived = 0;
  meeting.generation++;
}

// Each lane of a warp brings a value; `combine` changes the 32 of them; each lane leaves with its own.
template <class Value, class Combine>
Value collective(const Value& mine, Combine combine) {
  static_assert(sizeof(Value) <= SLOT_BYTES, "a lane's value is too large");
  Warp& warp = block->warps[block->current / WARP];
  const int lane = block->current % WARP;
  memcpy(warp.slots[lane], &mine, sizeof(Value));
  meet(warp.meeting, WARP, [&] {
    Value values[WARP];
    for (int i = 0; i < WARP; i++) memcpy(&values[i], warp.slots[i], sizeof(Value));
    combine(values);
    for (int i = 0; i < WARP; i++) memcpy(warp.slots[i], &values[i], sizeof(Value));
  });
  Value result;
  memcpy(&result, warp.slots[lane], sizeof(Value));
  return result;
}

inline void fiber_main() {
  block->run(block->work);
  Fiber& fiber = block->fibers[block->current];
  fiber.done = true;
  swapcontext(&fiber.context, &block->scheduler);
}

inline void start(Fiber& fiber) {
  fiber.waits_at = nullptr;
  fiber.done = false;
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack.get();
  fiber.context.uc_stack.ss_size = STACK_BYTES;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, fiber_main, 0);
}

// Who comes as number `i` of `size` in the next turn: a step that shares no factor with a multiple of 32 up to 1024
// (nor with other sizes, unless they are multiples of 1031) reaches everybody.
inline size_t turn_of(const Block& b, size_t i, size_t size) {
  return b.order ? (i * (b.order % 2 ? 1031 : size - 1) + b.order / 2 % size) % size : i;
}

// Whether a warp sits this turn out, so that warps drift apart: about half of them, for some hundred turns.
inline bool rests(const Block& b, size_t warp) {
  const uint64_t mixed = (b.turns / 150 * 40503u + warp + 1) * 0x9e3779b97f4a7c15u;
  return b.order && (mixed >> 37) % 2;
}

// Runs every fiber that can go on, in turns, until all are done.
inline void run_block() {
  Block& b = *block;
  for (Fiber& fiber : b.fibers) start(fiber);
  for (size_t left = b.fibers.size(); left;) {
    bool can_move = false;
    b.turns++;
    if (b.order) b.order = (b.order * 1664525u + 1013904223u) | 1u << 31;
    for (size_t turn = 0; turn < b.fibers.size(); turn++) {
      const size_t i = turn_of(b, turn, b.fibers.size());
      Fiber& fiber = b.fibers[i];
      if (fiber.done || (fiber.waits_at && fiber.waits_at->generation == fiber.waits_since)) continue;
      can_move = true;
      if (rests(b, i / WARP)) continue;
      fiber.waits_at = nullptr;
      b.current = static_cast<int>(i);
      thread_index = dim3(b.current, 0, 0);
      swapcontext(&b.scheduler, &fiber.context);
      left -= fiber.done;
    }
    if (!can_move) {
      fprintf(stderr, "deadlock: threads of a block wait for threads that have ended or wait elsewhere\n");
      abort();
    }
  }
}

inline float bf16_half(uint32_t word, int high) {
  const uint32_t bits = high ? word & 0xffff0000u : word << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

struct MmaLane {
  float c[4];
  uint32_t a[4], b[2];
};

// c (16, 8) += a (16, K) b (K, 8), fragments laid out as PTX says for mma.sync m16n8k16 (bf16) and m16n8k8 (tf32).
// One rounding for an mma, as tensor cores keep more bits inside; theirs is not to the nearest, so this is kinder.
template <int K, class Unpack>
void multiply(MmaLane (&lanes)[WARP], Unpack unpack) {
  float a[16][K], b[K][8];
  constexpr int PAIR = K / 8;  // numbers in a word
  for (int lane = 0; lane < WARP; lane++) {
    const int row = lane / 4, column = lane % 4 * PAIR;
    for (int i = 0; i < PAIR; i++) {
      for (int word = 0; word < 4; word++)
        a[row + word % 2 * 8][column + word / 2 * 4 * PAIR + i] = unpack(lanes[lane].a[word], i);
      for (int word = 0; word < 2; word++) b[column + word * 4 * PAIR + i][row] = unpack(lanes[lane].b[word], i);
    }
  }
  for (int lane = 0; lane < WARP; lane++)
    for (int i = 0; i < 4; i++) {
      const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
      double sum = lanes[lane].c[i];
      for (int k = 0; k < K; k++) sum += static_cast<double>(a[row][k]) * b[k][column];
      lanes[lane].c[i] = static_cast<float>(sum);
    }
}

template <int K, class Unpack>
void mma(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Unpack unpack) {
  MmaLane mine;
  memcpy(mine.c, c, sizeof mine.c);
  memcpy(mine.a, a, sizeof mine.a);
  memcpy(mine.b, b, sizeof mine.b);
  mine = collective(mine, [&](MmaLane (&lanes)[WARP]) { multiply<K>(lanes, unpack); });
  memcpy(c, mine.c, sizeof mine.c);
}

}  // namespace emulation

#define threadIdx (emulation::thread_index)
#define blockIdx (emulation::block_index)
#define gridDim (emulation::grid_size)
#define blockDim (emulation::block_size)

inline void __syncthreads() {
  emulation::meet(emulation::block->barrier, static_cast<int>(emulation::block->fibers.size()), [] {});
}

inline uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}
inline float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

inline void mma_bf16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  emulation::mma<16>(c, a, b, emulation::bf16_half);
}
inline void mma_tf32(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  emulation::mma<8>(c, a, b, [](uint32_t word, int) { return float_of(word & 0xffffe000u); });
}
inline uint32_t to_tf32(float value) {
  const uint32_t bits = bits_of(value);
  return (bits & 0x7f800000u) == 0x7f800000u ? bits : (bits + 0x1000u) & 0xffffe000u;
}
inline uint32_t pack_bf16(float low, float high) {
  const auto round = [](float value) -> uint32_t {
    const uint32_t bits = bits_of(value);
    if (value != value) return 0x7fffu;
    return (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  };
  return round(low) | round(high) << 16;
}
inline uint32_t low_halves(uint32_t a, uint32_t b) { return (a & 0xffffu) | b << 16; }
inline uint32_t high_halves(uint32_t a, uint32_t b) { return a >> 16 | (b & 0xffff0000u); }
inline float shuffle_xor(float value, int mask) {
  return emulation::collective(value, [mask](float (&values)[emulation::WARP]) {
    float before[emulation::WARP];
    memcpy(before, values, sizeof before);
    for (int lane = 0; lane < emulation::WARP; lane++) values[lane] = before[lane ^ mask];
  });
}

inline void forget(int&) {}

template <class Vector>
Vector load_or_zero(const Vector* pointer, bool valid) {
  Vector value = {};
  if (!valid) return value;
  if (reinterpret_cast<uintptr_t>(pointer) % alignof(Vector)) abort();  // a GPU stops there too
  memcpy(&value, pointer, sizeof value);
  return value;
}
template <class Vector>
void store(void* pointer, const Vector& value) {
  if (reinterpret_cast<uintptr_t>(pointer) % alignof(Vector)) abort();
  memcpy(pointer, &value, sizeof value);
}

template <class Arguments>
int launch(void (*kernel)(Arguments), dim3 grid, int threads, void*, const Arguments& arguments) {
  using namespace emulation;
  Block state;
  state.fibers = std::vector<Fiber>(threads);
  state.warps = std::vector<Warp>((threads + WARP - 1) / WARP);
  struct Work { void (*kernel)(Arguments); const Arguments* arguments; } work{kernel, &arguments};
  state.work = &work;
  state.run = [](void* pointer) { static_cast<Work*>(pointer)->kernel(*static_cast<Work*>(pointer)->arguments); };
  const char* order = getenv("HF_COMERA_EMULATION_ORDER");
  state.order = order ? static_cast<unsigned>(atoi(order)) : 0;
  block = &state;
  grid_size = grid;
  block_size = dim3(threads);
  for (unsigned z = 0; z < grid.z; z++)
    for (unsigned y = 0; y < grid.y; y++)
      for (unsigned x = 0; x < grid.x; x++) {
        block_index = dim3(x, y, z);
        run_block();
      }
  block = nullptr;
  return 0;
}

// A driver just new enough.
inline int driver_version(int* version) { return *version = 12000, 0; }
inline int compiled_version(int* version) { return *version = 12000, 0; }
