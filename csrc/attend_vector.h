// Vectors of the width that an instruction set has, in the vector extensions of GCC and Clang.
//
// Included by each compilation of attend_body.cpp, inside its own namespace: code for one instruction set must never be
// what the linker picks for another.

#if defined(__AVX512F__)
constexpr int kWidth = 16;
#elif defined(__AVX2__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif
constexpr int kVectors = kTile / kWidth;  // of a row of 16 lanes

using Floats = float __attribute__((vector_size(kWidth * 4)));
using Ints = std::int32_t __attribute__((vector_size(kWidth * 4)));
using Words = std::uint32_t __attribute__((vector_size(kWidth * 4)));

#define TURNKV_INLINE inline __attribute__((always_inline))

template <class Vector>
TURNKV_INLINE Vector load(const void* from) {
  Vector value;
  __builtin_memcpy(&value, from, sizeof value);
  return value;
}

template <class Vector>
TURNKV_INLINE void store(void* to, Vector value) {
  __builtin_memcpy(to, &value, sizeof value);
}

template <class To, class From>
TURNKV_INLINE To as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  return reinterpret_cast<To>(from);
}

TURNKV_INLINE Floats splat(float value) { return Floats{} + value; }

TURNKV_INLINE Floats maximum(Floats a, Floats b) {
#if defined(__AVX512F__)
  return as<Floats>(_mm512_max_ps(as<__m512>(a), as<__m512>(b)));
#elif defined(__AVX2__)
  return as<Floats>(_mm256_max_ps(as<__m256>(a), as<__m256>(b)));
#else
  return a > b ? a : b;
#endif
}

TURNKV_INLINE float highest_of(Floats value) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps(as<__m512>(value));
#else
  float best = value[0];
  for (int i = 1; i < kWidth; ++i) best = value[i] > best ? value[i] : best;
  return best;
#endif
}

// Whether any lane of a is above b.
TURNKV_INLINE bool any_above(Floats a, float b) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask(as<__m512>(a), _mm512_set1_ps(b), _CMP_GT_OQ) != 0;
#else
  return highest_of(a) > b;
#endif
}

// 2 to the power of x <= 0; exactly 0 below -100. Relative error below 1e-7, or below 3e-6 where a result is rounded to
// 16 bits anyway (minimax polynomials over [-0.5, 0.5]).
template <bool kIsRough>
TURNKV_INLINE Floats power_of_two(Floats x) {
#if defined(__AVX512F__)
  const __m512 clamped = _mm512_max_ps(as<__m512>(x), _mm512_set1_ps(-101.0F));
  const __m512 whole = _mm512_roundscale_ps(clamped, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const Floats r = as<Floats>(_mm512_sub_ps(clamped, whole));
#else
  const Ints is_tiny = x < splat(-100.0F);
  x = is_tiny ? splat(-100.0F) : x;
  const Floats shifted = x + splat(12582912.0F);
  const Floats r = x - (shifted - splat(12582912.0F));
#endif
  Floats y;
  if constexpr (kIsRough) {
    y = r * splat(9.570101276e-3F) + splat(5.591785908e-2F);
    y = y * r + splat(2.402474433e-1F);
    y = y * r + splat(6.931217909e-1F);
    y = y * r + splat(9.999992847e-1F);
  } else {
    y = r * splat(1.327647129e-3F) + splat(9.675540961e-3F);
    y = y * r + splat(5.550713092e-2F);
    y = y * r + splat(2.402212024e-1F);
    y = y * r + splat(6.931469440e-1F);
    y = y * r + splat(1.0000001F);
  }
#if defined(__AVX512F__)
  const __mmask16 is_held = _mm512_cmp_ps_mask(as<__m512>(x), _mm512_set1_ps(-100.0F), _CMP_GE_OQ);
  return as<Floats>(_mm512_maskz_scalef_ps(is_held, as<__m512>(y), whole));
#else
  const Ints power = (as<Ints>(shifted) - 0x4b400000 + 127) << 23;
  return is_tiny ? Floats{} : y * as<Floats>(power);
#endif
}

// What a lane of 32 bits holds: a float, or several codes. `ready` is float32 that lies in the cache already.
enum class Codes { ready, f32, bf16, f16, int8, fp8, int4 };

constexpr int codes_a_lane(Codes codes) {
  switch (codes) {
    case Codes::ready: case Codes::f32: return 1;
    case Codes::bf16: case Codes::f16: return 2;
    case Codes::int4: return 8;
    default: return 4;
  }
}

constexpr bool is_scaled(Codes codes) { return codes == Codes::int8 || codes == Codes::int4; }

// Code number `at` of each lane, without its scale.
template <Codes kCodes>
TURNKV_INLINE Floats code_of(Words lane, int at) {
  if constexpr (codes_a_lane(kCodes) == 1) return as<Floats>(lane);
  if constexpr (kCodes == Codes::bf16) return as<Floats>(at ? lane & 0xffff0000U : lane << 16);
  if constexpr (kCodes == Codes::f16) return f16_value<Floats>(at ? lane >> 16 : lane);
  if constexpr (kCodes == Codes::int8)
    return __builtin_convertvector(as<Ints>(lane << (24 - 8 * at)) >> 24, Floats);
  if constexpr (kCodes == Codes::fp8) return e4m3_value<Floats>(lane >> (8 * at));
  if constexpr (kCodes == Codes::int4)
    return __builtin_convertvector(as<Ints>(lane >> (4 * at) & 15U) - 8, Floats);
}

// Vector v of the scales of 16 tokens.
TURNKV_INLINE Floats scales_of(const std::uint8_t* from, int v) {
#if defined(__AVX512F__)
  static_cast<void>(v);
  return as<Floats>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
#else
  std::uint16_t halves[kWidth];
  __builtin_memcpy(halves, from + v * kWidth * 2, sizeof halves);
  Words bits{};
  for (int i = 0; i < kWidth; ++i) bits[i] = halves[i];
  return f16_value<Floats>(bits);
#endif
}

// Into the second-level cache: the first is too small for what is read a chunk of tiles later.
TURNKV_INLINE void ask_for(const std::uint8_t* line) { __builtin_prefetch(line, 0, 2); }

// Calls f with a constant R = min(rows, 4).
template <class F>
TURNKV_INLINE void with_rows(int rows, F&& f) {
  switch (rows) {
    case 1: return f.template operator()<1>();
    case 2: return f.template operator()<2>();
    case 3: return f.template operator()<3>();
    default: return f.template operator()<4>();
  }
}

template <class F>
TURNKV_INLINE void with_codes(Codes codes, F&& f) {
  switch (codes) {
    case Codes::ready: return f.template operator()<Codes::ready>();
    case Codes::f32: return f.template operator()<Codes::f32>();
    case Codes::bf16: return f.template operator()<Codes::bf16>();
    case Codes::f16: return f.template operator()<Codes::f16>();
    case Codes::int8: return f.template operator()<Codes::int8>();
    case Codes::fp8: return f.template operator()<Codes::fp8>();
    case Codes::int4: return f.template operator()<Codes::int4>();
  }
}
