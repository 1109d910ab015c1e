// A balanced partition of groups that cuts little, by simulated annealing: a start for local
// search.
//
// Times are looked at as sums, without an order: minimize
//
//   sum over devices and windows of time of work^2 / (mean work)
//     + cut_weight * (0.2 * time of all transfers
//                     + 0.8 * sum over ports and windows of (time of transfers)^2 / (2 mean work))
//     + price * (bytes over the memory)
//
// where a tensor is sent once to each device that reads it, in the window of its producer, and a
// group takes `loads` bytes. The squares make a transfer cheap if its two ports have little to do,
// since it overlaps with work, and expensive if they are busy. A change costs time proportional to
// the group's neighbors, so many can be tried.
//
// Annealing by groups and clusters leaves two devices that change roles at some time, since a short
// stretch cannot be repaired without cutting twice. So an eighth of the changes are exchanges: all
// groups of two devices from a time on change places, at the best of all times, which one walk
// over them finds (2-opt* of vehicle routing: Potvin and Rousseau, Journal of the Operational
// Research Society 46, 1995).
#include <algorithm>

#include "search/local_search.h"
#include "search/random.h"

namespace baechi {

namespace {

__extension__ typedef __int128 int128_t;

// Of the mean work of a device.
constexpr double kHot = 0.3;
// One in so many changes belongs to an exchange of two devices.
constexpr int64_t kExchange = 8;
// Part of a transfer's time that counts whatever else its ports do.
constexpr double kAlone = 0.2;
// Windows of work in one of transfers, which may wait longer.
constexpr int32_t kWait = 4;

class Partition {
 public:
  Partition(const Problem& problem, const std::vector<int32_t>& devices,
            const std::vector<int64_t>& loads, const std::vector<int32_t>& order, double cut_weight,
            int32_t windows)
      : problem_(problem),
        loads_(loads),
        cut_weight_(cut_weight),
        device_(problem.groups),
        readers_(static_cast<size_t>(problem.tensors) * problem.devices, 0),
        windows_(windows),
        window_(problem.ops, 0),
        work_(static_cast<size_t>(problem.devices) * windows, 0),
        filled_(problem.pools, 0),
        ports_(std::max(1, windows / kWait)),
        sends_(static_cast<size_t>(problem.devices) * ports_, 0.0),
        receives_(static_cast<size_t>(problem.devices) * ports_, 0.0) {
    find_windows(order);
    for (int32_t group = 0; group < problem.groups; ++group) {
      device_[group] = devices[*problem.group_ops.first(group)];
      add_work(group, device_[group], 1);
      filled_[problem.pool[device_[group]]] += loads[group];
    }
    double memory = 0;
    for (int64_t nbytes : problem.memory) memory += static_cast<double>(nbytes);
    int64_t total = 0;
    for (int64_t time : work_) total += time;
    mean_ = std::max<int64_t>(1, total / problem.devices);
    price_ = 20.0 * static_cast<double>(total) / std::max(1.0, memory);
    for (int32_t tensor = 0; tensor < problem.tensors; ++tensor) {
      for (int32_t consumer : Row(problem.consumers, tensor)) {
        const int32_t device = device_[problem.group[consumer]];
        if (reads(tensor, device)++ == 0) {
          send(tensor, device_[problem.group[problem.producer[tensor]]], device, 1);
        }
      }
    }
  }

  int32_t device(int32_t group) const { return device_[group]; }
  int64_t mean() const { return mean_; }

  // Moves the group; returns the change of the cost.
  double move(int32_t group, int32_t to) {
    const int32_t from = device_[group];
    if (from == to) return 0;
    const int32_t pool_from = problem_.pool[from], pool_to = problem_.pool[to];
    double before = pool_from == pool_to ? 0 : excess(pool_from) + excess(pool_to);
    double after = add_work(group, from, -1) + add_work(group, to, 1);
    filled_[pool_from] -= loads_[group];
    filled_[pool_to] += loads_[group];
    if (pool_from != pool_to) after += excess(pool_from) + excess(pool_to);
    double cut = 0;
    for (int32_t op : Row(problem_.group_ops, group)) {
      for (int32_t tensor : Row(problem_.inputs, op)) {
        const int32_t home = device_[problem_.group[problem_.producer[tensor]]];
        if (--reads(tensor, from) == 0) cut += send(tensor, home, from, -1);
        if (reads(tensor, to)++ == 0) cut += send(tensor, home, to, 1);
      }
    }
    for (int32_t op : Row(problem_.group_ops, group)) {
      for (int32_t tensor : Row(problem_.outputs, op)) {
        if (problem_.consumers.size(tensor) == 0) continue;
        for (int32_t d = 0; d < problem_.devices; ++d) {
          if (reads(tensor, d) == 0) continue;
          cut += send(tensor, from, d, -1);
          cut += send(tensor, to, d, 1);
        }
      }
    }
    device_[group] = to;
    return after - before + cut_weight_ * cut;
  }

