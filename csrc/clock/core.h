// The clock and the list schedulers, without Python.
//
// A Problem is an operator graph and a cluster as flat arrays: immutable, checked by its maker
// (`baechi.problem.problem_arrays`), which also proves that no sum of times or bytes here reaches
// 2^62. A Timeline is the one account of time and memory: `commit` places one op, all other
// functions only query. Times are ns, sizes are bytes, both int64_t; ops, tensors, devices, pools
// and groups are indices.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "clock/rows.h"

namespace baechi {

constexpr int64_t kForever = INT64_MAX;

enum class Ports { kDuplex, kShared, kNone };

// Rows of indices in one vector: row i is values[begin[i]] .. values[begin[i + 1] - 1].
template <template <typename...> class Vector>
struct RowsIn {
  Vector<int64_t> begin;
  Vector<int32_t> values;

  const int32_t* first(int32_t row) const { return values.data() + begin[row]; }
  const int32_t* last(int32_t row) const { return values.data() + begin[row + 1]; }
  int64_t size(int32_t row) const { return begin[row + 1] - begin[row]; }
};
using Rows = RowsIn<std::vector>;
using SharedRows = RowsIn<Shared>;  // immutable; copies share them

inline SharedRows shared(Rows&& rows) { return {std::move(rows.begin), std::move(rows.values)}; }

// Lets a range-for walk one row.
struct Row {
  const int32_t *from, *to;
  template <typename AnyRows>
  Row(const AnyRows& rows, int32_t row) : from(rows.first(row)), to(rows.last(row)) {}
  const int32_t* begin() const { return from; }
  const int32_t* end() const { return to; }
};

// Per value below `count` the places that have it, ascending.
Rows places(const int32_t* values, int32_t size, int32_t count);
template <typename Values>
Rows places(const Values& values, int32_t count) {
  return places(values.data(), static_cast<int32_t>(values.size()), count);
}

// Disjoint sets; the smallest member names a set.
class Union {
 public:
  explicit Union(int32_t n) : parent_(n) { std::iota(parent_.begin(), parent_.end(), 0); }

  int32_t find(int32_t x) {
    while (parent_[x] != x) x = parent_[x] = parent_[parent_[x]];
    return x;
  }
  // The root of the result, which is its smallest element.
  int32_t join(int32_t a, int32_t b) {
    a = find(a);
    b = find(b);
    return parent_[std::max(a, b)] = std::min(a, b);
  }

 private:
  std::vector<int32_t> parent_;
};

// A number per source and destination: table[src * devices + dst], or one number for all of them.
struct PairTable {
  std::vector<int64_t> values;

  int64_t operator[](int64_t at) const {
    return values[values.size() == 1 ? 0 : static_cast<size_t>(at)];
  }
};

// The part of a problem that depends on the graph alone. Copies share its rows, so that all
// problems of one graph store them once.
struct Graph {
  int32_t ops = 0, tensors = 0, groups = 0;

  Shared<int64_t> workspace;         // per op; below 0 where outputs take the room of its inputs
  Shared<int64_t> least_workspace;   // per op, what it takes wherever other ops are
  SharedRows beside;                 // per op, others without which it takes less, ascending
  Shared<int64_t> beside_bytes;      // per entry of `beside`, how much less
  Shared<int32_t> group;             // per op; an op without a group is alone in its own
  Shared<int64_t> group_persistent;  // per group, the sum of its ops
  SharedRows group_ops;              // per group, ops ascending
  SharedRows inputs, outputs;        // per op, tensors ascending
  Shared<int64_t> output_bytes;      // per op, the sum of its outputs

  Shared<int32_t> producer;  // per tensor
  Shared<int64_t> nbytes;    // per tensor
  Shared<uint8_t> kept;      // per tensor
  SharedRows consumers;      // per tensor, ops ascending

