// A launch order for ops whose devices are known: list scheduling by critical path.
//
// The rank of an op is the longest path from its start to the end of the step, with the transfers
// required by its device. A free device takes the op of highest rank among those whose inputs have
// arrived, or else the op whose inputs arrive first. Ports, hosts and arrivals follow the clock,
// except for copies within a pool, which any of its devices may have fetched; and an op waits for
// its device's host even if it takes no launch.
#include <algorithm>
#include <utility>

#include "search/local_search.h"

namespace baechi {

namespace {

// The transfer time of a tensor, and its overhead; irrelevant where there is no path.
int64_t delay(const Problem& problem, int32_t tensor, int32_t src, int32_t dst) {
  if (src == dst || !problem.has_path(src, dst)) return 0;
  if (problem.pool[src] == problem.pool[dst]) return problem.latency_ns(src, dst);
  return problem.transfer_ns(tensor, src, dst) + problem.overhead_ns(src, dst);
}

// The clock, with its ports, and what waits on each device.
class Listing {
 public:
  Listing(const Problem& problem, const std::vector<int32_t>& devices,
          const std::vector<int64_t>& rank)
      : problem_(problem),
        devices_(devices),
        rank_(rank),
        coming_(problem.devices),
        ready_(problem.devices),
        free_(problem.devices, 0),
        send_(problem.devices, 0),
        receive_(problem.devices, 0),
        host_(problem.hosts, 0),
        end_(problem.ops, 0),
        waiting_(problem.ops, 0),
        fetches_(problem.ops, 0),
        copies_(static_cast<size_t>(problem.tensors) * problem.pools, -1) {}

  std::vector<int32_t> run() {
    std::vector<int32_t> order;
    order.reserve(problem_.ops);
    for (int32_t op = 0; op < problem_.ops; ++op) {
      waiting_[op] = problem_.inputs.size(op);
      if (waiting_[op] == 0) push(coming_[devices_[op]], 0, op);
    }
    while (static_cast<int32_t>(order.size()) < problem_.ops) {
      const auto [now, op] = next();
      order.push_back(op);
      const int32_t device = devices_[op];
      int64_t received = 0;
      if (fetches_[op]) {
        arrival(op, true);
        for (const auto& [produced, tensor] : missing_) {
          received += problem_.overhead_ns(devices_[problem_.producer[tensor]], device);
        }
      }
      const int64_t start = std::max(now, problem_.launched(op, device, received, host_.data()));
      problem_.launch_at(op, device, received, start, host_.data());
      end_[op] = free_[device] = start + problem_.busy_ns(op, device, received);
      for (int32_t tensor : Row(problem_.outputs, op)) {
        for (int32_t consumer : Row(problem_.consumers, tensor)) {
          if (--waiting_[consumer] == 0) {
            push(coming_[devices_[consumer]], arrival(consumer, false), consumer);
            fetches_[consumer] = !missing_.empty();
          }
        }
      }
    }
    return order;
  }

 private:
  using Entry = std::pair<int64_t, int32_t>;

  static void push(std::vector<Entry>& heap, int64_t key, int32_t op) {
    heap.emplace_back(-key, -op);
    std::push_heap(heap.begin(), heap.end());
  }
  static int32_t pop(std::vector<Entry>& heap) {
    std::pop_heap(heap.begin(), heap.end());
    const int32_t op = -heap.back().second;
    heap.pop_back();
    return op;
  }

  // The next op and its start. Arrivals only get later, as ports get busy: they are updated when
  // used.
  Entry next() {
    while (true) {
      int32_t device = -1;
      int64_t now = kForever;
      for (int32_t d = 0; d < problem_.devices; ++d) {
        if (ready_[d].empty() && coming_[d].empty()) continue;
        const int64_t first = ready_[d].empty() ? -coming_[d].front().first : 0;
        const int64_t start = std::max({free_[d], first, problem_.free_host(d, host_.data())});
        if (start < now) {
          now = start;
          device = d;
        }
      }
      std::vector<Entry>&coming = coming_[device], &ready = ready_[device];
      while (!coming.empty() && -coming.front().first <= now) {
        const int32_t op = pop(coming);
        push(ready, -rank_[op], op);
      }
      const int32_t op = pop(ready);
      const int64_t at = fetches_[op] ? arrival(op, false) : now;
      if (at <= now) return {now, op};
      push(coming, at, op);
    }
  }

  // Arrival of an op's inputs; with `send` they are sent.
  int64_t arrival(int32_t op, bool send) {
    const int32_t device = devices_[op], pool = problem_.pool[device];
    int64_t ready = 0;
    missing_.clear();
    for (int32_t tensor : Row(problem_.inputs, op)) {
      const int32_t producer = problem_.producer[tensor], src = devices_[producer];
      if (src == device) {
        ready = std::max(ready, end_[producer]);
      } else if (problem_.pool[src] == pool || !problem_.has_path(src, device)) {
        ready = std::max(ready, end_[producer] + delay(problem_, tensor, src, device));
      } else if (const int64_t there = copy(tensor, pool); there >= 0) {
        ready = std::max(ready, there);
      } else {
        missing_.emplace_back(end_[producer], tensor);
      }
    }
    if (missing_.size() > 1) std::sort(missing_.begin(), missing_.end());
    const bool ports = problem_.ports != Ports::kNone;
    int64_t received = receive_[device];
    for (const auto& [produced, tensor] : missing_) {
      const int32_t src = devices_[problem_.producer[tensor]];
      const int64_t begin = ports ? std::max({produced, send_[src], received}) : produced;
      const int64_t end = begin + problem_.transfer_ns(tensor, src, device);
      ready = std::max(ready, end);
      received = std::max(received, end);
      if (!send) continue;
      copy(tensor, pool) = end;
      send_[src] = receive_[device] = end;
      if (problem_.ports == Ports::kShared) receive_[src] = send_[device] = end;
    }
    return ready;
  }

  int64_t& copy(int32_t tensor, int32_t pool) {
    return copies_[static_cast<int64_t>(tensor) * problem_.pools + pool];
  }

  const Problem& problem_;
  const std::vector<int32_t>& devices_;
  const std::vector<int64_t>& rank_;
  // Per device two heaps: of ops whose inputs are on their way, by arrival, and of those that could
  // start, by rank.
  std::vector<std::vector<Entry>> coming_, ready_;
  std::vector<int64_t> free_, send_, receive_, host_, end_, waiting_;
  std::vector<uint8_t> fetches_;  // per op, whether something had to be sent when it was first seen
  std::vector<int64_t> copies_;   // per tensor and pool, when it is there, or -1
  std::vector<std::pair<int64_t, int32_t>> missing_;
};

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
  return Listing(problem, devices, rank).run();
}

}  // namespace baechi
