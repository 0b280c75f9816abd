// Putting tokens into tiles: newly computed ones as they are, settled ones in other formats.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "layout.h"

namespace turnkv {

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

void write(const Write& call);

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
void settle(const std::vector<SettleLayer>& layers, Dtype dtype, const std::int32_t* source_slots,
            const std::int32_t* target_slots, int count);

}  // namespace turnkv
