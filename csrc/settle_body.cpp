// One head's tokens between formats. Compiled once for each instruction set, with TURNKV_ISA as the namespace.
//
// Each operation is rounded once, in float32: compiled without contraction, so that the bits are those of the reference
// (src/turnkv/cache/formats). A token's codes are spread to one a dim, worked on sixteen at a time, and packed again:
//
//   keys    gathered lanes ─┐                                              ┌─► scattered lanes
//                           ├─► codes [D] ─► values [D] ─► other codes [D] ┤
//   values  part of a row ──┘                                              └─► part of a row
#include <cmath>
#include <cstring>

#include "numbers.h"
#include "settle.h"

namespace turnkv::TURNKV_ISA {
namespace {

#include "hadamard.h"

using Halves = std::uint16_t __attribute__((vector_size(2 * kWide)));
using Bytes = std::uint8_t __attribute__((vector_size(kWide)));

inline Wide larger(Wide a, Wide b) { return a > b ? a : b; }
inline Wide smaller(Wide a, Wide b) { return a < b ? a : b; }
inline Wide clamped(Wide x, float low, float high) { return smaller(larger(x, Wide{} + low), Wide{} + high); }

inline Wide magnitude(Wide x) { return std::bit_cast<Wide>(std::bit_cast<WideBits>(x) & 0x7fffffffU); }

inline float largest(Wide x) {
  x = larger(x, partner<8>(x));
  x = larger(x, partner<4>(x));
  x = larger(x, partner<2>(x));
  return larger(x, partner<1>(x))[0];
}

// The nearest whole number, ties to even, in the low bits: of |x| below 2^22. What a NaN gives is arbitrary.
inline WideBits rounded(Wide x) { return std::bit_cast<WideBits>(x + 12582912.0F); }  // 1.5 * 2^23

// The first of a block's elements of largest magnitude.
inline float extreme(const float* block, int size) {
  if (size >= kWide) {
    Wide x = load_as<Wide>(block), negated = -x;
    for (int i = kWide; i < size; i += kWide) {
      x = larger(x, load_as<Wide>(block + i));
      negated = larger(negated, -load_as<Wide>(block + i));
    }
    const float high = largest(x), low = largest(negated);
    if (high != low) return high > low ? high : -low;
  }
  float found = block[0];
  for (int i = 1; i < size; ++i) found = std::fabs(block[i]) > std::fabs(found) ? block[i] : found;
  return found;
}

inline std::uint16_t scale_bits(float scale) {
  scale = scale > 65504.0F ? 65504.0F : scale;
  return to_f16(scale < -65504.0F ? -65504.0F : scale);
}

// What one token's codes pass through. Whole registers are read and written, from any dim on: hence the room behind.
struct alignas(64) Work {
  static constexpr int kRoom = kMaxDim + kWide;
  float values[kRoom];
  std::uint32_t codes[kRoom];                     // one a dim
  std::uint32_t lanes[kRoom];                     // of keys, gathered
  std::uint16_t scales[num_blocks(kMaxDim - 1)];  // 511 dims fall into the most blocks
};
static_assert(num_blocks(kMaxDim - 1) == 20 && num_blocks(kMaxDim) == 16);

// Where the keys, or the values, of one token lie.
struct Place {
  std::uint8_t* data;    // lanes: of keys [D/p][16], of values [16/p][E]
  std::uint8_t* scales;  // [groups][16]
  int slot;
};

// The keys, or the values, of a head in one tier.
template <bool kIsKey>
class Part {
 public:
  Part(Format format, Dtype dtype, int dims)
      : format_(format), dtype_(dtype), bits_(code_bits(format, dtype)), dims_(dims) {}

  Format format() const { return format_; }

