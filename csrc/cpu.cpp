#include "cpu.h"

#if defined(TURNKV_HAS_AMX) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace turnkv {
namespace {

#if defined(TURNKV_HAS_AMX)
bool has_amx() {
#if defined(__linux__)
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  const bool has_tiles = d >> 24 & 1, has_bf16 = d >> 22 & 1;
  // The system grants a process the tile registers when it asks for them.
  constexpr int kRequest = 0x1023, kTileData = 18;
  return has_tiles && has_bf16 && syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
#else
  return false;
#endif
}
#endif

std::vector<Isa> found() {
  std::vector<Isa> all = {{"portable", portable::attend, portable::write_head, portable::settle_head, portable::block, portable::product}};
#if defined(TURNKV_HAS_AVX2)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
    all.push_back({"avx2", avx2::attend, avx2::write_head, avx2::settle_head, avx2::block, avx2::product});
#endif
#if defined(TURNKV_HAS_AVX512)
  const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (has_avx512) all.push_back({"avx512", avx512::attend, avx512::write_head, avx512::settle_head, avx512::block, avx512::product});
#endif
  // Settling has no use for products of bf16 or int8: from here on its body stays the same.
#if defined(TURNKV_HAS_AVX512BF16)
  const bool has_bf16 =
      has_avx512 && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
  if (has_bf16) all.push_back({"avx512bf16", avx512bf16::attend, avx512::write_head, avx512::settle_head, avx512bf16::block,
                   avx512bf16::product});
#endif
#if defined(TURNKV_HAS_AMX)
  if (has_bf16 && has_amx()) all.push_back({"amx", amx::attend, avx512::write_head, avx512::settle_head, amx::block, amx::product});
#endif
  return all;
}

}  // namespace

const std::vector<Isa>& isas() {
  static const std::vector<Isa> all = found();
  return all;
}

}  // namespace turnkv
