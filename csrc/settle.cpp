// Each operation is rounded once, in float32: compiled without contraction, so that the bits are those of the reference
// (src/turnkv/cache/formats).
#include "settle.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "numbers.h"

namespace turnkv {
namespace {

using Vector = std::array<float, kMaxDim>;

// Where the codes of one token lie: keys have lanes [D/p][16], values [16/p][E].
class Codes {
 public:
  Codes(std::uint8_t* data, std::uint8_t* scales, Format format, Dtype dtype, int dims, int slot, bool is_key)
      : data_(data), scales_(scales), bits_(code_bits(format, dtype)), dims_(dims), slot_(slot), is_key_(is_key) {}

  std::uint32_t get(int dim) const {
    const auto [at, shift] = place(dim);
    if (bits_ == 32) return word<std::uint32_t>(at);
    if (bits_ == 16) return word<std::uint16_t>(at);
    return static_cast<std::uint32_t>(data_[at] >> shift) & ((1U << bits_) - 1);
  }

  void put(int dim, std::uint32_t code) const {
    const auto [at, shift] = place(dim);
    if (bits_ == 32) return set(at, code);
    if (bits_ == 16) return set(at, static_cast<std::uint16_t>(code));
    if (bits_ == 8) data_[at] = static_cast<std::uint8_t>(code);
    else data_[at] = static_cast<std::uint8_t>((data_[at] & (0xf0 >> shift)) | static_cast<int>(code) << shift);
  }

  std::uint16_t scale(int group) const {
    std::uint16_t bits;
    std::memcpy(&bits, scales_ + (group * kTile + slot_) * 2, sizeof bits);
    return bits;
  }

  void set_scale(int group, std::uint16_t bits) const {
    std::memcpy(scales_ + (group * kTile + slot_) * 2, &bits, sizeof bits);
  }

 private:
  struct Place {
    std::size_t at;
    int shift;
  };

  Place place(int dim) const {
    const int per_lane = std::max(1, 32 / bits_);
    const int row = (is_key_ ? dim : slot_) / per_lane, inside = (is_key_ ? dim : slot_) % per_lane;
    const int column = is_key_ ? slot_ : dim;
    const auto lane = static_cast<std::size_t>(row * (is_key_ ? kTile : dims_) + column);
    const int bit = inside * bits_;
    return {lane * 4 + static_cast<std::size_t>(bit / 8), bit % 8};
  }

  template <class Word>
  Word word(std::size_t at) const {
    Word value;
    std::memcpy(&value, data_ + at, sizeof value);
    return value;
  }

  template <class Word>
  void set(std::size_t at, Word value) const {
    std::memcpy(data_ + at, &value, sizeof value);
  }