  void take(const Place& from, Work& work) const {
    for (int group = 0; group < num_scales(format_, dims_); ++group)
      work.scales[group] = load_as<std::uint16_t>(from.scales + (group * kTile + from.slot) * 2);
    if constexpr (kIsKey) {
      const int num_lanes = dims_ * bits_ / 32;
      const std::uint8_t* lane = from.data + from.slot * 4;
      for (int i = 0; i < num_lanes; ++i) work.lanes[i] = load_as<std::uint32_t>(lane + i * kTile * 4);
      spread(work);
    } else {
      const std::uint8_t* row = row_of(from);
      const int shift = shift_of(from);
      int e = 0;
      for (; e + kWide <= dims_; e += kWide) store_as(work.codes + e, load_as<WideBits>(row + e * 4) >> shift & mask());
      for (; e < dims_; ++e) work.codes[e] = load_as<std::uint32_t>(row + e * 4) >> shift & mask();
    }
  }

  void put(Work& work, const Place& to) const {
    for (int group = 0; group < num_scales(format_, dims_); ++group)
      store_as(to.scales + (group * kTile + to.slot) * 2, work.scales[group]);
    if constexpr (kIsKey) {
      pack(work);
      scatter(work.lanes, to);
    } else {
      std::uint8_t* row = row_of(to);
      const int shift = shift_of(to);
      const std::uint32_t others = ~(mask() << shift);
      int e = 0;
      for (; e + kWide <= dims_; e += kWide)
        store_as(row + e * 4, (load_as<WideBits>(row + e * 4) & others) | load_as<WideBits>(work.codes + e) << shift);
      for (; e < dims_; ++e) store_as(row + e * 4, (load_as<std::uint32_t>(row + e * 4) & others) | work.codes[e] << shift);
    }
  }

  // A new token's exact numbers, dense.
  void put_exact(const std::uint8_t* numbers, const Place& to) const {
    if constexpr (kIsKey) {
      scatter(numbers, to);
    } else if (bits_ == 32) {
      std::memcpy(row_of(to), numbers, static_cast<std::size_t>(dims_) * 4);
    } else {
      std::uint8_t* row = row_of(to);
      const int shift = shift_of(to);
      const std::uint32_t others = ~(mask() << shift);
      int e = 0;
      for (; e + kWide <= dims_; e += kWide) {
        const WideBits codes = __builtin_convertvector(load_as<Halves>(numbers + e * 2), WideBits);
        store_as(row + e * 4, (load_as<WideBits>(row + e * 4) & others) | codes << shift);
      }
      for (; e < dims_; ++e) std::memcpy(row + e * 4 + shift / 8, numbers + e * 2, 2);
    }
  }

  // Codes and scales → values.
  void read(Work& work) const {
    switch (format_) {
      case Format::exact:
        if (dtype_ == Dtype::f32) each(work, [](WideBits codes) { return std::bit_cast<Wide>(codes); });
        else if (dtype_ == Dtype::bf16) each(work, [](WideBits codes) { return bf16_value<Wide>(codes); });
        else each(work, [](WideBits codes) { return f16_value<Wide>(codes); });
        break;
      case Format::int8: {
        const float step = from_f16(work.scales[0]);
        each(work, [step](WideBits codes) {
          return __builtin_convertvector(std::bit_cast<WideInts>(codes << 24) >> 24, Wide) * step;
        });
        break;
      }
      case Format::fp8:
        each(work, [](WideBits codes) { return e4m3_value<Wide>(codes); });
        break;
      case Format::int4:
        each(work, [](WideBits codes) { return __builtin_convertvector(std::bit_cast<WideInts>(codes) - 8, Wide); });
        for (int first = 0, group = 0; first < dims_; ++group) {
          const int size = block_size(first, dims_);
          const float step = from_f16(work.scales[group]);
          for (int i = first; i < first + size; ++i) work.values[i] *= step;
          hadamard(work.values + first, size);
          first += size;
        }
        break;
    }
    // Zeros behind the last dim, so that they are never the largest.
    for (int i = dims_; i % kWide; ++i) work.values[i] = 0;
  }

