// Which of the compiled bodies this machine can run.
#pragma once

#include <string>
#include <vector>

#include "attend.h"

namespace turnkv {

struct Isa {
  std::string name;
  void (*attend)(const Attend&);
};

// Bodies that run here, the plainest first and the fastest last.
const std::vector<Isa>& isas();

}  // namespace turnkv