  std::uint8_t *data_, *scales_;
  int bits_, dims_, slot_;
  bool is_key_;
};

void hadamard(float* block, int size) {
  for (int stride = 1; stride < size; stride *= 2)
    for (int i = 0; i < size; i += 2 * stride)
      for (int j = i; j < i + stride; ++j) {
        const float a = block[j], b = block[j + stride];
        block[j] = a + b;
        block[j + stride] = a - b;
      }
  const auto norm = static_cast<float>(1.0 / std::sqrt(static_cast<double>(size)));
  for (int i = 0; i < size; ++i) block[i] *= norm;
}

void read(const Codes& codes, Format format, Dtype dtype, int dims, Vector& to) {
  switch (format) {
    case Format::exact:
      for (int i = 0; i < dims; ++i) {
        const std::uint32_t bits = codes.get(i);
        const auto half = static_cast<std::uint16_t>(bits);
        to[static_cast<std::size_t>(i)] = dtype == Dtype::f32    ? std::bit_cast<float>(bits)
                                          : dtype == Dtype::bf16 ? from_bf16(half)
                                                                 : from_f16(half);
      }
      return;
    case Format::int8: {
      const float step = from_f16(codes.scale(0));
      for (int i = 0; i < dims; ++i)
        to[static_cast<std::size_t>(i)] =
            static_cast<float>(static_cast<std::int8_t>(static_cast<std::uint8_t>(codes.get(i)))) * step;
      return;
    }
    case Format::fp8:
      for (int i = 0; i < dims; ++i)
        to[static_cast<std::size_t>(i)] = from_e4m3(static_cast<std::uint8_t>(codes.get(i)));
      return;
    case Format::int4:
      for (int first = 0, group = 0; first < dims; ++group) {
        const int size = block_size(first, dims);
        const float step = from_f16(codes.scale(group));
        for (int i = first; i < first + size; ++i)
          to[static_cast<std::size_t>(i)] = static_cast<float>(static_cast<int>(codes.get(i)) - 8) * step;
        hadamard(to.data() + first, size);
        first += size;
      }
      return;
  }
}

float limited(float scale) { return std::clamp(scale, -65504.0F, 65504.0F); }

void quantise(const Vector& from, Format format, Dtype dtype, int dims, const Codes& codes) {
  switch (format) {
    case Format::exact:
      for (int i = 0; i < dims; ++i) {
        const float value = from[static_cast<std::size_t>(i)];
        codes.put(i, dtype == Dtype::f32    ? std::bit_cast<std::uint32_t>(value)
                     : dtype == Dtype::bf16 ? to_bf16(value)
                                            : to_f16(value));
      }
      return;
    case Format::int8: {
      float most = 0;
      for (int i = 0; i < dims; ++i) most = std::max(most, std::fabs(from[static_cast<std::size_t>(i)]));
      const std::uint16_t scale = to_f16(limited(most / 127.0F));
      const float step = from_f16(scale);
      codes.set_scale(0, scale);
      for (int i = 0; i < dims; ++i) {
        const float code = step > 0 ? std::nearbyint(from[static_cast<std::size_t>(i)] / step) : 0.0F;
        codes.put(i, static_cast<std::uint32_t>(static_cast<int>(std::clamp(code, -127.0F, 127.0F))) & 0xffU);
      }
      return;
    }
    case Format::fp8:
      for (int i = 0; i < dims; ++i)
        codes.put(i, to_e4m3(std::clamp(from[static_cast<std::size_t>(i)], -448.0F, 448.0F)));
      return;
    case Format::int4: {
      Vector turned = from;
      for (int first = 0, group = 0; first < dims; ++group) {
        const int size = block_size(first, dims);
        float* block = turned.data() + first;
        hadamard(block, size);
        const float* largest =
            std::max_element(block, block + size, [](float a, float b) { return std::fabs(a) < std::fabs(b); });
        const std::uint16_t scale = to_f16(limited(*largest / -8.0F));
        const float step = from_f16(scale);
        codes.set_scale(group, scale);
        for (int i = 0; i < size; ++i) {
          const float code = step != 0 ? std::nearbyint(block[i] / step) : 0.0F;
          codes.put(first + i, static_cast<std::uint32_t>(static_cast<int>(std::clamp(code, -8.0F, 7.0F)) + 8));
        }
        first += size;
      }
      return;
    }
  }
}

// One token's keys or values from one tier to the other.
void move(const Codes& from, Format source, const Codes& to, Format target, Dtype dtype, int dims) {
  if (source == target) {
    for (int i = 0; i < dims; ++i) to.put(i, from.get(i));
    for (int g = 0; g < num_scales(source, dims); ++g) to.set_scale(g, from.scale(g));
    return;
  }
  Vector vector;
  read(from, source, dtype, dims, vector);
  quantise(vector, target, dtype, dims, to);
}

}  // namespace

void write(const Write& call) {
  const TileLayout layout(Format::exact, Format::exact, call.dtype, call.key_dim, call.value_dim);
  const int bytes = call.dtype == Dtype::f32 ? 4 : 2, per_lane = 4 / bytes;
  const auto* key = static_cast<const std::uint8_t*>(call.key);
  const auto* value = static_cast<const std::uint8_t*>(call.value);
#pragma omp parallel for if (call.count >= 64)
  for (int head = 0; head < call.num_heads; ++head)
    for (int t = 0; t < call.count; ++t) {
      const int slot = call.slots[t] % kTile;
      std::uint8_t* block = call.blocks + static_cast<std::size_t>(call.slots[t] / kTile) * call.page_bytes +
                            static_cast<std::size_t>(head) * call.head_bytes;
      const std::uint8_t* from = key + (head * call.key_head + t * call.key_token) * bytes;
      for (int i = 0; i < call.key_dim; i += per_lane)  // the dims of a lane lie side by side in both
        std::memcpy(block + (i / per_lane * kTile + slot) * 4, from + i * bytes, 4);
      from = value + (head * call.value_head + t * call.value_token) * bytes;
      std::uint8_t* to = block + layout.values + slot / per_lane * call.value_dim * 4 + slot % per_lane * bytes;
      for (int e = 0; e < call.value_dim; ++e)
        std::memcpy(to + e * 4, from + e * bytes, static_cast<std::size_t>(bytes));
    }
}

void settle(const std::vector<SettleLayer>& layers, Dtype dtype, const std::int32_t* source_slots,
            const std::int32_t* target_slots, int count) {
  std::vector<std::pair<int, int>> items;  // no two of them share a byte
  for (int layer = 0; layer < static_cast<int>(layers.size()); ++layer)
    for (int head = 0; head < layers[static_cast<std::size_t>(layer)].num_heads; ++head)
      items.emplace_back(layer, head);
  const int num_items = static_cast<int>(items.size());
#pragma omp parallel for schedule(dynamic, 1)
  for (int item = 0; item < num_items; ++item) {
    const auto [layer, head] = items[static_cast<std::size_t>(item)];
    const SettleLayer& at = layers[static_cast<std::size_t>(layer)];
    const TileLayout source(at.source_keys, at.source_values, dtype, at.key_dim, at.value_dim);
    const TileLayout target(at.target_keys, at.target_values, dtype, at.key_dim, at.value_dim);
    for (int t = 0; t < count; ++t) {
      // Codes are read through a pointer that could write; the source is never written to.
      auto* from = const_cast<std::uint8_t*>(at.source) +
                   static_cast<std::size_t>(source_slots[t] / kTile) * at.source_page_bytes +
                   static_cast<std::size_t>(head) * at.source_head_bytes;
      std::uint8_t* to = at.target + static_cast<std::size_t>(target_slots[t] / kTile) * at.target_page_bytes +
                         static_cast<std::size_t>(head) * at.target_head_bytes;
      const int old_slot = source_slots[t] % kTile, new_slot = target_slots[t] % kTile;
      move(Codes(from, from + source.key_scales, at.source_keys, dtype, at.key_dim, old_slot, true), at.source_keys,
           Codes(to, to + target.key_scales, at.target_keys, dtype, at.key_dim, new_slot, true), at.target_keys, dtype,
           at.key_dim);
      move(Codes(from + source.values, from + source.value_scales, at.source_values, dtype, at.value_dim, old_slot,
                 false),
           at.source_values,
           Codes(to + target.values, to + target.value_scales, at.target_values, dtype, at.value_dim, new_slot, false),
           at.target_values, dtype, at.value_dim);
    }
  }
}

}  // namespace turnkv
