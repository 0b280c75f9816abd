// Memory that a thread keeps from call to call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

namespace turnkv {
namespace {

class Memory {
 public:
  // At least so many bytes, 64-byte aligned; what was in them before is lost when they grow.
  std::uint8_t* of(std::size_t bytes) {
    if (bytes > size_) {
      memory_.reset(static_cast<std::uint8_t*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64)));
      if (!memory_) throw std::bad_alloc();
      size_ = bytes;
    }
    return memory_.get();
  }

 private:
  struct Free {
    void operator()(std::uint8_t* memory) const { std::free(memory); }
  };
  std::unique_ptr<std::uint8_t, Free> memory_;
  std::size_t size_ = 0;
};

}  // namespace
}  // namespace turnkv
