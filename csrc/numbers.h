// Conversions between number formats, each rounded to nearest even, in portable code.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace turnkv {

inline float from_bf16(std::uint16_t bits) { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }

inline std::uint16_t to_bf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7fffffffU) > 0x7f800000U) return static_cast<std::uint16_t>((bits >> 16) | 0x40U);
  return static_cast<std::uint16_t>((bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16);
}

inline float from_f16(std::uint16_t bits) {
  const std::uint32_t sign = (bits & 0x8000U) << 16;
  const std::uint32_t rest = bits & 0x7fffU;
  if (rest >= 0x7c00U) return std::bit_cast<float>(sign | 0x7f800000U | ((rest & 0x3ffU) << 13));
  // Scaling by a power of two is exact, for subnormals too.
  const float size = std::bit_cast<float>(rest << 13) * 0x1p112F;
  return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(size));
}

inline std::uint16_t to_f16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const auto sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000U);
  const std::uint32_t size = bits & 0x7fffffffU;
  if (size > 0x7f800000U) return static_cast<std::uint16_t>(sign | 0x7e00U);
  if (size >= 0x477ff000U) return static_cast<std::uint16_t>(sign | 0x7c00U);  // rounds to infinity
  if (size < 0x38800000U) {  // subnormal: adding 0.5 leaves the mantissa's last bit worth 2^-24
    const float shifted = std::bit_cast<float>(size) + 0.5F;
    return static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(shifted) - 0x3f000000U));
  }
  const std::uint32_t rounded = size + 0xfffU + ((size >> 13) & 1U);
  return static_cast<std::uint16_t>(sign | ((rounded - 0x38000000U) >> 13));
}

inline float from_e4m3(std::uint8_t bits) {
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x80U) << 24;
  const std::uint32_t rest = bits & 0x7fU;
  if (rest == 0x7fU) return std::bit_cast<float>(sign | 0x7fc00000U);
  const float size = std::bit_cast<float>(rest << 20) * 0x1p120F;
  return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(size));
}

inline std::uint8_t to_e4m3(float value) {  // of a value within ±448
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const auto sign = static_cast<std::uint8_t>((bits >> 24) & 0x80U);
  const std::uint32_t size = bits & 0x7fffffffU;
  if (size > 0x7f800000U) return static_cast<std::uint8_t>(sign | 0x7fU);
  if (size < 0x3c800000U) {  // below 2^-6: subnormal, the last bit is worth 2^-9
    const float shifted = std::bit_cast<float>(size) + 0x1p14F;  // ulp of 2^14 is 2^-9
    return static_cast<std::uint8_t>(sign | (std::bit_cast<std::uint32_t>(shifted) - 0x46800000U));
  }
  const std::uint32_t rounded = size + 0x7ffffU + ((size >> 20) & 1U);
  return static_cast<std::uint8_t>(sign | ((rounded - 0x3c000000U) >> 20));
}

}  // namespace turnkv