  // Values → codes and scales.
  void quantise(Work& work) const {
    switch (format_) {
      case Format::exact:
        if (dtype_ == Dtype::f32) again(work, [](Wide x) { return std::bit_cast<WideBits>(x); });
        else if (dtype_ == Dtype::bf16) again(work, [](Wide x) { return bf16_bits<WideBits>(x); });
        else again(work, [](Wide x) { return f16_bits<WideBits>(x); });
        break;
      case Format::int8: {
        Wide most{};
        for (int i = 0; i < dims_; i += kWide) most = larger(most, magnitude(load_as<Wide>(work.values + i)));
        work.scales[0] = scale_bits(largest(most) / 127.0F);
        const float step = from_f16(work.scales[0]);
        if (step > 0) again(work, [step](Wide x) { return rounded(clamped(x / step, -127.0F, 127.0F)) & 0xffU; });
        else again(work, [](Wide) { return WideBits{}; });
        break;
      }
      case Format::fp8:
        again(work, [](Wide x) {
          const Wide low = Wide{} - 448.0F, high = Wide{} + 448.0F;
          x = x < low ? low : x;  // in this form a NaN stays one
          x = x > high ? high : x;
          return e4m3_bits<WideBits>(x);
        });
        break;
      case Format::int4:
        for (int first = 0, group = 0; first < dims_; ++group) {
          const int size = block_size(first, dims_);
          float* block = work.values + first;
          hadamard(block, size);
          work.scales[group] = scale_bits(extreme(block, size) / -8.0F);
          const float step = from_f16(work.scales[group]);
          // A block smaller than a register is followed by what the next ones overwrite.
          for (int i = 0; i < size; i += kWide) {
            const WideBits code = (rounded(clamped(load_as<Wide>(block + i) / step, -8.0F, 7.0F)) + 8U) & 15U;
            store_as(work.codes + first + i, step != 0 ? code : WideBits{} + 8U);
          }
          first += size;
        }
        break;
    }
  }

 private:
  std::uint32_t mask() const { return bits_ == 32 ? ~0U : (1U << bits_) - 1; }
  int shift_of(const Place& place) const { return place.slot % (32 / bits_) * bits_; }
  std::uint8_t* row_of(const Place& place) const { return place.data + place.slot / (32 / bits_) * dims_ * 4; }

  template <class Lanes>
  void scatter(const Lanes* lanes, const Place& to) const {
    const auto* from = reinterpret_cast<const std::uint8_t*>(lanes);
    std::uint8_t* lane = to.data + to.slot * 4;
    const int num_lanes = dims_ * bits_ / 32;
    for (int i = 0; i < num_lanes; ++i) std::memcpy(lane + i * kTile * 4, from + i * 4, 4);
  }

  // Lanes of neighbouring dims → one code a dim.
  void spread(Work& work) const {
    const auto* from = reinterpret_cast<const std::uint8_t*>(work.lanes);
    for (int i = 0; i < dims_; i += kWide) {
      WideBits codes;
      if (bits_ == 32) {
        codes = load_as<WideBits>(from + i * 4);
      } else if (bits_ == 16) {
        codes = __builtin_convertvector(load_as<Halves>(from + i * 2), WideBits);
      } else if (bits_ == 8) {
        codes = __builtin_convertvector(load_as<Bytes>(from + i), WideBits);
      } else {
        const std::uint32_t a = work.lanes[i / 8], b = work.lanes[i / 8 + 1];
        codes = WideBits{a, a, a, a, a, a, a, a, b, b, b, b, b, b, b, b};
        codes = codes >> WideBits{0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28} & 15U;
      }
      store_as(work.codes + i, codes);
    }
  }

  void pack(Work& work) const {
    auto* to = reinterpret_cast<std::uint8_t*>(work.lanes);
    for (int i = 0; i < dims_; i += kWide) {
      const WideBits codes = load_as<WideBits>(work.codes + i);
      if (bits_ == 32) {
        store_as(to + i * 4, codes);
      } else if (bits_ == 16) {
        store_as(to + i * 2, __builtin_convertvector(codes, Halves));
      } else if (bits_ == 8) {
        store_as(to + i, __builtin_convertvector(codes, Bytes));
      } else {
        // Pairs of bytes (first, second) are words first | second << 8.
        using Words = std::uint16_t __attribute__((vector_size(kWide)));
        using Pairs = std::uint8_t __attribute__((vector_size(kWide / 2)));
        const auto pairs = std::bit_cast<Words>(__builtin_convertvector(codes, Bytes));
        store_as(to + i / 2, __builtin_convertvector(pairs | pairs >> 4, Pairs));
      }
    }
  }

