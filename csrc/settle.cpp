#include "settle.h"

#include <cstdint>
#include <utility>

#include "cpu.h"

namespace turnkv {
namespace {

// Below this many numbers, waking the other threads costs more than they save.
constexpr std::int64_t kLeastShared = 1 << 17;

}  // namespace

void write(const Write& call, const Isa& isa) {
  const std::int64_t numbers = std::int64_t{call.count} * call.num_heads * (call.key_dim + call.value_dim);
#pragma omp parallel for schedule(static, 1) if (numbers >= kLeastShared)
  for (int head = 0; head < call.num_heads; ++head) isa.write_head(call, head);
}

void settle(const Settle& call, const Isa& isa) {
  std::vector<std::pair<const SettleLayer*, int>> items;
  std::int64_t numbers = 0;
  for (const SettleLayer& layer : call.layers) {
    for (int head = 0; head < layer.num_heads; ++head) items.emplace_back(&layer, head);
    numbers += std::int64_t{call.count} * layer.num_heads * (layer.key_dim + layer.value_dim);
  }
#pragma omp parallel for schedule(dynamic, 1) if (numbers >= kLeastShared)
  for (std::size_t item = 0; item < items.size(); ++item)
    isa.settle_head(call, *items[item].first, items[item].second);
}

}  // namespace turnkv
