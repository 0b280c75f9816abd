// The Walsh-Hadamard transform of a block of dims, in vectors of 16 on every machine, so that its bits are the same on all.
//
// Included by each compilation of a body, inside its own namespace: code for one instruction set must never be what the
// linker picks for another. Needs <bit>, <cstdint> and layout.h before it.

constexpr int kWide = 16;

using Wide = float __attribute__((vector_size(4 * kWide)));
using WideBits = std::uint32_t __attribute__((vector_size(4 * kWide)));
using WideInts = std::int32_t __attribute__((vector_size(4 * kWide)));

template <class To>
inline To load_as(const void* from) {
  To value;
  __builtin_memcpy(&value, from, sizeof value);
  return value;
}

template <class From>
inline void store_as(void* to, From value) {
  __builtin_memcpy(to, &value, sizeof value);
}

// Lane i ^ kStride of each lane i.
template <int kStride>
inline Wide partner(Wide of) {
  constexpr int k = kStride;
#if defined(__clang__)
  return __builtin_shufflevector(of, of, 0 ^ k, 1 ^ k, 2 ^ k, 3 ^ k, 4 ^ k, 5 ^ k, 6 ^ k, 7 ^ k, 8 ^ k, 9 ^ k, 10 ^ k,
                                 11 ^ k, 12 ^ k, 13 ^ k, 14 ^ k, 15 ^ k);
#else
  return __builtin_shuffle(of, WideInts{0 ^ k, 1 ^ k, 2 ^ k, 3 ^ k, 4 ^ k, 5 ^ k, 6 ^ k, 7 ^ k, 8 ^ k, 9 ^ k, 10 ^ k,
                                    11 ^ k, 12 ^ k, 13 ^ k, 14 ^ k, 15 ^ k});
#endif
}

// Butterflies (a + b, a - b) inside a register: a lane with bit kStride holds b, and a - b is a + (-b).
template <int kStride>
inline Wide butterfly(Wide x) {
  constexpr auto sign = [](int lane) { return lane & kStride ? 0x80000000U : 0U; };
  const WideBits signs = {sign(0), sign(1), sign(2),  sign(3),  sign(4),  sign(5),  sign(6),  sign(7),
                      sign(8), sign(9), sign(10), sign(11), sign(12), sign(13), sign(14), sign(15)};
  return partner<kStride>(x) + std::bit_cast<Wide>(std::bit_cast<WideBits>(x) ^ signs);
}

inline Wide hadamard16(Wide x) { return butterfly<8>(butterfly<4>(butterfly<2>(butterfly<1>(x)))); }

// 1 / sqrt(size) of a block.
inline float norm_of(int size) {
  switch (size) {
    case 2:
      return 0.70710678118654752F;
    case 4:
      return 0.5F;
    case 8:
      return 0.35355339059327376F;
    case 16:
      return 0.25F;
    case 32:
      return 0.17677669529663688F;
    default:
      return 1.0F;
  }
}

// The normalised Walsh-Hadamard transform of a block, in place.
inline void hadamard(float* block, int size) {
  const float norm = norm_of(size);
  if (size == 2 * kWide) {
    const Wide low = hadamard16(load_as<Wide>(block)), high = hadamard16(load_as<Wide>(block + kWide));
    store_as(block, (low + high) * norm);
    store_as(block + kWide, (low - high) * norm);
  } else if (size == kWide) {
    store_as(block, hadamard16(load_as<Wide>(block)) * norm);
  } else {
    for (int stride = 1; stride < size; stride *= 2)
      for (int i = 0; i < size; i += 2 * stride)
        for (int j = i; j < i + stride; ++j) {
          const float a = block[j], b = block[j + stride];
          block[j] = a + b;
          block[j + stride] = a - b;
        }
    for (int i = 0; i < size; ++i) block[i] *= norm;
  }
}
