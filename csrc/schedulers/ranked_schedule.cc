// Schedulers by rank: HEFT's, and PEFT's with lookahead (`placers/list_schedulers.py`).
#include <algorithm>
#include <iterator>
#include <map>
#include <queue>

#include "clock/core.h"

namespace baechi {

namespace {

__extension__ typedef __int128 int128_t;

// The mean of table[class * ops + op] over the devices, per op, rounded down.
std::vector<int64_t> mean_over_devices(const Problem& problem, const std::vector<int64_t>& table) {
  std::vector<int64_t> devices_of(problem.devices, 0);
  for (int32_t row : problem.device_class) ++devices_of[row];
  std::vector<int64_t> means(problem.ops);
  for (int32_t op = 0; op < problem.ops; ++op) {
    int128_t sum = 0;
    for (size_t row = 0; row * problem.ops + op < table.size(); ++row) {
      sum += static_cast<int128_t>(table[row * problem.ops + op]) * devices_of[row];
    }
    means[op] = static_cast<int64_t>(sum / problem.devices);
  }
  return means;
}

// The mean times of what flows into an op, per producer: `sum[producer]` for `producers`.
struct Inflow {
  std::vector<int64_t> sum;
  std::vector<int32_t> producers;

  explicit Inflow(const Problem& problem) : sum(problem.ops, -1) {}

  void collect(const Problem& problem, const std::vector<int64_t>& transfers, int32_t op) {
    for (int32_t producer : producers) sum[producer] = -1;
    producers.clear();
    for (int32_t tensor : Row(problem.inputs, op)) {
      const int32_t producer = problem.producer[tensor];
      if (sum[producer] < 0) {
        sum[producer] = 0;
        producers.push_back(producer);
      }
      sum[producer] += transfers[tensor];
    }
  }
};

// The ops whose producers are taken, by falling rank and then by index.
class ReadyQueue {
 public:
  ReadyQueue(const Problem& problem, const std::vector<int64_t>& ranks)
      : problem_(problem), ranks_(ranks), waiting_(problem.ops, 0) {
    for (int32_t op = 0; op < problem.ops; ++op) {
      waiting_[op] = problem.inputs.size(op);
      if (waiting_[op] == 0) push(op);
    }
  }

  bool empty() const { return heap_.empty(); }
  void push(int32_t op) { heap_.emplace(ranks_[op], -op); }
  int32_t pop() {
    const int32_t op = -heap_.top().second;
    heap_.pop();
    return op;
  }
  void push_consumers(int32_t op) {
    for (int32_t tensor : Row(problem_.outputs, op)) {
      for (int32_t consumer : Row(problem_.consumers, tensor)) {
        if (--waiting_[consumer] == 0) push(consumer);
      }
    }
  }

 private:
  const Problem& problem_;
  const std::vector<int64_t>& ranks_;
  std::vector<int64_t> waiting_;  // per op, inputs whose producer is not taken
  std::priority_queue<std::pair<int64_t, int32_t>> heap_;
};

// The time added to the end of an op on a device when devices are compared.
int64_t future_of(const Problem& problem, const std::vector<int64_t>& future, int32_t op,
                  int32_t device) {
  if (future.empty()) return 0;
  return future[static_cast<int64_t>(problem.device_class[device]) * problem.ops + op];
}

struct Slot {
  int64_t start, end;
};

// The classical model: every device has a list of gaps, and a tensor arrives one transfer after
// its producer's end, whatever else is sent.
class InsertionModel {
 public:
  InsertionModel(const Problem& problem, const std::vector<int64_t>& loads)
      : problem_(problem),
        loads_(loads),
        device_(problem.ops, -1),
        start_(problem.ops, 0),
        end_(problem.ops, 0),
        group_device_(problem.groups, -1),
        room_(problem.memory),
        gaps_(problem.devices) {
    for (Gaps& gaps : gaps_) gaps.emplace(0, kForever);
  }

