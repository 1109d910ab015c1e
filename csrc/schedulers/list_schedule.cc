// A list scheduler over the timeline.
//
// A pair of a ready op and a device starts at max(device free, arrival of the op's inputs). Each
// device keeps its ready ops in two heaps: `available`, by index, of those whose inputs arrive
// before the device is free, and `pending`, by (arrival, op), of the others. So the best pair of a
// device is on top of one of them, and the best pair of all is the best of the devices'. Pairs that
// wait for nothing but the receive port all get later with each transfer there; they are in a third
// heap, `receiving`, by (time that they need the port, op), so that their keys move with the port.
// Those that wait for nothing but the host are likewise in `launching`.
//
// Keys are lower bounds: ports, hosts and devices only get busier, so an arrival never gets
// earlier, except where another op brings one of the inputs, and there the pair is pushed afresh. A
// pair is checked again when it comes to the top, and sinks if it got later. A pair without room is
// set aside until an event that could give it room. Entries are never removed early, so an op may
// be in a heap twice; committed ops are dropped on access. A tournament of the tops selects the
// next device to examine, so that a step examines few.
//
// Unused twins (`first_twins`) are equal in everything but the index, and the lowest index wins:
// only the first of them has queues, and the next gets them when the first is used. So of a
// thousand equal devices only the used ones cost time.
#include <algorithm>
#include <functional>
#include <queue>

#include "clock/core.h"

namespace baechi {

namespace {

template <typename T>
using MinHeap = std::priority_queue<T, std::vector<T>, std::greater<T>>;

using Entry = std::pair<int64_t, int32_t>;  // a time and an op

struct Pair {
  int64_t start;
  int32_t op, device;

  bool operator<(const Pair& other) const {
    if (start != other.start) return start < other.start;
    return op != other.op ? op < other.op : device < other.device;
  }
};

constexpr Pair kNoPair = {kForever, INT32_MAX, INT32_MAX};
constexpr Entry kNoEntry = {kForever, INT32_MAX};

struct Queue {
  MinHeap<int32_t> available;
  MinHeap<Entry> pending, receiving, launching;
  std::vector<int32_t> full, crowded;
};

// A pair per device, and the smallest of them.
class Tournament {
 public:
  explicit Tournament(int32_t devices) {
    while (leaves_ < static_cast<size_t>(devices)) leaves_ *= 2;
    nodes_.assign(2 * leaves_, kNoPair);
  }

  const Pair& winner() const { return nodes_[1]; }

  void set(int32_t device, const Pair& pair) {
    size_t node = leaves_ + static_cast<size_t>(device);
    nodes_[node] = pair;
    while (node > 1) {
      node /= 2;
      nodes_[node] = std::min(nodes_[2 * node], nodes_[2 * node + 1]);
    }
  }

  void lower(int32_t device, const Pair& pair) {
    if (pair < nodes_[leaves_ + static_cast<size_t>(device)]) set(device, pair);
  }

 private:
  size_t leaves_ = 1;
  std::vector<Pair> nodes_;
};

class Scheduler {
 public:
  Scheduler(Timeline& timeline, const std::vector<int32_t>& favorites)
      : timeline_(timeline),
        problem_(timeline.problem()),
        favorites_(favorites),
        waiting_(problem_.ops, 0),
        place_(problem_.ops, -1),
        full_(problem_.ops, 0),
        last_(problem_.devices, -1),
        twin_(first_twins(problem_)),
        queues_(problem_.devices),
        tops_(problem_.devices) {
    for (int32_t device = 0; device < problem_.devices; ++device) {
      if (timeline_.used(device) || first_unused(device)) activate(device);
    }
    for (int32_t op = 0; op < problem_.ops; ++op) {
      for (int32_t tensor : Row(problem_.inputs, op)) {
        if (!timeline_.committed(problem_.producer[tensor])) ++waiting_[op];
      }
      if (waiting_[op] == 0 && !timeline_.committed(op)) becomes_ready(op);
    }
  }

  bool run() {
    for (size_t left = problem_.ops - timeline_.spans().size(); left > 0; --left) {
      const Pair pair = favorites_.empty() ? earliest() : earliest_allowed();
      if (pair.op == kNoPair.op) return false;
      commit(pair);
    }
    return true;
  }

 private:
  bool ready(int32_t op) const { return place_[op] >= 0; }

  // Whether no device before it is its twin, as much held back, and unused.
  bool first_unused(int32_t device) const {
    for (int32_t other = twin_[device]; other < device; ++other) {
      if (twins(other, device) && !timeline_.used(other)) return false;
    }
    return true;
  }

  bool twins(int32_t a, int32_t b) const {
    return twin_[a] == twin_[b] &&
           timeline_.held_back(problem_.pool[a]) == timeline_.held_back(problem_.pool[b]);
  }

  void activate(int32_t device) {
    actives_.push_back(device);
    for (int32_t op : ready_) {
      const int32_t only = timeline_.group_device(op);
      if (only < 0 || only == device) push(op, device);
    }
  }

  void becomes_ready(int32_t op) {
    place_[op] = static_cast<int32_t>(ready_.size());
    ready_.push_back(op);
    push_everywhere(op);
  }