  // Parts of tensors that are all that some consumers read; every consumer of a tensor with parts
  // is a reader of one.
  Shared<int64_t> part_begin;    // per tensor its first part, and their number; or empty
  Shared<int64_t> part_bytes;    // per part
  SharedRows readers;            // per part, ops
  Shared<int64_t> least_copies;  // per tensor, what a consumer reads at least

  // Derives the ops of groups and the tensors of ops, output_bytes, least_workspace and
  // least_copies from the rest.
  void derive();
  bool has_parts(int32_t tensor) const {
    return !part_bytes.empty() && part_begin[tensor] < part_begin[tensor + 1];
  }
  // Bytes of the copy of a tensor with parts in every pool, given the pools of its consumers.
  template <typename PoolOf>
  void copied(int32_t tensor, PoolOf pool_of, std::vector<int64_t>& bytes) const {
    std::fill(bytes.begin(), bytes.end(), 0);
    std::vector<int64_t> counted(bytes.size(), -1);  // per pool, the last part that is in its sum
    for (int64_t part = part_begin[tensor]; part < part_begin[tensor + 1]; ++part) {
      for (int32_t reader : Row(readers, static_cast<int32_t>(part))) {
        const auto pool = static_cast<size_t>(pool_of(reader));
        if (counted[pool] == part) continue;
        counted[pool] = part;
        bytes[pool] = std::min(nbytes[tensor], bytes[pool] + part_bytes[static_cast<size_t>(part)]);
      }
    }
  }
  // The workspace of an op that runs in `pool`; `pool_of` gives that of another op, or -1 where it
  // is launched later: it takes less without those that are elsewhere.
  template <typename PoolOf>
  int64_t workspace_in(int32_t pool, int32_t op, PoolOf pool_of) const {
    int64_t bytes = workspace[op];
    if (beside.values.empty()) return bytes;
    for (int64_t i = beside.begin[op]; i < beside.begin[op + 1]; ++i) {
      const int32_t other = pool_of(beside.values[static_cast<size_t>(i)]);
      if (other >= 0 && other != pool) bytes -= beside_bytes[static_cast<size_t>(i)];
    }
    return bytes;
  }
};

struct Problem : Graph {
  int32_t devices = 0, pools = 0;

  std::vector<int32_t> device_class;  // per device: devices of one class take the same times
  std::vector<int64_t> durations;     // durations[device_class * ops + op]
  std::vector<int32_t> pool;          // per device; a device without a pool is alone in its own
  Rows pool_devices;                  // per pool, devices ascending
  std::vector<int64_t> memory;        // per pool
  PairTable latency, rate;            // ns, and bytes per second; rate 0 is no path
  PairTable overhead;                 // ns of work per transfer on the receiver's side; or empty
  Ports ports = Ports::kDuplex;
  Shared<int64_t> launch;           // per op, ns that its launch takes; empty: no host is busy
  std::vector<int32_t> host;        // per device the host that launches for it, or -1
  std::vector<uint8_t> ahead;       // per device whether launches may be ahead of their ops
  int32_t hosts = 0;                // how many there are
  std::vector<uint8_t> allowed;     // allowed[device * groups + group]; empty: everything is
  int32_t max_devices = INT32_MAX;  // how many devices may be used
  std::vector<int32_t> only;        // per group, the one device that is allowed, or -1; or empty
  std::vector<int64_t> sent_ns;     // per tensor, where all links are equal: its transfer; or empty

  // Derives pool_devices, only and sent_ns from the rest.
  void finish();

