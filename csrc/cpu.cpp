#include "cpu.h"

#if defined(TURNKV_X86)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace turnkv {
namespace {

#if defined(TURNKV_X86)
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
  std::vector<Isa> all = {{"portable", portable::attend}};
#if defined(TURNKV_X86)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) all.push_back({"avx2", avx2::attend});
  const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (has_avx512) all.push_back({"avx512", avx512::attend});
  if (has_avx512 && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16")) {
    all.push_back({"avx512bf16", avx512bf16::attend});
    if (has_amx()) all.push_back({"amx", amx::attend});
  }
#endif
  return all;
}

}  // namespace

const std::vector<Isa>& isas() {
  static const std::vector<Isa> all = found();
  return all;
}

}  // namespace turnkv