  // The earliest start and its end, if the op may go there.
  std::optional<Slot> slot_on(int32_t op, int32_t device) const {
    if (!has_room(problem_.group[op], device)) return std::nullopt;
    int64_t ready = 0, busy = problem_.duration(op, device);
    for (int32_t tensor : Row(problem_.inputs, op)) {
      const int32_t producer = problem_.producer[tensor];
      const int32_t src = device_[producer];
      int64_t arrival = end_[producer];
      if (src != device && !problem_.has_path(src, device)) return std::nullopt;
      if (src != device && problem_.pool[src] == problem_.pool[device]) {
        arrival += problem_.latency_ns(src, device);
      } else if (src != device) {
        arrival += problem_.transfer_ns(tensor, src, device);
        busy += problem_.overhead_ns(src, device);
      }
      ready = std::max(ready, arrival);
    }
    auto gap = std::prev(gaps_[device].upper_bound(ready));
    while (std::max(ready, gap->first) + busy > gap->second) ++gap;
    const int64_t start = std::max(ready, gap->first);
    return Slot{start, start + busy};
  }

  void take(int32_t op, int32_t device, const Slot& slot) {
    const int32_t group = problem_.group[op];
    if (group_device_[group] < 0) {
      group_device_[group] = device;
      room_[problem_.pool[device]] -= loads_[group];
    }
    device_[op] = device;
    const auto [start, end] = slot;
    start_[op] = start;
    end_[op] = end;
    if (end == start) return;
    Gaps& gaps = gaps_[device];
    const auto gap = std::prev(gaps.upper_bound(start));
    const int64_t gap_end = gap->second;
    gap->second = start;
    // The first gap stays, though empty, so that `std::prev` above has something to go back to.
    if (gap->first == start && start > 0) gaps.erase(gap);
    if (end < gap_end) gaps.emplace(end, gap_end);
  }

  int32_t device(int32_t op) const { return device_[op]; }
  int64_t start(int32_t op) const { return start_[op]; }
  int64_t end(int32_t op) const { return end_[op]; }

 private:
  bool has_room(int32_t group, int32_t device) const {
    if (group_device_[group] >= 0) return group_device_[group] == device;
    return problem_.allows(group, device) && loads_[group] <= room_[problem_.pool[device]];
  }

  using Gaps = std::map<int64_t, int64_t>;  // start to end

