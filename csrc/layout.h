// How the codes of 16 tokens lie in memory; the same as src/turnkv/cache/tiles.py, which draws it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace turnkv {

constexpr int kTile = 16;       // tokens in a tile, which is a page
constexpr int kBlock = 32;      // dims that an int4 group, and a Hadamard transform, takes at most
constexpr int kMaxDim = 512;    // largest head dim

enum class Dtype : int { f32 = 0, bf16 = 1, f16 = 2 };
enum class Format : int { exact = 0, int8 = 1, fp8 = 2, int4 = 3 };

inline int code_bits(Format format, Dtype dtype) {
  switch (format) {
    case Format::exact: return dtype == Dtype::f32 ? 32 : 16;
    case Format::int4: return 4;
    default: return 8;
  }
}

// Size of the block of dims that begins at `first`: a power of two, 32 where it fits.
inline int block_size(int first, int dims) {
  const int left = std::min(dims - first, kBlock);
  int size = 1;
  while (size * 2 <= left) size *= 2;
  return size;
}

inline int num_blocks(int dims) {
  int count = 0;
  for (int first = 0; first < dims; first += block_size(first, dims)) ++count;
  return count;
}

inline int num_scales(Format format, int dims) {
  return format == Format::int8 ? 1 : format == Format::int4 ? num_blocks(dims) : 0;
}

// Offsets inside a head block, bytes.
struct TileLayout {
  Format key_format, value_format;
  std::size_t values, key_scales, value_scales, end;

  TileLayout(Format keys_in, Format values_in, Dtype dtype, int key_dim, int value_dim)
      : key_format(keys_in), value_format(values_in) {
    const auto bytes = [dtype](Format format, int dims) {
      return static_cast<std::size_t>(dims) * static_cast<std::size_t>(code_bits(format, dtype)) * kTile / 8;
    };
    values = bytes(keys_in, key_dim);
    key_scales = values + bytes(values_in, value_dim);
    value_scales = key_scales + static_cast<std::size_t>(num_scales(keys_in, key_dim)) * kTile * 2;
    end = value_scales + static_cast<std::size_t>(num_scales(values_in, value_dim)) * kTile * 2;
  }
};

}  // namespace turnkv
