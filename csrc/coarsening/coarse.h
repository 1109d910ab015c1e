// Coarser views of a problem: its ops in parts, its groups in clusters, some of its devices.
#pragma once

#include "clock/core.h"

namespace baechi {

// A coarse graph: its parts are sets of ops, numbered in topological order.
struct CoarseGraph {
  std::vector<int32_t> part_of;  // per op
  std::vector<int32_t> group;    // per part, the first part of its group
};

// The parts that the rules of `baechi.problem.coarsening` make. `idle[op]` says which ops cost
// nothing; no group gets more than `limit` bytes; groups of the problem with different `color` are
// not joined, and an empty vector is one color for all.
CoarseGraph coarsen(const Problem& problem, const std::vector<uint8_t>& idle,
                    const std::vector<int32_t>& color, int64_t limit);

// The tensors that leave their part, or stay, and for each the other parts that consume it,
// ascending.
struct CoarseTensors {
  std::vector<int32_t> tensors;
  Rows consumers;
};
CoarseTensors coarse_tensors(const Problem& problem, const std::vector<int32_t>& part_of,
                             int32_t parts);

// Per part, the most bytes of workspaces and of tensors that never leave it, so are not among
// these, while its ops run in order.
std::vector<int64_t> coarse_workspace(const Problem& problem, const std::vector<int32_t>& part_of,
                                      int32_t parts, const std::vector<int32_t>& tensors);

// The same problem with the groups of each cluster joined into one.
Problem regrouped(const Problem& problem, const std::vector<int32_t>& cluster);

// Nested clusters of well-connected groups: per level and group its cluster, counted by first
// group. Level 0 has every group alone, every other level joins clusters of the one before, and the
// last has a handful. Groups of different `color` are never in one cluster; an empty vector is one
// color for all.
std::vector<std::vector<int32_t>> group_clusters(const Problem& problem,
                                                 const std::vector<int32_t>& color);

}  // namespace baechi
