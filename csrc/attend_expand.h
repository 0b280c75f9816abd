// Tiles expanded, once for many rows of queries: to float32, or to bf16 pairs where there are instructions for those.
// Included by attend_body.cpp.

#if defined(TURNKV_DOT)
// Two vectors as bf16 pairs, rounded to nearest even.
TURNKV_INLINE __m512i paired(Floats low, Floats high) {
  const __m512i index = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                         5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(index, as<__m512i>(_mm512_cvtne2ps_pbh(as<__m512>(high), as<__m512>(low))));
}
#endif

// Keys [dims][16] as float32, or [padded / 2][16] as pairs with zeros behind `dims`.
template <Codes kCodes, bool kIsPaired>
void expand_keys(const std::uint8_t* keys, const std::uint8_t* scales, int dims, int padded, std::uint8_t* to) {
  constexpr int kCount = codes_a_lane(kCodes);
  for (int v = 0; v < kVectors; ++v) {
    int group = 0, stop = 0;
    Floats scale = splat(1.0F);
    if constexpr (kCodes == Codes::int8) scale = scales_of(scales, v);
    for (int i = 0; i < dims / kCount; ++i) {
      if constexpr (kCodes == Codes::int4)
        if (i * kCount == stop) {
          scale = scales_of(scales + 32 * group++, v);
          stop += block_size(stop, dims);
        }
      const Words lane = load<Words>(keys + i * 64 + v * kWidth * 4);
      if constexpr (!kIsPaired) {
        for (int k = 0; k < kCount; ++k)
          store(to + (i * kCount + k) * 64 + v * kWidth * 4, code_of<kCodes>(lane, k) * scale);
      } else {
#if defined(TURNKV_DOT)
        for (int k = 0; k < kCount; k += 2)
          _mm512_store_si512(to + (i * kCount + k) * 32,
                             paired(code_of<kCodes>(lane, k) * scale, code_of<kCodes>(lane, k + 1) * scale));
#endif
      }
    }
  }
  if (kIsPaired && padded > dims) std::memset(to + dims * 32, 0, static_cast<std::size_t>(padded - dims) * 32);
}

// One slot's part of a row of lanes: dims [e, e + kWidth), scaled, 0 where there is no key and behind `dims`.
template <Codes kCodes>
TURNKV_INLINE Floats value_of(const std::uint8_t* values, const std::uint8_t* scales, std::uint16_t mask, int dims,
                              int slot, int e) {
  constexpr int kCount = codes_a_lane(kCodes);
  const int left = dims - e;
  if (left <= 0 || !(mask >> slot & 1)) return Floats{};
  const std::uint8_t* from = values + static_cast<std::size_t>(slot / kCount * dims + e) * 4;
  Words lane{};
  if (left >= kWidth) lane = load<Words>(from);
  else __builtin_memcpy(&lane, from, static_cast<std::size_t>(left) * 4);
  Floats value = code_of<kCodes>(lane, slot % kCount);
  if constexpr (is_scaled(kCodes)) {
    Floats scale{};
    int group = 0, stop = kCodes == Codes::int4 ? block_size(0, dims) : dims;
    for (int i = 0; i < kWidth && i < left; ++i) {
      while (e + i >= stop) stop += block_size(stop, dims), ++group;
      std::uint16_t half;
      __builtin_memcpy(&half, scales + (group * kTile + slot) * 2, sizeof half);
      scale[i] = from_f16(half);
    }
    value *= scale;
  }
  return value;
}

// Values [16][stride] as float32, or [8][stride] as pairs; zeros in empty slots and behind `dims`.
template <Codes kCodes, bool kIsPaired>
void expand_values(const std::uint8_t* values, const std::uint8_t* scales, std::uint16_t mask, int dims, int stride,
                   std::uint8_t* to) {
  constexpr int kCount = codes_a_lane(kCodes);
  const bool is_even = dims % 16 == 0;
  for (int e = 0; e < stride; e += kWidth) {
    if (!is_even) {
      for (int slot = 0; slot < kTile; slot += kIsPaired ? 2 : 1) {
        const Floats value = value_of<kCodes>(values, scales, mask, dims, slot, e);
        if constexpr (!kIsPaired) {
          store(to + static_cast<std::size_t>(slot * stride + e) * 4, value);
        } else {
#if defined(TURNKV_DOT)
          _mm512_store_si512(to + static_cast<std::size_t>(slot / 2 * stride + e) * 4,
                             paired(value, value_of<kCodes>(values, scales, mask, dims, slot + 1, e)));
#endif
        }
      }
      continue;
    }
    float steps[kTile];
    for (int s = 0; s < kTile; ++s) steps[s] = 1.0F;
    if constexpr (is_scaled(kCodes)) {
      const int group = kCodes == Codes::int8 ? 0 : e / kBlock;
      for (int v = 0; v < kVectors; ++v) store(steps + v * kWidth, scales_of(scales + group * 32, v));
    }
    for (int j = 0; j < kTile / kCount; ++j) {
      const Words lane = load<Words>(values + static_cast<std::size_t>(j * dims + e) * 4);
      const auto value = [&](int slot) __attribute__((always_inline)) {
        const bool is_held = mask >> slot & 1;
        return is_held ? code_of<kCodes>(lane, slot % kCount) * steps[slot] : Floats{};
      };
      if constexpr (!kIsPaired) {
        for (int s = j * kCount; s < (j + 1) * kCount; ++s)
          store(to + static_cast<std::size_t>(s * stride + e) * 4, value(s));
      } else {
#if defined(TURNKV_DOT)
        for (int s = j * kCount; s < (j + 1) * kCount; s += 2)
          _mm512_store_si512(to + static_cast<std::size_t>(s / 2 * stride + e) * 4, paired(value(s), value(s + 1)));
#endif
      }
    }
  }
}
