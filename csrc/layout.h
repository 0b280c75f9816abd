// How the codes of 16 tokens lie in memory; the same as src/turnkv/cache/tiles.py, which draws it.
//
// Functions in headers are static: a body for a newer instruction set must not lend its copy to an older one.
#pragma once

#include <cstddef>
#include <cstdint>

namespace turnkv {

constexpr int kTile = 16;     // tokens in a tile, which is a page
constexpr int kBlock = 32;    // dims that an int4 group, and a Hadamard transform, takes at most
constexpr int kMaxDim = 512;  // largest head dim

enum class Dtype : int { f32 = 0, bf16 = 1, f16 = 2 };
enum class Format : int { exact = 0, int8 = 1, fp8 = 2, int4 = 3 };

static constexpr int code_bits(Format format, Dtype dtype) {
  switch (format) {
    case Format::exact:
      return dtype == Dtype::f32 ? 32 : 16;
    case Format::int4:
      return 4;
    default:
      return 8;
  }
}

// Size of the block of dims that begins at `first`: a power of two, 32 where it fits.
static constexpr int block_size(int first, int dims) {
  const int left = dims - first < kBlock ? dims - first : kBlock;
  int size = 1;
  while (size * 2 <= left) size *= 2;
  return size;
}

static constexpr int num_blocks(int dims) {
  int count = 0;
  for (int first = 0; first < dims; first += block_size(first, dims)) ++count;
  return count;
}

static constexpr int num_scales(Format format, int dims) {
  return format == Format::int8 ? 1 : format == Format::int4 ? num_blocks(dims) : 0;
}

// Offsets inside a head block, bytes.
struct TileLayout {
  Format key_format, value_format;
  std::size_t values, key_scales, value_scales, end;

  constexpr TileLayout(Format keys_in, Format values_in, Dtype dtype, int key_dim, int value_dim)
      : key_format(keys_in),
        value_format(values_in),
        values(code_bytes(keys_in, dtype, key_dim)),
        key_scales(values + code_bytes(values_in, dtype, value_dim)),
        value_scales(key_scales + scale_bytes(keys_in, key_dim)),
        end(value_scales + scale_bytes(values_in, value_dim)) {}

  // A multiple of 64, a line of the cache.
  constexpr std::size_t head_bytes() const { return (end + 63) / 64 * 64; }

 private:
  static constexpr std::size_t code_bytes(Format format, Dtype dtype, int dims) {
    return static_cast<std::size_t>(dims * code_bits(format, dtype) * kTile / 8);
  }
  static constexpr std::size_t scale_bytes(Format format, int dims) {
    return static_cast<std::size_t>(num_scales(format, dims) * kTile * 2);
  }
};

// The same figures as in tests/cache/test_storage.py and test_formats.py.
static_assert(num_blocks(64) == 2 && num_blocks(80) == 3 && num_blocks(40) == 2 && num_blocks(31) == 5);
static_assert(block_size(64, 80) == 16 && block_size(0, 8) == 8 && block_size(0, 7) == 4 && block_size(6, 7) == 1);
static_assert(TileLayout(Format::exact, Format::exact, Dtype::bf16, 64, 64).head_bytes() == 4096);
static_assert(TileLayout(Format::int8, Format::int8, Dtype::bf16, 40, 7).head_bytes() == 832);
static_assert(TileLayout(Format::int4, Format::int4, Dtype::f32, 8, 8).head_bytes() == 192);
static_assert(TileLayout(Format::int4, Format::int4, Dtype::f32, 40, 7).end == 536);
static_assert(TileLayout(Format::int8, Format::int4, Dtype::f16, 64, 32).values == 64 * kTile);
static_assert(TileLayout(Format::int8, Format::int4, Dtype::f16, 64, 32).key_scales == 64 * kTile + 32 * kTile / 2);
static_assert(TileLayout(Format::int8, Format::int4, Dtype::f16, 64, 32).value_scales == 64 * kTile + 32 * 8 + 32);

}  // namespace turnkv