  template <class Function>
  void each(Work& work, Function value) const {
    for (int i = 0; i < dims_; i += kWide) store_as(work.values + i, value(load_as<WideBits>(work.codes + i)));
  }

  template <class Function>
  void again(Work& work, Function code) const {
    for (int i = 0; i < dims_; i += kWide) store_as(work.codes + i, code(load_as<Wide>(work.values + i)));
  }

  Format format_;
  Dtype dtype_;
  int bits_, dims_;
};

template <bool kIsKey>
void move(const Part<kIsKey>& source, const Place& from, const Part<kIsKey>& target, const Place& to, Work& work) {
  source.take(from, work);
  if (source.format() != target.format()) {
    source.read(work);
    target.quantise(work);
  }
  target.put(work, to);
}

}  // namespace

void write_head(const Write& call, int head) {
  const TileLayout layout(Format::exact, Format::exact, call.dtype, call.key_dim, call.value_dim);
  const Part<true> keys(Format::exact, call.dtype, call.key_dim);
  const Part<false> values(Format::exact, call.dtype, call.value_dim);
  const std::ptrdiff_t bytes = call.dtype == Dtype::f32 ? 4 : 2;
  const auto* key = static_cast<const std::uint8_t*>(call.key) + head * call.key_head * bytes;
  const auto* value = static_cast<const std::uint8_t*>(call.value) + head * call.value_head * bytes;
  std::uint8_t* blocks = call.blocks + static_cast<std::size_t>(head) * call.head_bytes;
  for (int t = 0; t < call.count; ++t) {
    const int slot = call.slots[t] % kTile;
    std::uint8_t* block = blocks + static_cast<std::size_t>(call.slots[t] / kTile) * call.page_bytes;
    keys.put_exact(key + t * call.key_token * bytes, {block, nullptr, slot});
    values.put_exact(value + t * call.value_token * bytes, {block + layout.values, nullptr, slot});
  }
}

void settle_head(const Settle& call, const SettleLayer& layer, int head) {
  const TileLayout source(layer.source_keys, layer.source_values, call.dtype, layer.key_dim, layer.value_dim);
  const TileLayout target(layer.target_keys, layer.target_values, call.dtype, layer.key_dim, layer.value_dim);
  const Part<true> old_keys(layer.source_keys, call.dtype, layer.key_dim);
  const Part<true> new_keys(layer.target_keys, call.dtype, layer.key_dim);
  const Part<false> old_values(layer.source_values, call.dtype, layer.value_dim);
  const Part<false> new_values(layer.target_values, call.dtype, layer.value_dim);
  // A place can be written to; the source's never are.
  std::uint8_t* sources =
      const_cast<std::uint8_t*>(layer.source) + static_cast<std::size_t>(head) * layer.source_head_bytes;
  std::uint8_t* targets = layer.target + static_cast<std::size_t>(head) * layer.target_head_bytes;
  Work work{};
  for (int t = 0; t < call.count; ++t) {
    std::uint8_t* from = sources + static_cast<std::size_t>(call.source_slots[t] / kTile) * layer.source_page_bytes;
    std::uint8_t* to = targets + static_cast<std::size_t>(call.target_slots[t] / kTile) * layer.target_page_bytes;
    const int old_slot = call.source_slots[t] % kTile, new_slot = call.target_slots[t] % kTile;
    move(old_keys, {from, from + source.key_scales, old_slot}, new_keys, {to, to + target.key_scales, new_slot}, work);
    move(old_values, {from + source.values, from + source.value_scales, old_slot}, new_values,
         {to + target.values, to + target.value_scales, new_slot}, work);
  }
}

}  // namespace turnkv::TURNKV_ISA