  int64_t duration(int32_t op, int32_t device) const {
    return durations[static_cast<int64_t>(device_class[device]) * ops + op];
  }
  bool allows(int32_t group, int32_t device) const {
    return allowed.empty() || allowed[static_cast<int64_t>(device) * groups + group];
  }
  bool has_path(int32_t src, int32_t dst) const { return rate[link(src, dst)] > 0; }
  int64_t latency_ns(int32_t src, int32_t dst) const { return latency[link(src, dst)]; }
  int64_t bytes_per_s(int32_t src, int32_t dst) const { return rate[link(src, dst)]; }
  int64_t overhead_ns(int32_t src, int32_t dst) const {
    return overhead.values.empty() ? 0 : overhead[link(src, dst)];
  }
  int64_t transfer_ns(int32_t tensor, int32_t src, int32_t dst) const {
    return sent_ns.empty() ? divided_ns(tensor, link(src, dst)) : sent_ns[tensor];
  }
  // Whether the device's host does the work of what the device receives, and not the device.
  bool host_receives(int32_t device) const {
    return !launch.empty() && host[device] >= 0 && ahead[device];
  }
  // Time for which the op keeps its device busy; here and below, `received` is the sum of the
  // overheads of the transfers that are sent for it.
  int64_t busy_ns(int32_t op, int32_t device, int64_t received) const {
    return duration(op, device) + (received == 0 || host_receives(device) ? 0 : received);
  }
  // Time for which the op keeps its device's host busy; 0 also without one.
  int64_t launch_ns(int32_t op, int32_t device, int64_t received) const {
    if (launch.empty() || host[device] < 0) return 0;
    return ahead[device] ? received + launch[op] : std::min(launch[op], duration(op, device));
  }
  // When the device's host is free, from the hosts' free times; 0 without one.
  int64_t free_host(int32_t device, const int64_t* host_free) const {
    return launch.empty() || host[device] < 0 ? 0 : host_free[host[device]];
  }
  // When the host lets the op start there at the earliest; 0 where it takes no launch.
  int64_t launched(int32_t op, int32_t device, int64_t received, const int64_t* host_free) const {
    const int64_t launch = launch_ns(op, device, received);
    return launch == 0 ? 0 : host_free[host[device]] + (ahead[device] ? launch : 0);
  }
  // Keeps the host busy with the launch of an op that starts then.
  void launch_at(int32_t op, int32_t device, int64_t received, int64_t start,
                 int64_t* host_free) const {
    const int64_t launch = launch_ns(op, device, received);
    if (launch == 0) return;
    int64_t& free = host_free[host[device]];
    free = (ahead[device] ? free : start) + launch;
  }

 private:
  int64_t divided_ns(int32_t tensor, int64_t at) const;
  int64_t link(int32_t src, int32_t dst) const { return static_cast<int64_t>(src) * devices + dst; }
};

// The memory in use over time.
//
// Changes are queued until an exact query needs them in a treap, which then takes O(log changes)
// per insertion and query. If the cheap `bound` suffices, no treap is ever built.
class Profile {
 public:
  void add(int64_t time, int64_t delta) {
    if (delta == 0) return;
    waiting_.push_back({time, delta});
    total_ += delta;
    if (delta > 0) bound_ += delta;
  }
  // Prefetches the place where changes will be added soon.
  void fetch_end() const { fetch_after(waiting_); }
  // Reserves room for more changes.
  void expect(size_t changes) { waiting_.reserve(waiting_.size() + changes); }
  // The level after the last change.
  int64_t total() const { return total_; }
  // No level is higher than this.
  int64_t bound() const { return bound_; }
  // The highest level in [from, to); where the interval is empty, INT64_MIN.
  int64_t max_between(int64_t from, int64_t to) const;
  // The highest level ever, at least 0: nothing is in use before the first change.
  int64_t max_ever() const;
  // The highest level in [0, to), at least 0. Linear, without a treap, unless there is one.
  int64_t peak(int64_t to) const;

 private:
  struct Change {
    int64_t time, delta;
  };
  struct Node {
    int64_t time, delta, sum, max_prefix;  // max_prefix: over the non-empty prefixes of the subtree
    uint64_t priority;
    int32_t left, right;
  };
  void drain() const;
  int32_t insert(int32_t node, int64_t time, int64_t delta) const;
  void update(int32_t node) const;
  int64_t max_in(int32_t node, int64_t after, int64_t before, int64_t level) const;

