// Which of the compiled bodies this machine can run.
#pragma once

#include <string>
#include <vector>

#include "attend.h"
#include "block.h"
#include "settle.h"

namespace turnkv {

// An instruction set and the bodies compiled for it.
struct Isa {
  std::string name;
  void (*attend)(const Attend&);
  void (*write_head)(const Write&, int head);
  void (*settle_head)(const Settle&, const SettleLayer&, int head);
  void (*block)(const Block&, const BlockStep&, const Isa&);
  void (*product)(const Product&);
};

// Those that run here, the plainest first and the fastest last. A caller names one by its index.
const std::vector<Isa>& isas();

}  // namespace turnkv
