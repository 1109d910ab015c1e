#pragma once

#include <cstdint>
#include <vector>

#include "core.h"

namespace baechi {

// A placement as `local_search` leaves it, and what it takes.
struct Found {
  std::vector<int32_t> devices, order;
  int64_t makespan = 0, overflow = 0;  // ns, and bytes that do not fit
  int64_t evaluations = 0;
};

// The best placement met from a start on, never worse than it. `devices` per op, groups together;
// `order` topological; `clusters` per level and group a cluster of groups that may move as one;
// `budget` in evaluated ops.
Found local_search(const Problem& problem, const std::vector<int32_t>& devices,
                   const std::vector<int32_t>& order,
                   const std::vector<std::vector<int32_t>>& clusters, int64_t budget,
                   uint64_t seed);

}  // namespace baechi