  void is_committed(int32_t op) {
    place_[ready_.back()] = place_[op];
    ready_[place_[op]] = ready_.back();
    ready_.pop_back();
    place_[op] = -1;
  }

  void push(int32_t op, int32_t device) {
    const std::optional<int64_t> arrival = timeline_.arrival(op, device);
    if (!arrival) return;
    wait(op, device, *arrival);
    tops_.lower(device, {*timeline_.earliest_start(op, device), op, device});
  }

  // Into the heap of what arrives then, or is launched no earlier.
  void wait(int32_t op, int32_t device, int64_t arrival) {
    Queue& queue = queues_[device];
    const int64_t launched = timeline_.launched(op, device);
    if (launched > 0 && launched >= arrival) {
      queue.launching.emplace(launched - timeline_.host_free(device), op);
      return;
    }
    const int64_t port_ns = timeline_.receiving_ns(op, device);
    if (port_ns > 0 && arrival == timeline_.receive_free(device) + port_ns) {
      queue.receiving.emplace(port_ns, op);
    } else {
      queue.pending.emplace(arrival, op);
    }
  }

  void push_everywhere(int32_t op) {
    const int32_t only = timeline_.group_device(op);
    if (only >= 0) return push(op, only);
    for (int32_t device : actives_) push(op, device);
  }

  // The pair on top of a device's queues. Its start is a lower bound, and no pair of the device is
  // before it.
  Pair top(int32_t device) {
    Queue& queue = queues_[device];
    const int64_t free = timeline_.device_free(device), port = timeline_.receive_free(device);
    make_available(queue, queue.pending, free);
    make_available(queue, queue.receiving, free - port);
    make_available(queue, queue.launching, free - timeline_.host_free(device));
    if (!queue.available.empty()) return {free, queue.available.top(), device};
    const Entry entry = first(device).first;
    return entry == kNoEntry ? kNoPair : Pair{entry.first, entry.second, device};
  }

  // The best entry of the heaps by time, and its heap.
  std::pair<Entry, MinHeap<Entry>*> first(int32_t device) {
    Queue& queue = queues_[device];
    std::pair<Entry, MinHeap<Entry>*> best{kNoEntry, &queue.pending};
    const auto look = [&best](MinHeap<Entry>& heap, int64_t base) {
      if (heap.empty()) return;
      const Entry entry{base + heap.top().first, heap.top().second};
      if (entry < best.first) best = {entry, &heap};
    };
    look(queue.pending, 0);
    look(queue.receiving, timeline_.receive_free(device));
    look(queue.launching, timeline_.host_free(device));
    return best;
  }

  void make_available(Queue& queue, MinHeap<Entry>& heap, int64_t until) const {
    while (!heap.empty() && heap.top().first <= until) {
      if (ready(heap.top().second)) queue.available.push(heap.top().second);
      heap.pop();
    }
  }

  // Whether the pair on top of its device's queues is what it says and has room; if not it sinks,
  // or is set aside or dropped.
  bool holds(const Pair& pair) {
    Queue& queue = queues_[pair.device];
    std::optional<int64_t> start;
    if (ready(pair.op)) start = timeline_.earliest_start(pair.op, pair.device);
    if (start && *start == pair.start) {
      const Fit fit = timeline_.fit(pair.op, pair.device);
      if (fit == Fit::kFits) return true;
      if (fit == Fit::kFull) {
        queue.full.push_back(pair.op);
        ++full_[pair.op];
      }
      if (fit == Fit::kCrowded) {
        if (queue.crowded.empty()) crowded_.push_back(pair.device);
        queue.crowded.push_back(pair.op);
      }
    }
    pop(pair.device);
    // It starts when its inputs arrive or it is launched, since the device is free before.
    if (start && *start > pair.start) wait(pair.op, pair.device, *start);
    return false;
  }

  // Takes away the top.
  void pop(int32_t device) {
    Queue& queue = queues_[device];
    if (!queue.available.empty()) return queue.available.pop();
    first(device).second->pop();
  }

  // The best pair of a device that has room. Its entry stays on top.
  Pair best(int32_t device) {
    Pair pair = top(device);
    while (pair.op != kNoPair.op && !holds(pair)) pair = top(device);
    return pair;
  }

  // ETF's choice, among the devices in the tournament. Its entries are lower bounds.
  Pair earliest() {
    while (true) {
      const Pair winner = tops_.winner();
      if (winner.op == kNoPair.op) return kNoPair;
      const Pair pair = top(winner.device);
      const bool same = pair.start == winner.start && pair.op == winner.op;
      if (same && holds(pair)) return pair;
      tops_.set(winner.device, same ? top(winner.device) : pair);
    }
  }

  // SCT's choice: an awake device takes its favorite child or an urgent op.
  Pair earliest_allowed() {
    Pair choice = kNoPair;
    std::vector<int32_t> awake;
    for (int32_t device : actives_) {
      const Pair favorite = awaited(device);
      if (favorite.op == kNoPair.op) continue;
      awake.push_back(device);
      choice = std::min(choice, favorite);
      tops_.set(device, kNoPair);
    }
    choice = std::min(choice, earliest());
    for (int32_t device : awake) choice = std::min(choice, earliest_urgent(device, choice));
    for (int32_t device : awake) tops_.set(device, top(device));
    return choice;
  }

