// One placement of all ops, evaluated again and again while a search changes it.
//
// The clock of `timeline.cc` for a whole order at once: the same starts, transfers and peaks to the
// last nanosecond (`tests/placers/test_local_search.py` compares them), but without queries
// half-way. It is fast because a change at a position does not affect the times before it: an
// evaluation resumes from a checkpoint, ends as soon as the step is known to be too long, and is
// undone from a log. Memory is checked only if the time is good enough.
#pragma once

#include "clock/core.h"

namespace baechi {

// How far the peaks pass the memory, summed over pools; the same on average over the step; and the
// pool and time where most is missing.
struct Overflow {
  int64_t bytes = 0;
  double mean_bytes = 0;
  int32_t pool = -1;
  int64_t time = 0;
};

class Trial {
 public:
  // `devices` per op, the ops of a group together; `order` topological. The problem must outlive
  // it.
  Trial(const Problem& problem, const std::vector<int32_t>& devices,
        const std::vector<int32_t>& order);
  // Starts again from another placement.
  void reset(const std::vector<int32_t>& devices, const std::vector<int32_t>& order);

  // Whether there was a path for every tensor at the start; if not, nothing else holds.
  bool valid() const { return valid_; }

  const std::vector<int32_t>& devices() const { return device_; }
  const std::vector<int32_t>& order() const { return order_; }
  int32_t device(int32_t op) const { return device_[op]; }
  int32_t position(int32_t op) const { return position_[op]; }
  int64_t end(int32_t op) const { return end_[op]; }
  int64_t start(int32_t op) const { return end_[op] - busy_[op]; }
  // The time of all ops of a device, without what it receives.
  int64_t work(int32_t device) const { return work_[device]; }
  // How many groups are on a device.
  int32_t groups_on(int32_t device) const { return groups_on_[device]; }

  // Changes to come; `evaluate` sees them, `keep` or `undo` ends them.
  void move_group(int32_t group, int32_t device);
  // Launches the op at another position; the caller keeps the order topological.
  void move_op(int32_t op, int32_t to);
  // Launches all ops in another topological order; at most once before `keep` or `undo`.
  void reorder(const std::vector<int32_t>& order);

  // Times with the changes: whether there is a path for every tensor and the step takes at most
  // `limit`. Otherwise only `undo` may follow.
  bool evaluate(int64_t limit);
  int64_t makespan() const { return makespan_; }
  // The sum of the devices' last ends; it may pass 64 bits.
  double finishes() const { return finishes_; }
  // How many copies are sent.
  int64_t transfers() const { return sent_before() + static_cast<int64_t>(sending_.size()); }
  // After `evaluate`.
  Overflow overflow();
  // Its bytes of persistent bytes alone, which never are more; at any time.
  int64_t least_overflow() const;
  void keep();
  void undo();

  // Ops from the one that ends last back to a source, each the reason for the next one's start.
  std::vector<int32_t> critical() const;
  // Ops whose tensors are in that pool at that time, and those that have yet to read them.
  std::vector<int32_t> crowd(int32_t pool, int64_t time) const;
  // Number of ops evaluated so far, plus equivalent work: the measure of a budget.
  int64_t evaluations() const { return evaluations_; }

 private:
  // A copy of a tensor in a pool, on its way in [begin, available), sent when `by` was committed.
  struct Copy {
    int64_t begin = 0, available = 0, last_use = 0;
    int32_t by = -1, holder = -1;
    uint32_t epoch = 0, seen = 0;
  };
  struct Planned {
    int64_t produced;
    int32_t tensor;
  };
  struct Event {
    int64_t time, delta;
  };

  Copy& copy(int32_t tensor, int32_t pool) {
    return copies_[static_cast<int64_t>(tensor) * problem_.pools + pool];
  }
  const Copy& copy(int32_t tensor, int32_t pool) const {
    return copies_[static_cast<int64_t>(tensor) * problem_.pools + pool];
  }
  int64_t* checkpoint(int32_t index, bool trial);
  bool commit(int32_t op);
  // The sum of the overheads of what is sent for an op.
  int64_t received_ns(int32_t op) const;
  void settle();
  void count();
  int32_t sent_before() const;
  void sort(std::vector<Event>& events);
  Overflow passed(std::vector<Event>& events, int64_t room);

  const Problem& problem_;
  std::vector<int32_t> device_, order_, position_;
  std::vector<int64_t> end_, busy_;  // per op; `busy_`: for how long its device is
  std::vector<int64_t> work_;        // per device
  std::vector<int32_t> groups_on_;
  std::vector<int64_t> held_bytes_;  // per pool, of persistent bytes
  std::vector<int64_t> tail_;  // per op, the shortest time from its end to the end of the step
  std::vector<Copy> copies_;
  int64_t makespan_ = 0, evaluations_ = 0, limit_ = 0;
  double finishes_ = 0;

  // State of the fold: free times of devices, send and receive ports, and work done, per device;
  // free times of hosts.
  std::vector<int64_t> state_;
  std::vector<int64_t> checkpoints_;     // two of each, `live_` says which one counts
  std::vector<uint8_t> live_;            // per checkpoint
  std::vector<int32_t> sent_before_;     // per checkpoint and version, size of `sent_`
  std::vector<int64_t> sent_, sending_;  // copies in commit order: kept, and of this evaluation

  // What to undo.
  struct Moved {
    enum { kGroup, kOp, kOrder } kind;
    int32_t what, from;
  };
  std::vector<Moved> moved_;
  std::vector<int32_t> old_order_;
  std::vector<std::pair<int64_t, int64_t>> old_ends_;  // and what the ops took
  std::vector<std::pair<int64_t, Copy>> old_copies_;
  int64_t old_makespan_ = 0;
  double old_finishes_ = 0;
  int32_t first_ = INT32_MAX, base_ = 0, reached_ = 0;
  uint32_t epoch_ = 1;
  std::vector<Planned> planned_;
  std::vector<std::vector<Event>> events_;  // per pool
  std::vector<Event> sorted_;
  std::vector<uint32_t> buckets_;
  std::vector<int64_t> held_;
  std::vector<int64_t> copied_;  // per pool
  uint32_t seen_ = 0;
  bool valid_ = false;
};

}  // namespace baechi