  int64_t total_ = 0;
  // Mutable, since moving changes into the treap changes no level.
  mutable int64_t bound_ = 0;
  mutable LargeVector<Change> waiting_;
  mutable std::vector<Node> nodes_;
  mutable int32_t root_ = -1;
};

struct Span {
  int32_t op, device;
  int64_t start, end;
};

struct Transfer {
  int32_t tensor, src, dst;
  int64_t start, end;
};

// Whether an op has room on a device, and if not, the reason.
enum class Fit {
  kFits,
  kNever,    // its group is on another device or not allowed here, an input has no path, or the
             // device is unused and no more devices may be used; all of that is permanent
  kFull,     // even the tensors that stay leave no room; some must be freed first
  kCrowded,  // there is room at some times but not when it would run
};

class Timeline {
 public:
  // The problem must outlive the timeline.
  explicit Timeline(const Problem& problem);
  Timeline(const Timeline&) = delete;
  Timeline& operator=(const Timeline&) = delete;

  const Problem& problem() const { return problem_; }
  bool committed(int32_t op) const { return device_[op] >= 0; }
  // The first input of `op` whose producer is not committed, or -1.
  int32_t waits_for(int32_t op) const;
  int32_t device(int32_t op) const { return device_[op]; }
  int64_t device_free(int32_t device) const { return device_free_[device]; }
  int64_t receive_free(int32_t device) const { return receive_free_[device]; }
  int64_t host_free(int32_t device) const { return problem_.free_host(device, host_free_.data()); }
  // When the host lets `op` start there at the earliest; 0 where it takes none of its time.
  int64_t launched(int32_t op, int32_t device) const {
    arrival(op, device);
    return planned_launch(op, device);
  }
  int32_t group_device(int32_t op) const { return group_device_[problem_.group[op]]; }
  int64_t remaining(int32_t tensor) const { return presences_[tensor].remaining; }
  // Whether some group is placed or reserved there. An unused device has always been empty.
  bool used(int32_t device) const { return used_[device]; }
  int64_t held_back(int32_t pool) const { return held_back_[pool]; }

  // Arrival of all inputs of `op` on `device`, nothing if one has no path. All producers of `op`
  // must be committed, here and below.
  std::optional<int64_t> arrival(int32_t op, int32_t device) const;
  std::optional<int64_t> earliest_start(int32_t op, int32_t device) const;
  // Its end then, overheads included.
  std::optional<int64_t> earliest_end(int32_t op, int32_t device) const;
  // Overheads of the transfers to `device` if `op` goes there.
  int64_t receiving_ns(int32_t op, int32_t device) const;
  Fit fit(int32_t op, int32_t device) const;
  // Whether the constraints allow `op` on `device`, now that some devices are in use.
  bool allows(int32_t op, int32_t device) const;

  // Reserves the persistent bytes of the op's group on `device`; its ops may go only there.
  void reserve(int32_t op, int32_t device);
  // From now on `fit` keeps that much of the pool free of new groups with several ops: room for the
  // later ops of groups.
  void hold_back(int32_t pool, int64_t nbytes) { held_back_[pool] = nbytes; }
  // Places `op`, which is not committed and has a path, whether it fits or not.
  const Span& commit(int32_t op, int32_t device);
  // Commits `order`, each op to devices[op]. Stops at and returns the first that cannot be
  // committed, else -1: an op that has no path or leaves its group, comes twice or before its
  // producers, or an index that is too large. No index is negative.
  int32_t fold(const int32_t* devices, const int32_t* order, int32_t count);

  const LargeVector<Span>& spans() const { return *spans_; }
  const LargeVector<Transfer>& transfers() const { return *transfers_; }
  // The same, for callers that keep them longer than the timeline.
  const std::shared_ptr<LargeVector<Span>>& kept_spans() const { return spans_; }
  const std::shared_ptr<LargeVector<Transfer>>& kept_transfers() const { return transfers_; }
  // The pools in which the last commit freed a tensor, with repetitions.
  const std::vector<int32_t>& released() const { return released_; }
  int64_t makespan() const { return makespan_; }
  // Per pool: the peak in [0, makespan), exact once every op is committed.
  std::vector<int64_t> peaks() const;
  // Per pool: a lower bound on the final peak, wherever the other ops go, but for copies that end
  // up with parts alone. Nothing may be committed afterwards.
  std::vector<int64_t> least_peaks();
  // Per pool: memory less staying tensors and persistent bytes, possibly negative.
  std::vector<int64_t> left() const;
  // Bytes that `op` adds to a device while it runs there with none of its inputs present.
  int64_t need(int32_t op) const;