 private:
  // Ops of equal work in their order.
  void find_windows(const std::vector<int32_t>& order) {
    int64_t total = 0, before = 0;
    for (int32_t op : order) total += problem_.duration(op, 0);
    for (int32_t op : order) {
      // The product may pass 64 bits.
      const int128_t place = static_cast<int128_t>(before) * windows_;
      window_[op] = static_cast<int32_t>(place / std::max<int64_t>(1, total));
      window_[op] = std::min(window_[op], windows_ - 1);
      before += problem_.duration(op, 0);
    }
  }

  // Adds or removes the group's work; returns the change of the balance.
  double add_work(int32_t group, int32_t device, int sign) {
    double change = 0;
    for (int32_t op : Row(problem_.group_ops, group)) {
      int64_t& work = work_[static_cast<int64_t>(device) * windows_ + window_[op]];
      const double old = static_cast<double>(work);
      work += sign * problem_.duration(op, device);
      const double now = static_cast<double>(work);
      change += (now * now - old * old) * static_cast<double>(windows_);
    }
    return change / static_cast<double>(mean_);
  }

  int32_t& reads(int32_t tensor, int32_t device) {
    return readers_[static_cast<int64_t>(tensor) * problem_.devices + device];
  }
  // Adds or removes a transfer; returns the change of the cost.
  double send(int32_t tensor, int32_t src, int32_t dst, int sign) {
    if (src == dst) return 0;
    const double time = sign * sent(tensor, src, dst);
    if (problem_.ports == Ports::kNone || problem_.pool[src] == problem_.pool[dst]) return time;
    const int32_t window = window_[problem_.producer[tensor]] * ports_ / windows_;
    double change = 0;
    for (double* load : {&sends_[static_cast<size_t>(src) * ports_ + window],
                         &receives_[static_cast<size_t>(dst) * ports_ + window]}) {
      const double old = *load;
      *load += time;
      change += *load * *load - old * old;
    }
    const double full = change * ports_ / (2 * static_cast<double>(mean_));
    return kAlone * time + (1 - kAlone) * full;
  }

  // A missing path counts as very expensive.
  double sent(int32_t tensor, int32_t src, int32_t dst) const {
    if (src == dst) return 0;
    if (!problem_.has_path(src, dst)) return 100 * static_cast<double>(mean_);
    if (problem_.pool[src] == problem_.pool[dst]) {
      return static_cast<double>(problem_.latency_ns(src, dst));
    }
    return static_cast<double>(problem_.transfer_ns(tensor, src, dst) +
                               problem_.overhead_ns(src, dst));
  }
  double excess(int32_t pool) const {
    return price_ *
           static_cast<double>(std::max<int64_t>(0, filled_[pool] - problem_.memory[pool]));
  }

