// Problems for coarse graphs and for clusters of groups.
#include <algorithm>

#include "clock/core.h"
#include "coarsening/coarse.h"

namespace baechi {

std::vector<int64_t> coarse_workspace(const Problem& problem, const std::vector<int32_t>& part_of,
                                      int32_t parts, const std::vector<int32_t>& tensors) {
  std::vector<uint8_t> internal(problem.tensors, 1);
  for (int32_t tensor : tensors) internal[tensor] = 0;
  std::vector<int64_t> live(parts, 0), peak(parts, 0);
  for (int32_t op = 0; op < problem.ops; ++op) {
    const int32_t part = part_of[op];
    for (int32_t tensor : Row(problem.outputs, op)) {
      if (internal[tensor]) live[part] += problem.nbytes[tensor];
    }
    peak[part] = std::max(peak[part], live[part] + problem.workspace[op]);
    for (int32_t tensor : Row(problem.inputs, op)) {
      if (internal[tensor] && *(problem.consumers.last(tensor) - 1) == op) {
        live[part] -= problem.nbytes[tensor];
      }
    }
  }
  return peak;
}

CoarseTensors coarse_tensors(const Problem& problem, const std::vector<int32_t>& part_of,
                             int32_t parts) {
  CoarseTensors result;
  result.consumers.begin.push_back(0);
  std::vector<int32_t> seen(parts, -1);
  for (int32_t tensor = 0; tensor < problem.tensors; ++tensor) {
    const int32_t producer = part_of[problem.producer[tensor]];
    std::vector<int32_t>& row = result.consumers.values;
    seen[producer] = tensor;
    for (int32_t consumer : Row(problem.consumers, tensor)) {
      const int32_t part = part_of[consumer];
      if (seen[part] != tensor) row.push_back(part);
      seen[part] = tensor;
    }
    const int64_t begin = result.consumers.begin.back();
    const int64_t end = static_cast<int64_t>(row.size());
    const bool internal =
        end == begin && !problem.kept[tensor] && problem.consumers.size(tensor) > 0;
    if (internal) continue;
    std::sort(row.begin() + begin, row.end());
    result.tensors.push_back(tensor);
    result.consumers.begin.push_back(end);
  }
  return result;
}

namespace {

// Devices allowed for each new group: those allowed for all of its old ones.
std::vector<uint8_t> allowed_together(const Problem& problem, const std::vector<int32_t>& group_of,
                                      int32_t groups) {
  if (problem.allowed.empty()) return {};
  std::vector<uint8_t> allowed(static_cast<size_t>(problem.devices) * groups, 1);
  for (int32_t device = 0; device < problem.devices; ++device) {
    uint8_t* row = allowed.data() + static_cast<int64_t>(device) * groups;
    const uint8_t* old = problem.allowed.data() + static_cast<int64_t>(device) * problem.groups;
    for (int32_t group = 0; group < problem.groups; ++group) row[group_of[group]] &= old[group];
  }
  return allowed;
}

}  // namespace

Problem regrouped(const Problem& problem, const std::vector<int32_t>& cluster) {
  Problem result = problem;
  result.groups = problem.groups == 0 ? 0 : 1 + *std::max_element(cluster.begin(), cluster.end());
  std::vector<int64_t> persistent(result.groups, 0);
  for (int32_t group = 0; group < problem.groups; ++group) {
    persistent[cluster[group]] += problem.group_persistent[group];
  }
  std::vector<int32_t> op_group = problem.group.copy();
  for (int32_t& group : op_group) group = cluster[group];
  result.group = std::move(op_group);
  result.group_persistent = std::move(persistent);
  result.allowed = allowed_together(problem, cluster, result.groups);
  result.derive();
  result.finish();
  return result;
}

}  // namespace baechi