  const Problem& problem_;
  const std::vector<int64_t>& loads_;
  std::vector<int32_t> device_;        // per op
  std::vector<int64_t> start_, end_;   // per op
  std::vector<int32_t> group_device_;  // per group, -1 until an op of it is taken
  std::vector<int64_t> room_;          // per pool
  std::vector<Gaps> gaps_;             // per device
};

}  // namespace

std::vector<int64_t> mean_transfers(const Problem& problem) {
  // ns per 2^32 bytes, so that the mean is exact to 2^-32 ns a byte; fits, since a rate is >= 1.
  int128_t latency = 0, per_bytes = 0;
  int64_t pairs = 0;
  for (int32_t src = 0; src < problem.devices; ++src) {
    for (int32_t dst = 0; dst < problem.devices; ++dst) {
      if (problem.pool[src] == problem.pool[dst] || !problem.has_path(src, dst)) continue;
      latency += problem.latency_ns(src, dst) + problem.overhead_ns(src, dst);
      per_bytes += (static_cast<int128_t>(1'000'000'000) << 32) / problem.bytes_per_s(src, dst);
      ++pairs;
    }
  }
  std::vector<int64_t> transfers(problem.tensors, 0);
  if (pairs == 0) return transfers;
  for (int32_t tensor = 0; tensor < problem.tensors; ++tensor) {
    const int128_t sent = (problem.nbytes[tensor] * (per_bytes / pairs)) >> 32;
    transfers[tensor] = static_cast<int64_t>(latency / pairs + sent);
  }
  return transfers;
}

std::vector<int64_t> upward_ranks(const Problem& problem) {
  const std::vector<int64_t> transfers = mean_transfers(problem);
  std::vector<int64_t> ranks = mean_over_devices(problem, problem.durations);
  std::vector<int64_t> tails(problem.ops, 0);
  Inflow inflow(problem);
  for (int32_t op = problem.ops - 1; op >= 0; --op) {
    ranks[op] += tails[op];
    inflow.collect(problem, transfers, op);
    for (int32_t producer : inflow.producers) {
      tails[producer] = std::max(tails[producer], inflow.sum[producer] + ranks[op]);
    }
  }
  return ranks;
}

std::pair<std::vector<int64_t>, std::vector<int64_t>> optimistic_costs(const Problem& problem) {
  const std::vector<int64_t> transfers = mean_transfers(problem);
  std::vector<int64_t> table(problem.durations.size(), 0);
  Inflow inflow(problem);
  for (int32_t op = problem.ops - 1; op >= 0; --op) {
    int64_t best = kForever;
    for (size_t at = op; at < table.size(); at += problem.ops) {
      best = std::min(best, table[at] + problem.durations[at]);
    }
    inflow.collect(problem, transfers, op);
    for (int32_t producer : inflow.producers) {
      const int64_t elsewhere = best + inflow.sum[producer];
      for (size_t row = 0; row < table.size(); row += problem.ops) {
        const int64_t here = table[row + op] + problem.durations[row + op];
        table[row + producer] = std::max(table[row + producer], std::min(here, elsewhere));
      }
    }
  }
  std::vector<int64_t> ranks = mean_over_devices(problem, table);
  return {std::move(table), std::move(ranks)};
}

bool ranked_schedule(Timeline& timeline, const std::vector<int64_t>& ranks,
                     const std::vector<int64_t>& future) {
  const Problem& problem = timeline.problem();
  ReadyQueue ready(problem, ranks);
  std::vector<int32_t> aside;  // found no room since memory was last let go
  bool moved = false;          // whether an op was committed since then
  while (!ready.empty() || (moved && !aside.empty())) {
    if (ready.empty()) {
      for (int32_t op : aside) ready.push(op);
      aside.clear();
      moved = false;
    }
    const int32_t op = ready.pop();
    int32_t choice = -1;
    int64_t least = kForever;
    for (int32_t device = 0; device < problem.devices; ++device) {
      const std::optional<int64_t> end = timeline.earliest_end(op, device);
      if (!end) continue;
      const int64_t cost = *end + future_of(problem, future, op, device);
      if (cost < least && timeline.fit(op, device) == Fit::kFits) {
        choice = device;
        least = cost;
      }
    }
    if (choice < 0) {
      aside.push_back(op);
      continue;
    }
    timeline.commit(op, choice);
    moved = true;
    ready.push_consumers(op);
    if (!timeline.released().empty()) {
      for (int32_t waiting : aside) ready.push(waiting);
      aside.clear();
    }
  }
  return aside.empty();
}

bool insertion_schedule(Timeline& timeline, const std::vector<int64_t>& ranks,
                        const std::vector<int64_t>& future, const std::vector<int64_t>& loads) {
  const Problem& problem = timeline.problem();
  InsertionModel model(problem, loads);
  std::vector<int32_t> order;
  order.reserve(problem.ops);
  for (ReadyQueue ready(problem, ranks); !ready.empty();) {
    const int32_t op = ready.pop();
    int32_t choice = -1;
    int64_t least = kForever;
    Slot at{0, 0};
    for (int32_t device = 0; device < problem.devices; ++device) {
      const std::optional<Slot> slot = model.slot_on(op, device);
      if (!slot) continue;
      const int64_t cost = slot->end + future_of(problem, future, op, device);
      if (cost < least) {
        choice = device;
        least = cost;
        at = *slot;
      }
    }
    if (choice < 0) return false;
    model.take(op, choice, at);
    order.push_back(op);
    ready.push_consumers(op);
  }
  // Of the ops that start together those of no time go first, as they do in the model. The order so
  // far is topological, so a stable sort leaves each of them behind its producers.
  const auto key = [&](int32_t op) {
    return std::make_pair(model.start(op), model.end(op) > model.start(op));
  };
  std::stable_sort(order.begin(), order.end(),
                   [&](int32_t a, int32_t b) { return key(a) < key(b); });
  for (int32_t op : order) {
    if (!timeline.arrival(op, model.device(op))) return false;
    timeline.commit(op, model.device(op));
  }
  return true;
}

}  // namespace baechi
