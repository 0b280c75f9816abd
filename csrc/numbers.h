// Conversions between number formats, each rounded to nearest even, in portable code.
//
// The templates take single numbers (float, uint32_t) and GCC's vectors of them alike.
#pragma once

#include <bit>
#include <cstdint>

namespace turnkv {

template <class Float, class Bits>
static inline Float bf16_value(Bits bits) {
  return std::bit_cast<Float>(bits << 16);
}

template <class Bits, class Float>
static inline Bits bf16_bits(Float value) {
  const Bits bits = std::bit_cast<Bits>(value);
  const Bits rounded = (bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16;
  const Bits quiet = (bits >> 16) | 0x40U;
  return (bits & 0x7fffffffU) > 0x7f800000U ? quiet : rounded;
}

template <class Float, class Bits>
static inline Float f16_value(Bits bits) {
  const Bits sign = (bits & 0x8000U) << 16;
  const Bits rest = bits & 0x7fffU;
  // Scaling by a power of two is exact, for subnormals too.
  const Float size = std::bit_cast<Float>(rest << 13) * 0x1p112F;
  const Bits special = (rest << 13) | 0x7f800000U;
  return std::bit_cast<Float>(sign | (rest >= 0x7c00U ? special : std::bit_cast<Bits>(size)));
}

template <class Bits, class Float>
static inline Bits f16_bits(Float value) {
  const Bits bits = std::bit_cast<Bits>(value);
  const Bits sign = (bits >> 16) & 0x8000U;
  const Bits size = bits & 0x7fffffffU;
  const Bits normal = (size + 0xfffU + ((size >> 13) & 1U) - 0x38000000U) >> 13;
  // Subnormal: adding 0.5 leaves the mantissa's last bit worth 2^-24.
  const Float shifted = std::bit_cast<Float>(size) + 0.5F;
  const Bits small = std::bit_cast<Bits>(shifted) - 0x3f000000U;
  const Bits infinity = (size & 0U) + 0x7c00U, nan = (size & 0U) + 0x7e00U;
  const Bits finite = size < 0x38800000U ? small : normal;
  const Bits number = size >= 0x477ff000U ? infinity : finite;  // rounds to infinity
  return sign | (size > 0x7f800000U ? nan : number);
}

template <class Float, class Bits>
static inline Float e4m3_value(Bits bits) {
  const Bits sign = (bits & 0x80U) << 24;
  const Bits rest = bits & 0x7fU;
  const Float size = std::bit_cast<Float>(rest << 20) * 0x1p120F;
  const Bits nan = (rest & 0U) + 0x7fc00000U;
  return std::bit_cast<Float>(sign | (rest == 0x7fU ? nan : std::bit_cast<Bits>(size)));
}

template <class Bits, class Float>
static inline Bits e4m3_bits(Float value) {  // of a value within ±448
  const Bits bits = std::bit_cast<Bits>(value);
  const Bits sign = (bits >> 24) & 0x80U;
  const Bits size = bits & 0x7fffffffU;
  const Bits normal = (size + 0x7ffffU + ((size >> 20) & 1U) - 0x3c000000U) >> 20;
  // Below 2^-6 subnormal, the last bit worth 2^-9: the unit in the last place of 2^14.
  const Float shifted = std::bit_cast<Float>(size) + 0x1p14F;
  const Bits small = std::bit_cast<Bits>(shifted) - 0x46800000U;
  const Bits nan = (size & 0U) + 0x7fU;
  const Bits number = size < 0x3c800000U ? small : normal;
  return sign | (size > 0x7f800000U ? nan : number);
}

static inline float from_bf16(std::uint16_t bits) { return bf16_value<float>(std::uint32_t{bits}); }
static inline float from_f16(std::uint16_t bits) { return f16_value<float>(std::uint32_t{bits}); }
static inline float from_e4m3(std::uint8_t bits) { return e4m3_value<float>(std::uint32_t{bits}); }

static inline std::uint16_t to_bf16(float value) {
  return static_cast<std::uint16_t>(bf16_bits<std::uint32_t>(value));
}
static inline std::uint16_t to_f16(float value) { return static_cast<std::uint16_t>(f16_bits<std::uint32_t>(value)); }

}  // namespace turnkv
