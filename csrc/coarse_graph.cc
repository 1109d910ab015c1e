// What a coarse graph has and a graph's own arrays do not.
#include <algorithm>

#include "core.h"

namespace baechi {

std::vector<int64_t> coarse_workspace(const Problem& problem, const std::vector<int32_t>& part_of,
                                      int32_t parts) {
  // A tensor is internal where all that consume it are in its producer's part, and something is.
  std::vector<uint8_t> internal(problem.tensors, 0);
  for (int32_t tensor = 0; tensor < problem.tensors; ++tensor) {
    const int32_t part = part_of[problem.producer[tensor]];
    bool inside = !problem.kept[tensor] && problem.consumers.size(tensor) > 0;
    for (int32_t consumer : Row(problem.consumers, tensor)) {
      inside = inside && part_of[consumer] == part;
    }
    internal[tensor] = inside;
  }
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

}  // namespace baechi
