// A launch order for ops whose devices are known: list scheduling by critical path.
//
// The rank of an op is the longest way from its start to the end of the step, with the transfers
// that its device makes necessary. Whenever a device is free it takes the op of highest rank among
// those whose inputs are there, or else the one whose inputs are there first. Ports are not looked
// at here.
#include <algorithm>
#include <utility>

#include "local_search.h"

namespace baechi {

namespace {

// The time that a tensor needs to another device; of no account where there is no path.
int64_t delay(const Problem& problem, int32_t tensor, int32_t src, int32_t dst) {
  if (src == dst || !problem.has_path(src, dst)) return 0;
  if (problem.pool[src] == problem.pool[dst]) return problem.latency_ns(src, dst);
  return problem.transfer_ns(tensor, src, dst);
}

}  // namespace

std::vector<int64_t> ranks(const Problem& problem, const std::vector<int32_t>& devices) {
  std::vector<int64_t> rank(problem.ops, 0);
  for (int32_t op = problem.ops - 1; op >= 0; --op) {
    for (int32_t tensor : Row(problem.outputs, op)) {
      for (int32_t consumer : Row(problem.consumers, tensor)) {
        const int64_t sent = delay(problem, tensor, devices[op], devices[consumer]);
        rank[op] = std::max(rank[op], sent + rank[consumer]);
      }
    }
    rank[op] += problem.duration(op, devices[op]);
  }
  return rank;
}

std::vector<int32_t> list_order(const Problem& problem, const std::vector<int32_t>& devices,
                                const std::vector<int64_t>& rank) {
  // Per device two heaps: of ops whose inputs are on their way, by arrival, and of those that could
  // start, by rank.
  using Entry = std::pair<int64_t, int32_t>;
  std::vector<std::vector<Entry>> coming(problem.devices), ready(problem.devices);
  std::vector<int64_t> free(problem.devices, 0), arrival(problem.ops, 0), waiting(problem.ops);
  std::vector<int32_t> order;
  order.reserve(problem.ops);
  const auto push = [](std::vector<Entry>& heap, int64_t key, int32_t op) {
    heap.emplace_back(-key, -op);
    std::push_heap(heap.begin(), heap.end());
  };
  const auto pop = [](std::vector<Entry>& heap) {
    std::pop_heap(heap.begin(), heap.end());
    const int32_t op = -heap.back().second;
    heap.pop_back();
    return op;
  };
  for (int32_t op = 0; op < problem.ops; ++op) {
    waiting[op] = problem.inputs.size(op);
    if (waiting[op] == 0) push(coming[devices[op]], 0, op);
  }
  while (static_cast<int32_t>(order.size()) < problem.ops) {
    int32_t device = -1;
    int64_t now = kForever;
    for (int32_t d = 0; d < problem.devices; ++d) {
      if (ready[d].empty() && coming[d].empty()) continue;
      const int64_t first = ready[d].empty() ? -coming[d].front().first : 0;
      const int64_t start = std::max(free[d], first);
      if (start < now) {
        now = start;
        device = d;
      }
    }
    while (!coming[device].empty() && -coming[device].front().first <= now) {
      const int32_t op = pop(coming[device]);
      push(ready[device], -rank[op], op);
    }
    const int32_t op = pop(ready[device]);
    order.push_back(op);
    const int64_t end = free[device] = now + problem.duration(op, device);
    for (int32_t tensor : Row(problem.outputs, op)) {
      for (int32_t consumer : Row(problem.consumers, tensor)) {
        const int64_t sent = delay(problem, tensor, device, devices[consumer]);
        arrival[consumer] = std::max(arrival[consumer], end + sent);
        if (--waiting[consumer] == 0) push(coming[devices[consumer]], arrival[consumer], consumer);
      }
    }
  }
  return order;
}

}  // namespace baechi
