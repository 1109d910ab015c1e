// Search for devices with which everything has room at every time, whatever the step takes.
#pragma once

#include <cstdint>
#include <vector>

#include "core.h"

namespace baechi {

struct Backtracked {
  std::vector<int32_t> devices;  // per group; empty where none were found
  bool proven;                   // where none were found: that there are none for that order
};

// Devices of all groups with which the ops, committed in `order`, stay within the memory. The order
// is topological. `budget` is counted in committed ops.
Backtracked backtrack(const Problem& problem, const std::vector<int32_t>& order, int64_t budget,
                      uint64_t seed);

}  // namespace baechi
