// A list scheduler over the timeline.
//
// A pair of a ready op and a device starts at max(device free, arrival of the op's inputs). Each
// device keeps its ready ops in two heaps: `available`, by index, of those whose inputs arrive
// before the device is free, and `pending`, by (arrival, op), of the others. So the best pair of a
// device is on top of one of them, and the best pair of all is the best of the devices'.
//
// Keys are lower bounds: ports and devices only become busier, so an arrival never gets earlier,
// except where another op brings one of the inputs, and there the pair is pushed afresh. A pair is
// checked again when it comes to the top, and sinks if it got later. A pair without room is set
// aside until something that could give it room has happened. Entries are never removed early, so
// an op may be in a heap twice; what is committed is dropped when met.
#include <algorithm>
#include <functional>
#include <queue>

#include "core.h"

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

struct Queue {
  MinHeap<int32_t> available;
  MinHeap<Entry> pending;
  std::vector<int32_t> full, crowded;
};

class Scheduler {
 public:
  Scheduler(Timeline& timeline, const std::vector<int32_t>& favorites)
      : timeline_(timeline),
        problem_(timeline.problem()),
        favorites_(favorites),
        waiting_(problem_.ops, 0),
        last_(problem_.devices, -1),
        queues_(problem_.devices) {
    for (int32_t op = 0; op < problem_.ops; ++op) {
      for (int32_t tensor : Row(problem_.inputs, op)) {
        if (!timeline_.committed(problem_.producer[tensor])) ++waiting_[op];
      }
      if (ready(op)) push_everywhere(op);
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
  bool ready(int32_t op) const { return waiting_[op] == 0 && !timeline_.committed(op); }

  void push(int32_t op, int32_t device) {
    const std::optional<int64_t> arrival = timeline_.arrival(op, device);
    if (arrival) queues_[device].pending.emplace(*arrival, op);
  }

  void push_everywhere(int32_t op) {
    const int32_t only = timeline_.group_device(op);
    if (only >= 0) return push(op, only);
    for (int32_t device = 0; device < problem_.devices; ++device) push(op, device);
  }

  // The best pair of a device that has room. Its entry stays on top of `pending` or `available`.
  Pair best(int32_t device) {
    Queue& queue = queues_[device];
    const int64_t free = timeline_.device_free(device);
    while (true) {
      while (!queue.pending.empty() && queue.pending.top().first <= free) {
        queue.available.push(queue.pending.top().second);
        queue.pending.pop();
      }
      const bool now = !queue.available.empty();
      if (!now && queue.pending.empty()) return kNoPair;
      const int32_t op = now ? queue.available.top() : queue.pending.top().second;
      const int64_t key = now ? free : queue.pending.top().first;
      const std::optional<int64_t> start =
          timeline_.committed(op) ? std::nullopt : timeline_.earliest_start(op, device);
      if (start && *start == key) {
        const Fit fit = timeline_.fit(op, device);
        if (fit == Fit::kFits) return {key, op, device};
        if (fit == Fit::kFull) queue.full.push_back(op);
        if (fit == Fit::kCrowded) queue.crowded.push_back(op);
      }
      pop(device);
      if (start && *start > key) queue.pending.emplace(*start, op);
    }
  }

  void pop(int32_t device) {
    Queue& queue = queues_[device];
    if (queue.available.empty()) {
      queue.pending.pop();
    } else {
      queue.available.pop();
    }
  }

  // ETF's choice.
  Pair earliest() {
    Pair choice = kNoPair;
    for (int32_t device = 0; device < problem_.devices; ++device) {
      choice = std::min(choice, best(device));
    }
    return choice;
  }

  // SCT's choice: an awake device takes its favorite child or an urgent op.
  Pair earliest_allowed() {
    Pair choice = kNoPair;
    std::vector<int32_t> awake;
    for (int32_t device = 0; device < problem_.devices; ++device) {
      const Pair favorite = awaited(device);
      if (favorite.op == kNoPair.op) {
        choice = std::min(choice, best(device));
      } else {
        awake.push_back(device);
        choice = std::min(choice, favorite);
      }
    }
    for (int32_t device : awake) choice = std::min(choice, earliest_urgent(device, choice));
    return choice;
  }

  // The pair of a device and the favorite child for which it is awake.
  Pair awaited(int32_t device) const {
    const int32_t favorite = last_[device] < 0 ? -1 : favorites_[last_[device]];
    if (favorite < 0 || !ready(favorite)) return kNoPair;
    Pair earliest = kNoPair;
    for (int32_t other = 0; other < problem_.devices; ++other) {
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
    for (int32_t other = 0; other < problem_.devices; ++other) {
      const std::optional<int64_t> start = timeline_.earliest_start(pair.op, other);
      if (start && *start > pair.start && timeline_.fit(pair.op, other) == Fit::kFits) return false;
    }
    return true;
  }

  void commit(const Pair& pair) {
    const size_t transfers = timeline_.transfers().size();
    const bool comes = timeline_.group_device(pair.op) < 0;
    timeline_.commit(pair.op, pair.device);
    last_[pair.device] = pair.op;
    for (int32_t tensor : Row(problem_.outputs, pair.op)) {
      for (int32_t consumer : Row(problem_.consumers, tensor)) {
        if (--waiting_[consumer] == 0) push_everywhere(consumer);
      }
    }
    // Memory that is held back from new groups is free to this one now.
    for (int32_t op : Row(problem_.group_ops, problem_.group[pair.op])) {
      if (comes && ready(op)) push(op, pair.device);
    }
    // What arrived may let others start earlier in this pool.
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
        if (ready(consumer)) push_everywhere(consumer);
      }
    }
    for (int32_t released : timeline_.released()) {
      for (int32_t device : Row(problem_.pool_devices, released)) {
        retry(queues_[device], queues_[device].full);
      }
    }
    for (Queue& queue : queues_) retry(queue, queue.crowded);
  }

  static void retry(Queue& queue, std::vector<int32_t>& aside) {
    for (int32_t op : aside) queue.available.push(op);
    aside.clear();
  }

  Timeline& timeline_;
  const Problem& problem_;
  const std::vector<int32_t>& favorites_;
  std::vector<int64_t> waiting_;  // per op, inputs without a committed producer
  std::vector<int32_t> last_;     // per device, the op that it took last
  std::vector<Queue> queues_;     // per device
};

}  // namespace

bool list_schedule(Timeline& timeline, const std::vector<int32_t>& favorites) {
  return Scheduler(timeline, favorites).run();
}

}  // namespace baechi
