#include "search/trial.h"

#include <algorithm>
#include <tuple>
#include <utility>

namespace baechi {

namespace {

// Ops between two checkpoints: a resumed evaluation repeats half of them on average, and saving one
// costs as much as a few ops.
constexpr int32_t kStride = 16;

}  // namespace

Trial::Trial(const Problem& problem, const std::vector<int32_t>& devices,
             const std::vector<int32_t>& order)
    : problem_(problem),
      position_(problem.ops),
      end_(problem.ops, 0),
      busy_(problem.ops, 0),
      copies_(static_cast<size_t>(problem.tensors) * problem.pools),
      state_(static_cast<size_t>(problem.devices) * 4 + problem.hosts),
      events_(problem.pools),
      copied_(problem.pools) {
  std::vector<int64_t> fastest(problem.ops, 0);
  for (int32_t op = 0; op < problem.ops; ++op) {
    int64_t least = kForever;
    for (int32_t d = 0; d < problem.devices; ++d) least = std::min(least, problem.duration(op, d));
    fastest[op] = least;
  }
  tail_.assign(problem.ops, 0);
  for (int32_t op = problem.ops - 1; op >= 0; --op) {
    for (int32_t tensor : Row(problem.inputs, op)) {
      int64_t& tail = tail_[problem.producer[tensor]];
      tail = std::max(tail, tail_[op] + fastest[op]);
    }
  }
  const size_t checkpoints = static_cast<size_t>(problem.ops / kStride) + 1;
  checkpoints_.resize(2 * checkpoints * state_.size());
  live_.assign(checkpoints, 0);
  sent_before_.assign(2 * checkpoints, 0);
  reset(devices, order);
}

void Trial::reset(const std::vector<int32_t>& devices, const std::vector<int32_t>& order) {
  device_ = devices;
  order_ = order;
  for (int32_t i = 0; i < problem_.ops; ++i) position_[order_[i]] = i;
  work_.assign(problem_.devices, 0);
  for (int32_t op = 0; op < problem_.ops; ++op) {
    work_[device_[op]] += problem_.duration(op, device_[op]);
  }
  groups_on_.assign(problem_.devices, 0);
  held_bytes_.assign(problem_.pools, 0);
  for (int32_t group = 0; group < problem_.groups; ++group) {
    const int32_t device = device_[*problem_.group_ops.first(group)];
    ++groups_on_[device];
    held_bytes_[problem_.pool[device]] += problem_.group_persistent[group];
  }
  for (Copy& copy : copies_) copy.by = -1;
  sent_.clear();
  moved_.clear();
  first_ = 0;
  valid_ = evaluate(kForever);
  keep();
}

int64_t* Trial::checkpoint(int32_t index, bool trial) {
  const size_t version = 2 * static_cast<size_t>(index) + (live_[index] ^ (trial ? 1 : 0));
  return checkpoints_.data() + version * state_.size();
}

void Trial::move_group(int32_t group, int32_t device) {
  const int32_t from = device_[*problem_.group_ops.first(group)];
  if (from == device) return;
  moved_.push_back({Moved::kGroup, group, from});
  --groups_on_[from];
  ++groups_on_[device];
  held_bytes_[problem_.pool[from]] -= problem_.group_persistent[group];
  held_bytes_[problem_.pool[device]] += problem_.group_persistent[group];
  for (int32_t op : Row(problem_.group_ops, group)) {
    work_[from] -= problem_.duration(op, from);
    work_[device] += problem_.duration(op, device);
    device_[op] = device;
    first_ = std::min(first_, position_[op]);
  }
}

void Trial::move_op(int32_t op, int32_t to) {
  const int32_t from = position_[op];
  if (from == to) return;
  moved_.push_back({Moved::kOp, op, from});
  const auto begin = order_.begin();
  if (from < to) {
    std::rotate(begin + from, begin + from + 1, begin + to + 1);
  } else {
    std::rotate(begin + to, begin + from, begin + from + 1);
  }
  const auto [low, high] = std::minmax(from, to);
  for (int32_t i = low; i <= high; ++i) position_[order_[i]] = i;
  first_ = std::min(first_, low);
}

void Trial::reorder(const std::vector<int32_t>& order) {
  int32_t same = 0;
  while (same < problem_.ops && order[same] == order_[same]) ++same;
  if (same == problem_.ops) return;
  moved_.push_back({Moved::kOrder, 0, 0});
  old_order_ = order_;
  order_ = order;
  for (int32_t i = same; i < problem_.ops; ++i) position_[order_[i]] = i;
  first_ = std::min(first_, same);
}

bool Trial::evaluate(int64_t limit) {
  limit_ = limit;
  old_makespan_ = makespan_;
  old_finishes_ = finishes_;
  ++epoch_;
  sending_.clear();
  old_ends_.clear();
  old_copies_.clear();
  if (first_ >= problem_.ops) {  // nothing changed
    base_ = reached_ = problem_.ops;
    return makespan_ <= limit;
  }
  const int32_t index = first_ / kStride;
  base_ = reached_ = index * kStride;
  if (base_ > 0) {
    const int64_t* saved = checkpoint(index, false);
    std::copy(saved, saved + state_.size(), state_.begin());
  } else {
    std::fill(state_.begin(), state_.end(), 0);
  }
  for (int32_t i = base_; i < problem_.ops; ++i) {
    if (i % kStride == 0) {
      std::copy(state_.begin(), state_.end(), checkpoint(i / kStride, true));
      const size_t version = 2 * static_cast<size_t>(i / kStride) + (live_[i / kStride] ^ 1);
      sent_before_[version] = static_cast<int32_t>(sending_.size());
    }
    const int32_t op = order_[i];
    old_ends_.emplace_back(end_[op], busy_[op]);
    reached_ = i + 1;
    if (!commit(op)) {
      count();
      return false;
    }
  }
  count();
  makespan_ = 0;
  finishes_ = 0;
  for (int32_t d = 0; d < problem_.devices; ++d) {
    makespan_ = std::max(makespan_, state_[d]);
    finishes_ += static_cast<double>(state_[d]);
  }
  return makespan_ <= limit;
}

// A transfer costs as much as two ops.
void Trial::count() {
  evaluations_ += reached_ - base_ + 2 * static_cast<int64_t>(sending_.size());
}

bool Trial::commit(int32_t op) {
  const int32_t devices = problem_.devices, device = device_[op], pool = problem_.pool[device];
  int64_t *free = state_.data(), *send = free + devices, *receive = send + devices,
          *done = receive + devices, *host = done + devices;
  int64_t ready = free[device], received = 0;
  planned_.clear();
  for (int32_t tensor : Row(problem_.inputs, op)) {
    const int32_t producer = problem_.producer[tensor], src = device_[producer];
    int64_t available = end_[producer];
    int32_t holder = src;
    if (src != device && problem_.pool[src] != pool) {
      const Copy& there = copy(tensor, pool);
      if (there.by < 0 || (there.epoch != epoch_ && position_[there.by] >= base_)) {
        if (!problem_.has_path(src, device)) return false;
        planned_.push_back({available, tensor});
        continue;
      }
      available = there.available;
      holder = there.holder;
    }
    if (holder != device) {
      if (!problem_.has_path(holder, device)) return false;
      available += problem_.latency_ns(holder, device);
    }
    ready = std::max(ready, available);
  }
  if (planned_.size() > 1) {
    std::sort(planned_.begin(), planned_.end(), [](const Planned& a, const Planned& b) {
      return a.produced != b.produced ? a.produced < b.produced : a.tensor < b.tensor;
    });
  }
  for (const Planned& transfer : planned_) {
    const int32_t src = device_[problem_.producer[transfer.tensor]];
    int64_t begin = transfer.produced;
    if (problem_.ports != Ports::kNone) begin = std::max({begin, send[src], receive[device]});
    const int64_t arrival = begin + problem_.transfer_ns(transfer.tensor, src, device);
    if (problem_.ports != Ports::kNone) {
      send[src] = receive[device] = arrival;
      if (problem_.ports == Ports::kShared) receive[src] = send[device] = arrival;
    }
    const int64_t at = static_cast<int64_t>(transfer.tensor) * problem_.pools + pool;
    old_copies_.emplace_back(at, copies_[at]);
    copies_[at] = {begin, arrival, 0, op, device, epoch_, 0};
    sending_.push_back(at);
    ready = std::max(ready, arrival);
    received += problem_.overhead_ns(src, device);
  }
  ready = std::max(ready, problem_.launched(op, device, received, host));
  problem_.launch_at(op, device, received, ready, host);
  const int64_t busy = problem_.busy_ns(op, device, received), end = ready + busy;
  end_[op] = free[device] = end;
  busy_[op] = busy;
  done[device] += problem_.duration(op, device);
  return end + std::max(tail_[op], work_[device] - done[device]) <= limit_;
}

// How many of `sent_` the order before `base_` has made.
int32_t Trial::sent_before() const {
  if (base_ >= problem_.ops) return static_cast<int32_t>(sent_.size());
  if (base_ == 0) return 0;
  const size_t index = static_cast<size_t>(base_ / kStride);
  return sent_before_[2 * index + live_[index]];
}

void Trial::keep() {
  if (base_ < problem_.ops) {
    // Copies of the old order from `base_` on that were not made anew are gone.
    const size_t before = static_cast<size_t>(sent_before());
    for (size_t i = before; i < sent_.size(); ++i) {
      if (copies_[sent_[i]].epoch != epoch_) copies_[sent_[i]].by = -1;
    }
    sent_.resize(before);
    sent_.insert(sent_.end(), sending_.begin(), sending_.end());
    for (int32_t i = base_; i < problem_.ops; i += kStride) {
      live_[i / kStride] ^= 1;
      sent_before_[2 * static_cast<size_t>(i / kStride) + live_[i / kStride]] +=
          static_cast<int32_t>(before);
    }
  }
  moved_.clear();
  settle();
}

void Trial::undo() {
  for (int32_t i = base_; i < reached_; ++i) {
    std::tie(end_[order_[i]], busy_[order_[i]]) = old_ends_[i - base_];
  }
  for (size_t i = old_copies_.size(); i-- > 0;) {
    copies_[old_copies_[i].first] = old_copies_[i].second;
  }
  makespan_ = old_makespan_;
  finishes_ = old_finishes_;
  while (!moved_.empty()) {
    const Moved moved = moved_.back();
    moved_.pop_back();
    if (moved.kind == Moved::kGroup) {
      move_group(moved.what, moved.from);
      moved_.pop_back();
    } else if (moved.kind == Moved::kOp) {
      move_op(moved.what, moved.from);
      moved_.pop_back();
    } else {
      order_.swap(old_order_);
      for (int32_t i = 0; i < problem_.ops; ++i) position_[order_[i]] = i;
    }
  }
  settle();
}

// Nothing has changed since, and nothing is to be undone.
void Trial::settle() {
  old_ends_.clear();
  old_copies_.clear();
  sending_.clear();
  base_ = reached_ = problem_.ops;
  old_makespan_ = makespan_;
  old_finishes_ = finishes_;
  first_ = INT32_MAX;
}

int64_t Trial::received_ns(int32_t op) const {
  int64_t sum = 0;
  for (int32_t tensor : Row(problem_.inputs, op)) {
    if (copy(tensor, problem_.pool[device_[op]]).by != op) continue;
    sum += problem_.overhead_ns(device_[problem_.producer[tensor]], device_[op]);
  }
  return sum;
}

std::vector<int32_t> Trial::critical() const {
  std::vector<int32_t> before(problem_.ops, -1), last(problem_.devices, -1), path;
  std::vector<int32_t> launched(problem_.ops, -1), last_launch(problem_.hosts, -1);
  std::vector<int64_t> launches_end(problem_.ops, 0), host_free(problem_.hosts, 0);
  for (int32_t op : order_) {
    before[op] = last[device_[op]];
    last[device_[op]] = op;
    const int32_t device = device_[op];
    const int64_t received = problem_.hosts == 0 ? 0 : received_ns(op);
    if (problem_.launch_ns(op, device, received) == 0) continue;
    launches_end[op] = problem_.launched(op, device, received, host_free.data());
    problem_.launch_at(op, device, received, start(op), host_free.data());
    launched[op] = std::exchange(last_launch[problem_.host[device]], op);
  }
  int32_t op = -1;
  for (int32_t other : last) {
    if (other >= 0 && (op < 0 || end_[other] > end_[op])) op = other;
  }
  while (op >= 0 && static_cast<int32_t>(path.size()) <= problem_.ops) {
    path.push_back(op);
    const int64_t begin = start(op);
    const int32_t previous = before[op];
    int32_t cause = previous >= 0 && end_[previous] == begin ? previous : -1;
    if (cause < 0 && launches_end[op] == begin) cause = launched[op];
    if (cause < 0) {
      int64_t latest = -1;
      for (int32_t tensor : Row(problem_.inputs, op)) {
        const int32_t producer = problem_.producer[tensor];
        const int32_t pool = problem_.pool[device_[op]];
        const bool home = problem_.pool[device_[producer]] == pool;
        const int64_t available = home ? end_[producer] : copy(tensor, pool).available;
        if (available > latest) {
          latest = available;
          cause = producer;
        }
      }
    }
    op = cause;
  }
  return path;
}

}  // namespace baechi
