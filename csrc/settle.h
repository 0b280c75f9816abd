// Putting tokens into tiles: newly computed ones as they are, settled ones in other formats. No Python, no torch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "layout.h"

namespace turnkv {

struct Isa;

// New keys and values of one layer, [G][T][D] and [G][T][E] with dense last dims; strides in elements.
struct Write {
  std::uint8_t* blocks;
  std::size_t page_bytes, head_bytes;
  Dtype dtype;
  int num_heads, key_dim, value_dim;
  const void* key;
  const void* value;
  std::ptrdiff_t key_head, key_token, value_head, value_token;
  const std::int32_t* slots;
  int count;
};

// One layer's memory in the tier that tokens leave and in the one that they enter.
struct SettleLayer {
  const std::uint8_t* source;
  std::size_t source_page_bytes, source_head_bytes;
  Format source_keys, source_values;
  std::uint8_t* target;
  std::size_t target_page_bytes, target_head_bytes;
  Format target_keys, target_values;
  int num_heads, key_dim, value_dim;
};

// The same tokens in every layer. No two target slots are equal, and no source is a target.
struct Settle {
  std::vector<SettleLayer> layers;
  Dtype dtype;  // of exact codes
  const std::int32_t* source_slots;
  const std::int32_t* target_slots;
  int count;
};

void write(const Write& call, const Isa& isa);
void settle(const Settle& call, const Isa& isa);

// One head's part, by instruction set. Heads share no byte, so threads divide them.
namespace portable {
void write_head(const Write&, int head);
void settle_head(const Settle&, const SettleLayer&, int head);
}  // namespace portable
namespace avx2 {
void write_head(const Write&, int head);
void settle_head(const Settle&, const SettleLayer&, int head);
}  // namespace avx2
namespace avx512 {
void write_head(const Write&, int head);
void settle_head(const Settle&, const SettleLayer&, int head);
}  // namespace avx512

}  // namespace turnkv
