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

Problem restricted(const Problem& problem, const std::vector<int32_t>& devices) {
  Problem result = problem;
  const int32_t n = static_cast<int32_t>(devices.size());
  result.devices = n;
  result.device_class.clear();
  result.pool.clear();
  result.memory.clear();
  std::vector<int32_t> pool_of(problem.pools, -1);
  for (int32_t device : devices) {
    int32_t& pool = pool_of[problem.pool[device]];
    if (pool < 0) {
      pool = static_cast<int32_t>(result.memory.size());
      result.memory.push_back(problem.memory[problem.pool[device]]);
    }
    result.pool.push_back(pool);
    result.device_class.push_back(problem.device_class[device]);
  }
  result.host.clear();
  result.ahead.clear();
  for (int32_t device : devices) {
    if (problem.hosts > 0) result.host.push_back(problem.host[device]);
    result.ahead.push_back(problem.ahead[device]);
  }
  result.pools = static_cast<int32_t>(result.memory.size());
  if (problem.rate.values.size() > 1) {
    result.latency.values.assign(static_cast<size_t>(n) * n, 0);
    result.rate.values.assign(static_cast<size_t>(n) * n, 0);
    const bool overhead = !problem.overhead.values.empty();
    if (overhead) result.overhead.values.assign(static_cast<size_t>(n) * n, 0);
    for (int32_t src = 0; src < n; ++src) {
      for (int32_t dst = 0; dst < n; ++dst) {
        const size_t at = static_cast<size_t>(src) * n + dst;
        result.latency.values[at] = problem.latency_ns(devices[src], devices[dst]);
        result.rate.values[at] = problem.bytes_per_s(devices[src], devices[dst]);
        if (overhead) result.overhead.values[at] = problem.overhead_ns(devices[src], devices[dst]);
      }
    }
  }
  if (!problem.allowed.empty()) {
    result.allowed.clear();
    for (int32_t device : devices) {
      const auto row = problem.allowed.begin() + static_cast<int64_t>(device) * problem.groups;
      result.allowed.insert(result.allowed.end(), row, row + problem.groups);
    }
  }
  result.finish();
  return result;
}

}  // namespace baechi
