#include <omp.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <limits>
#include <new>

#include "attend_items.h"
#include "memory.h"
#include "numbers.h"

namespace turnkv {
namespace {

constexpr float kNone = -std::numeric_limits<float>::infinity();
constexpr float kLog2e = 1.44269504F;
constexpr long kTilesWorthATeam = 64;  // times queries and heads: below, waking threads takes longer than the work

int rounded(int count, int to) { return (count + to - 1) / to * to; }

struct Plan {
  std::vector<Item> items;
  std::size_t num_rows = 0;
  long num_tiles = 0;
  int num_blocks = 0, max_rows = 1;
};

void add_items(const Job& job, int index, int first_query, int num_queries, Plan& plan) {
  const auto& sequence = (*job.call->sequences)[static_cast<std::size_t>(index)];
  const int num_tiles = static_cast<int>(sequence.reach.size());
  const bool is_few = num_queries * job.group_heads <= kFewRows;
  const int split = is_few ? kFewSplit : kManySplit;
  const int parts = std::max(1, (num_tiles + split - 1) / split);
  const int block = is_few ? num_queries : std::max(1, kManyRows / job.group_heads);
  const int heads = job.call->num_kv_heads, blocks = (num_queries + block - 1) / block;
  plan.num_tiles += static_cast<long>(num_tiles) * heads * num_queries;
  plan.max_rows = std::max(plan.max_rows, std::min(block, num_queries) * job.group_heads);
  // Items that read the same memory, or neighbouring memory, come one after the other.
  for (int part = 0; part < parts; ++part)
    for (int head = 0; head < heads; ++head)
      for (int q = 0; q < num_queries; q += block) {
        const int count = std::min(block, num_queries - q);
        // A block's rows lie part after part, so that a merge finds them.
        const std::size_t before = static_cast<std::size_t>((head * num_queries + q) * job.group_heads * parts);
        plan.items.push_back({index, head, first_query + q, count, part * split,
                              std::min(split, num_tiles - part * split), part, parts,
                              plan.num_blocks + head * blocks + q / block,
                              plan.num_rows + before + static_cast<std::size_t>(part * count * job.group_heads)});
      }
  plan.num_blocks += heads * blocks;
  plan.num_rows += static_cast<std::size_t>(heads * num_queries * job.group_heads) * static_cast<std::size_t>(parts);
}

Plan plan_of(const Job& job) {
  Plan plan;
  const int num_sequences = static_cast<int>(job.call->sequences->size());
  for (int s = 0; s < num_sequences; ++s) {
    const int queries = (*job.call->sequences)[static_cast<std::size_t>(s)].num_queries;
    if (queries) add_items(job, s, 0, queries, plan);
  }
  return plan;
}

// Lays out a thread's scratch from `memory` on, and says how many bytes it takes.
std::size_t lay_out(const Job& job, int max_rows, std::uint8_t* memory, Scratch& scratch) {
  std::size_t at = 0;
  const auto take = [&]<class T>(T*& to, std::size_t count) {
    to = reinterpret_cast<T*>(memory + at);
    at += (count * sizeof(T) + 63) / 64 * 64;
  };
  const auto rows = static_cast<std::size_t>(rounded(max_rows, 32));
  const auto dims = static_cast<std::size_t>(rounded(job.call->key_dim, 32));
  const auto stride = static_cast<std::size_t>(job.value_stride);
  take(scratch.floats, rows * dims);
  take(scratch.pairs, rows * dims / 2);
  take(scratch.high, kFewRows * dims / 4);
  take(scratch.low, kFewRows * dims / 4);
  take(scratch.step, kFewRows);
  take(scratch.bias, kFewRows * dims / 8);
  take(scratch.scores, 32 * kMaxKeys);
  take(scratch.weights, 32 * kMaxKeys / 2);
  take(scratch.scaled, 4 * kMaxKeys);
  take(scratch.codes, 2 * 4 * kMaxKeys / 4);
  take(scratch.outputs[0], rows * stride);
  take(scratch.outputs[1], rows * stride);
  take(scratch.highest, rows);
  take(scratch.sums, rows * 16);
  take(scratch.keys, static_cast<std::size_t>(kManyTiles) * kTile * dims * 4);
  take(scratch.values, static_cast<std::size_t>(kManyTiles) * kTile * stride * 4);
  return at;
}

void write(const float* from, std::size_t count, void* to, std::ptrdiff_t at, Dtype dtype) {
  auto* floats = static_cast<float*>(to) + at;
  auto* halves = static_cast<std::uint16_t*>(to) + at;
  if (dtype == Dtype::f32)
    for (std::size_t i = 0; i < count; ++i) floats[i] = from[i];
  else if (dtype == Dtype::bf16)
    for (std::size_t i = 0; i < count; ++i) halves[i] = to_bf16(from[i]);
  else
    for (std::size_t i = 0; i < count; ++i) halves[i] = to_f16(from[i]);
}

// All parts of an item's rows, in order, as one softmax.
void merge(const Job& job, const Item& item, const float* partials) {
  const Attend& call = *job.call;
  const Sequence& sequence = (*call.sequences)[static_cast<std::size_t>(item.sequence)];
  const int rows = item.num_queries * job.group_heads;
  const auto dims = static_cast<std::size_t>(call.value_dim);
  std::array<float, kMaxDim> sum;
  for (int r = 0; r < rows; ++r) {
    const auto part = [&](int p) {
      const std::size_t row = item.row + static_cast<std::size_t>(p * rows + r) - static_cast<std::size_t>(item.part * rows);
      return partials + row * static_cast<std::size_t>(job.partial_stride);
    };
    const int head = item.head * job.group_heads + r % job.group_heads;
    float most = kNone;
    for (int p = 0; p < item.num_parts; ++p) most = std::max(most, part(p)[0]);
    const bool is_blind = most == kNone;
    float weight = 0.0F;
    std::fill_n(sum.begin(), dims, 0.0F);
    if (call.sinks) {
      const float sink = call.sinks[head] * kLog2e;
      most = std::max(most, sink);
      weight = std::exp2(sink - most);
    }
    for (int p = 0; p < item.num_parts && !is_blind; ++p) {
      const float* from = part(p);
      if (from[0] == kNone) continue;
      const float factor = from[0] == most ? 1.0F : std::exp2(from[0] - most);
      weight += factor * from[1];
      for (std::size_t e = 0; e < dims; ++e) sum[e] += factor * from[2 + e];
    }
    const std::ptrdiff_t row = sequence.first_query + item.first_query + r / job.group_heads;
    const std::ptrdiff_t to = (row * call.num_heads + head) * call.value_dim;
    for (std::size_t e = 0; e < dims && !is_blind; ++e) sum[e] /= weight;
    write(sum.data(), dims, call.out, to, call.dtype);
  }
}

}  // namespace

void run(const Attend& call, Compute compute) {
  std::vector<TileLayout> layouts;
  for (const Arena& arena : call.arenas)
    layouts.emplace_back(arena.key_format, arena.value_format, call.dtype, call.key_dim, call.value_dim);
  const int stride = rounded(call.value_dim, 16);
  const Job job{&call, layouts.data(), call.num_heads / call.num_kv_heads, stride, stride + 2};
  const Plan plan = plan_of(job);
  const int num_items = static_cast<int>(plan.items.size());
  static thread_local Memory results, counts;
  auto* partials = reinterpret_cast<float*>(
      results.of(plan.num_rows * static_cast<std::size_t>(job.partial_stride) * sizeof(float)));
  using Count = std::atomic<int>;  // parts of a block that are done
  auto* done = reinterpret_cast<Count*>(counts.of(static_cast<std::size_t>(plan.num_blocks) * sizeof(Count)));
  for (int b = 0; b < plan.num_blocks; ++b) new (done + b) Count(0);
#pragma omp parallel if (num_items > 1 && plan.num_tiles >= kTilesWorthATeam)
  {
    static thread_local Memory memory;
    Scratch scratch;
    lay_out(job, plan.max_rows, memory.of(lay_out(job, plan.max_rows, nullptr, scratch)), scratch);
    // A thread takes several items in a row, so that it knows what comes after the one it computes; behind those, it is
    // probably its turn again when all others had theirs.
    const int num_threads = omp_get_num_threads();
    const int several = std::clamp(num_items / (8 * num_threads), 1, 8);
#pragma omp for schedule(dynamic, several) nowait
    for (int i = 0; i < num_items; ++i) {
      const Item& item = plan.items[static_cast<std::size_t>(i)];
      const int then = i % several < several - 1 ? i + 1 : i + 1 + several * (num_threads - 1);
      const Item* next = then < num_items ? &plan.items[static_cast<std::size_t>(then)] : nullptr;
      compute(job, item, next, scratch, partials + item.row * static_cast<std::size_t>(job.partial_stride));
      if (done[item.block].fetch_add(1, std::memory_order_acq_rel) + 1 == item.num_parts) merge(job, item, partials);
    }
  }
}

#if defined(__x86_64__) && defined(__GLIBC__)
__attribute__((target_clones("avx512f", "avx2", "default")))
#endif
static std::uint64_t read_lines(const std::uint64_t* from, std::size_t lines) {
  using Line = std::uint64_t __attribute__((vector_size(64)));
  constexpr std::size_t kAhead = 16384;  // bytes: as attention does, since the hardware alone asks for too little
  Line sums[2] = {};
  for (std::size_t i = 0; i + 2 <= lines; i += 2)
    for (std::size_t half = 0; half < 2; ++half) {
      const std::uint64_t* at = from + (i + half) * 8;
      __builtin_prefetch(reinterpret_cast<const char*>(at) + kAhead, 0, 2);
      Line line;
      __builtin_memcpy(&line, at, sizeof line);
      sums[half] += line;
    }
  sums[0] += sums[1];
  std::uint64_t sum = 0;
  for (int i = 0; i < 8; ++i) sum += sums[0][i];
  return sum;
}

std::uint64_t read_through(const std::uint64_t* from, std::size_t count) {
  constexpr std::size_t kPart = std::size_t{1} << 17;  // words
  const auto parts = static_cast<std::ptrdiff_t>(count / kPart);
  std::uint64_t sum = 0;
#pragma omp parallel for reduction(+ : sum) schedule(static)
  for (std::ptrdiff_t i = 0; i < parts; ++i) sum += read_lines(from + static_cast<std::size_t>(i) * kPart, kPart / 8);
  return sum + read_lines(from + static_cast<std::size_t>(parts) * kPart, count % kPart / 8);
}

}  // namespace turnkv