 private:
  // A tensor in the memory of a pool. `holder` is the device that made or received it. The first
  // ones in `presences_` are those where the tensors are made, one per tensor; copies follow, in a
  // list per tensor that begins there.
  struct Presence {
    int32_t pool, holder;  // -1 where the tensor is not made yet
    int32_t next;
    int32_t remaining;  // consumers that are not committed; of the first ones only
    int64_t available, last_use;
  };
  struct Planned {
    int32_t tensor, src;
    int64_t start, end;
  };

  std::optional<int64_t> plan(int32_t op, int32_t device) const;
  int32_t find(int32_t tensor, int32_t pool) const;
  // When the op planned last starts, whose inputs arrive at `ready`.
  int64_t start(int32_t op, int32_t device, int64_t ready) const {
    return std::max({ready, device_free_[device], planned_launch(op, device)});
  }
  int64_t planned_launch(int32_t op, int32_t device) const {
    return problem_.launched(op, device, overhead_ns_, host_free_.data());
  }
  // Commits the op that was planned last, with the results of `plan`.
  void place(int32_t op, int32_t device, int64_t ready);
  int64_t busy_ns(int32_t op, int32_t device) const {
    return problem_.busy_ns(op, device, overhead_ns_);
  }
  void release(int32_t tensor);
  // The bytes of a copy of a tensor in a pool: the whole while other ops may still go there.
  int64_t copy_bytes(int32_t tensor, int32_t pool) const {
    if (copied_.empty() || !problem_.has_parts(tensor)) return problem_.nbytes[tensor];
    return copied_[static_cast<size_t>(tensor)][static_cast<size_t>(pool)];
  }
  // What the op takes while it runs in a pool, besides inputs and outputs.
  int64_t workspace_in(int32_t pool, int32_t op) const {
    return problem_.workspace_in(pool, op, [this](int32_t other) {
      return committed(other) ? problem_.pool[device_[other]] : -1;
    });
  }
  // Prefetch data that `fold` will read soon.
  void fetch_op(int32_t op, int32_t device) const;
  void fetch_tensors(int32_t op) const;
  void fetch_ends(int32_t device) const;
  // Reserves room for `fold`. Returns the first invalid op, or op without a device; or -1.
  int32_t expect(const int32_t* devices, const int32_t* order, int32_t count);