  const Problem& problem_;
  const std::vector<int64_t>& loads_;
  const double cut_weight_;
  std::vector<int32_t> device_;   // per group
  std::vector<int32_t> readers_;  // per tensor and device, how many consumers are there
  const int32_t windows_;
  std::vector<int32_t> window_;         // per op
  std::vector<int64_t> work_, filled_;  // work per device and window
  const int32_t ports_;
  std::vector<double> sends_, receives_;
  int64_t mean_ = 1;
  double price_ = 0;
};

// By the longest path up to them.
std::vector<int32_t> time_order(const Problem& problem) {
  std::vector<int64_t> head(problem.ops, 0);
  std::vector<int32_t> order(problem.ops);
  for (int32_t op = 0; op < problem.ops; ++op) {
    order[op] = op;
    for (int32_t tensor : Row(problem.inputs, op)) {
      const int32_t producer = problem.producer[tensor];
      head[op] = std::max(head[op], head[producer] + problem.duration(producer, 0));
    }
  }
  std::stable_sort(order.begin(), order.end(),
                   [&](int32_t a, int32_t b) { return head[a] < head[b]; });
  return order;
}

std::vector<int32_t> by_first_op(const Problem& problem, const std::vector<int32_t>& order) {
  std::vector<int32_t> sequence;
  std::vector<uint8_t> met(problem.groups, 0);
  for (int32_t op : order) {
    const int32_t group = problem.group[op];
    if (met[group]) continue;
    met[group] = 1;
    sequence.push_back(group);
  }
  return sequence;
}

}  // namespace

std::vector<int32_t> partition_search(const Problem& problem, const std::vector<int32_t>& devices,
                                      const std::vector<std::vector<int32_t>>& clusters,
                                      const std::vector<int64_t>& loads, double cut_weight,
                                      int32_t windows, int64_t moves, uint64_t seed,
                                      const Halt* halt) {
  std::vector<int32_t> result(devices);
  if (problem.devices == 1 || problem.groups == 0) return result;
  const std::vector<int32_t> order = time_order(problem);
  Partition partition(problem, devices, loads, order, cut_weight, windows);
  Random random(seed);
  std::vector<Rows> levels;
  for (const std::vector<int32_t>& cluster : clusters) levels.push_back(members_of(cluster));
  const std::vector<int32_t> sequence = by_first_op(problem, order);
  double cost = 0, least = 0;
  int64_t exchanged = 0;  // what exchanges have cost, in changes
  // Of the last change, and of all since the best partition: groups, and where they were.
  std::vector<std::pair<int32_t, int32_t>> moved, since_best;
  const auto take_back = [&](std::vector<std::pair<int32_t, int32_t>>& made, size_t keep) {
    while (made.size() > keep) {
      partition.move(made.back().first, made.back().second);
      made.pop_back();
    }
  };
  const double scale = static_cast<double>(partition.mean());
  Cooling cooling(4);
  for (int64_t step = 0; step < moves && !halted(halt); ++step) {
    const double progress = static_cast<double>(step) / static_cast<double>(moves);
    const double heat = scale * kHot * cooling.at(progress);
    const int32_t group = random.below(problem.groups), here = partition.device(group);
    int32_t there = random.below(problem.devices - 1);
    there += there >= here ? 1 : 0;
    if (random.below(4) > 0) {
      // Where a neighbor is.
      const int32_t op = problem.group_ops.first(
          group)[random.below(static_cast<int32_t>(problem.group_ops.size(group)))];
      const int32_t other = random_neighbor(problem, op, random);
      if (other >= 0 && partition.device(problem.group[other]) != here) {
        there = partition.device(problem.group[other]);
      }
    }
    moved.clear();
    double change = 0;
    const auto move = [&](int32_t which, int32_t to) {
      if (!problem.allows(which, to)) return;
      moved.emplace_back(which, partition.device(which));
      change += partition.move(which, to);
    };
    const int32_t kind = random.below(8);
    if (exchanged * kExchange < step) {
      // From the last op back, so that the cost of an exchange from every time on is met.
      double best = 0;
      size_t keep = 0;
      for (size_t i = sequence.size(); i-- > 0;) {
        const int32_t at = partition.device(sequence[i]);
        if (at != here && at != there) continue;
        move(sequence[i], at == here ? there : here);
        if (change < best) {
          best = change;
          keep = moved.size();
        }
      }
      const int64_t paid = static_cast<int64_t>(2 * moved.size() + sequence.size() / 8) + 1;
      exchanged += paid;
      step += paid;
      take_back(moved, keep);
      change = best;
    } else if (kind < 4) {
      move(group, there);
    } else if (kind < 6) {
      const int32_t other = random.below(problem.groups);
      if (partition.device(other) != here) {
        const int32_t at = partition.device(other);
        move(group, at);
        move(other, here);
      }
    } else if (!levels.empty()) {
      const int32_t level = random.below(static_cast<int32_t>(levels.size()));
      for (int32_t member : Row(levels[level], clusters[level][group])) {
        if (partition.device(member) == here) move(member, there);
      }
      step += static_cast<int64_t>(moved.size());
    }
    if (moved.empty()) continue;
    if (change <= heat * random.exponential()) {
      cost += change;
      since_best.insert(since_best.end(), moved.begin(), moved.end());
      if (cost < least - 1e-6 * scale) {
        least = cost;
        since_best.clear();
      }
    } else {
      take_back(moved, 0);
    }
  }
  take_back(since_best, 0);
  for (int32_t op = 0; op < problem.ops; ++op) result[op] = partition.device(problem.group[op]);
  return result;
}

}  // namespace baechi