  // The pair of a device and the favorite child for which it is awake.
  Pair awaited(int32_t device) const {
    const int32_t favorite = last_[device] < 0 ? -1 : favorites_[last_[device]];
    if (favorite < 0 || !ready(favorite)) return kNoPair;
    Pair earliest = kNoPair;
    for (int32_t other : actives_) {
      if (timeline_.fit(favorite, other) == Fit::kFits) {
        earliest =
            std::min(earliest, {*timeline_.earliest_start(favorite, other), favorite, other});
      }
    }
    return earliest.device == device ? earliest : kNoPair;
  }

  // The best pair of an urgent op and `device`, if it is before `limit`.
  Pair earliest_urgent(int32_t device, const Pair& limit) {
    std::vector<Entry> passed;
    Pair pair = best(device);
    while (pair < limit && !urgent(pair)) {
      passed.emplace_back(pair.start, pair.op);
      pop(device);
      pair = best(device);
    }
    for (const Entry& entry : passed) queues_[device].pending.push(entry);
    return pair < limit ? pair : kNoPair;
  }

  // Whether no device with room would start the op later.
  bool urgent(const Pair& pair) const {
    for (int32_t other : actives_) {
      const std::optional<int64_t> start = timeline_.earliest_start(pair.op, other);
      if (start && *start > pair.start && timeline_.fit(pair.op, other) == Fit::kFits) return false;
    }
    return true;
  }

  void commit(const Pair& pair) {
    const size_t transfers = timeline_.transfers().size();
    const bool comes = timeline_.group_device(pair.op) < 0, fresh = !timeline_.used(pair.device);
    timeline_.commit(pair.op, pair.device);
    is_committed(pair.op);
    last_[pair.device] = pair.op;
    if (fresh) activate_twin(pair.device);
    for (int32_t tensor : Row(problem_.outputs, pair.op)) {
      for (int32_t consumer : Row(problem_.consumers, tensor)) {
        if (--waiting_[consumer] == 0) becomes_ready(consumer);
      }
    }
    // Memory that is held back from new groups is free to this one now.
    if (comes) {
      for (int32_t op : Row(problem_.group_ops, problem_.group[pair.op])) {
        if (ready(op)) push(op, pair.device);
      }
    }
    // The new arrivals may let other ops start earlier in this pool.
    const int32_t pool = problem_.pool[pair.device];
    for (size_t i = transfers; i < timeline_.transfers().size(); ++i) {
      for (int32_t consumer : Row(problem_.consumers, timeline_.transfers()[i].tensor)) {
        if (!ready(consumer)) continue;
        for (int32_t device : Row(problem_.pool_devices, pool)) push(consumer, device);
      }
    }
    // The last consumer of a tensor may take a copy of it without keeping it.
    for (int32_t tensor : Row(problem_.inputs, pair.op)) {
      if (timeline_.remaining(tensor) != 1) continue;
      for (int32_t consumer : Row(problem_.consumers, tensor)) {
        if (ready(consumer) && full_[consumer] > 0) push_everywhere(consumer);
      }
    }
    for (int32_t released : timeline_.released()) {
      for (int32_t device : Row(problem_.pool_devices, released)) {
        for (int32_t op : queues_[device].full) --full_[op];
        retry(device, queues_[device].full);
      }
    }
    for (int32_t device : crowded_) retry(device, queues_[device].crowded);
    crowded_.clear();
    tops_.set(pair.device, top(pair.device));
  }

  // The next of the twins of a device that is used from now on.
  void activate_twin(int32_t device) {
    for (int32_t other = device + 1; other < problem_.devices; ++other) {
      if (!timeline_.used(other) && twins(other, device)) return activate(other);
    }
  }

  void retry(int32_t device, std::vector<int32_t>& aside) {
    for (int32_t op : aside) {
      queues_[device].available.push(op);
      tops_.lower(device, {timeline_.device_free(device), op, device});
    }
    aside.clear();
  }

  Timeline& timeline_;
  const Problem& problem_;
  const std::vector<int32_t>& favorites_;
  std::vector<int64_t> waiting_;  // per op, inputs without a committed producer
  std::vector<int32_t> ready_;    // in no order
  std::vector<int32_t> place_;    // per op, its place in ready_, or -1
  std::vector<int32_t> full_;     // per op, in how many devices' `full` it is
  std::vector<int32_t> last_;     // per device, the op that it took last
  std::vector<int32_t> twin_;     // per device
  std::vector<int32_t> actives_;  // the devices that have
  std::vector<int32_t> crowded_;  // the devices whose `crowded` is not empty
  std::vector<Queue> queues_;     // per device
  Tournament tops_;
};

}  // namespace

bool list_schedule(Timeline& timeline, const std::vector<int32_t>& favorites) {
  return Scheduler(timeline, favorites).run();
}

}  // namespace baechi