  const Problem& problem_;
  std::vector<int32_t> device_;        // per op, -1 until committed
  std::vector<int32_t> group_device_;  // per group, -1 until reserved
  LargeVector<Presence> presences_;
  std::vector<int64_t> device_free_, send_free_, receive_free_;  // per device
  std::vector<int64_t> host_free_;                               // per host
  std::vector<uint8_t> used_;                                    // per device
  int32_t devices_used_ = 0;
  std::vector<int64_t> persistent_, held_back_;  // per pool
  std::vector<Profile> profiles_;                // per pool, all but persistent
  std::vector<std::vector<int64_t>> copied_;     // per tensor with parts and pool; or empty
  // With room for all entries of a step, so that no row ever moves.
  std::shared_ptr<LargeVector<Span>> spans_ = std::make_shared<LargeVector<Span>>();
  std::shared_ptr<LargeVector<Transfer>> transfers_ = std::make_shared<LargeVector<Transfer>>();
  std::vector<int32_t> released_;
  int64_t makespan_ = 0;
  // The last result of `arrival`, valid until the next commit, with its transfers, their overheads,
  // and the tensors that are present already.
  mutable int32_t asked_op_ = -1, asked_device_ = -1;
  mutable std::optional<int64_t> answer_;
  mutable std::vector<Planned> planned_;
  mutable int64_t overhead_ns_ = 0;
  mutable std::vector<std::pair<int32_t, int32_t>> present_;
  mutable std::vector<std::pair<int64_t, int64_t>> changes_;
};

// Per device the first of its twins: devices that differ only in their indices. Twins have the same
// class, memory, allowed groups, host and links to and from all others and each other, and share
// their pool with no other device.
std::vector<int32_t> first_twins(const Problem& problem);

// Commits ops to `timeline`, each time the pair with the smallest (earliest start, op, device)
// among the ready ops and the devices with a path and room that the rule allows, until no pair is
// left; true when every op is committed. `favorites[op]` is the op's favorite child or -1; with
// an empty vector the rule is ETF's and allows every pair, otherwise SCT's (`placers/sct.py`).
bool list_schedule(Timeline& timeline, const std::vector<int32_t>& favorites);

// Per tensor, the mean ns of one transfer and of its overhead over all links between pools, rounded
// down; 0 without any.
std::vector<int64_t> mean_transfers(const Problem& problem);

// Per op, HEFT's upward rank: its mean time plus the longest path from its end to the end of the
// step, where every tensor takes its mean transfer.
std::vector<int64_t> upward_ranks(const Problem& problem);

// PEFT's table[device_class * ops + op] of the least time that must follow the op there, and per op
// its mean over the devices.
std::pair<std::vector<int64_t>, std::vector<int64_t>> optimistic_costs(const Problem& problem);

// Both commit all ops to `timeline`, fresh but for reservations, ready ops of the highest rank
// first, each to the device with the smallest (end + future[device_class * ops + op], device) of
// those that allow it; an empty `future` is zero. False, with the timeline half filled, at a dead
// end.
//
// Uses the end on the timeline, where the op fits. An op without room waits for memory; with
// `overfull`, once all wait in vain, the highest rank goes where most is left.
bool ranked_schedule(Timeline& timeline, const std::vector<int64_t>& ranks,
                     const std::vector<int64_t>& future, bool overfull = false);
// Uses the end in the classical model, without ports and with idle gaps filled, while the `loads`
// of the groups there stay below the memory; then commits in the order of those starts. The
// timeline may exceed the memory.
bool insertion_schedule(Timeline& timeline, const std::vector<int64_t>& ranks,
                        const std::vector<int64_t>& future, const std::vector<int64_t>& loads);

// Groups in a row, in blocks that stay together, and the devices for the segments of it.
struct Line {
  int32_t blocks;
  std::vector<int32_t> block;    // per group
  std::vector<int64_t> loads;    // loads[moment * groups + group], bytes
  std::vector<int64_t> costs;    // per tensor, of bringing it to another device
  std::vector<int32_t> devices;  // in the order of their segments
  std::vector<int64_t> caps;     // per entry of `devices`, the most bytes at every moment
  std::vector<uint8_t> allowed;  // allowed[device * groups + group]; empty allows all
};

// The device of every block for the best split of the line over the first k devices, for every k
// that makes it better. Best is the least sum of all segments' incoming costs; with `bottleneck`
// the smallest maximum over the segments of incoming costs plus time.
std::vector<std::vector<int32_t>> contiguous_splits(const Problem& problem, const Line& line,
                                                    bool bottleneck);

// Of the search for devices with which everything fits at every time, whatever the makespan.
struct Backtracked {
  std::vector<int32_t> devices;  // per group; empty where none were found
  bool proven;                   // where none were found: that there are none
};

// Devices of all groups with which the ops, committed in `order`, stay within the memory. The order
// is a topological one of all ops. Or it is empty: then devices that hold the persistent bytes and
// have the links, and if there are none, nothing fits in any order. `budget` is counted in
// committed ops and examined groups.
Backtracked backtrack(const Problem& problem, const std::vector<int32_t>& order, int64_t budget,
                      uint64_t seed);

}  // namespace baechi
