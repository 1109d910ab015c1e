#include <algorithm>
#include <utility>

#include "clock/core.h"

namespace baechi {

namespace {

__extension__ typedef __int128 int128_t;

constexpr uint64_t kNsPerS = 1'000'000'000;
// Sizes below it times kNsPerS plus any rate are below 2^64, and the division needs no 128 bits.
constexpr uint64_t kShort = (uint64_t{1} << 63) / kNsPerS;

// The transpose of `rows`, whose values are below `count`; each row of it is ascending.
Rows transpose(const SharedRows& rows, int32_t count) {
  Rows result;
  result.begin.assign(static_cast<size_t>(count) + 1, 0);
  for (int32_t value : rows.values) ++result.begin[value + 1];
  for (int32_t i = 0; i < count; ++i) result.begin[i + 1] += result.begin[i];
  result.values.resize(rows.values.size());
  std::vector<int64_t> next(result.begin.begin(), result.begin.end() - 1);
  const int32_t size = static_cast<int32_t>(rows.begin.size()) - 1;
  for (int32_t row = 0; row < size; ++row) {
    for (int32_t value : Row(rows, row)) result.values[next[value]++] = row;
  }
  return result;
}

}  // namespace

Rows places(const int32_t* values, int32_t size, int32_t count) {
  Rows result;
  result.begin.assign(static_cast<size_t>(count) + 1, 0);
  result.values.resize(static_cast<size_t>(size));
  if (std::is_sorted(values, values + size)) {
    for (int32_t i = 0, row = 0; row <= count; ++row) {
      while (i < size && values[i] < row) ++i;
      result.begin[row] = i;
    }
    for (int32_t i = 0; i < size; ++i) result.values[i] = i;
    return result;
  }
  for (int32_t i = 0; i < size; ++i) ++result.begin[values[i] + 1];
  for (int32_t row = 0; row < count; ++row) result.begin[row + 1] += result.begin[row];
  std::vector<int64_t> next(result.begin.begin(), result.begin.end() - 1);
  for (int32_t i = 0; i < size; ++i) result.values[next[values[i]]++] = i;
  return result;
}

void Graph::derive() {
  group_ops = shared(places(group, groups));
  inputs = shared(transpose(consumers, ops));
  outputs = shared(places(producer, ops));
  std::vector<int64_t> sums(ops, 0);
  for (int32_t t = 0; t < tensors; ++t) sums[producer[t]] += nbytes[t];
  output_bytes = std::move(sums);
  least_copies = nbytes;
  if (!part_bytes.empty()) {
    std::vector<int64_t> copies(nbytes.begin(), nbytes.end());
    for (int32_t t = 0; t < tensors; ++t) {
      for (int64_t part = part_begin[t]; part < part_begin[t + 1]; ++part) {
        copies[t] = std::min(copies[t], part_bytes[static_cast<size_t>(part)]);
      }
    }
    least_copies = std::move(copies);
  }
  least_workspace = workspace;
  if (beside.values.empty()) return;
  std::vector<int64_t> least(workspace.begin(), workspace.end());
  for (int32_t op = 0; op < ops; ++op) {
    for (int64_t i = beside.begin[op]; i < beside.begin[op + 1]; ++i) {
      least[op] -= beside_bytes[static_cast<size_t>(i)];
    }
  }
  least_workspace = std::move(least);
}

void Problem::finish() {
  pool_devices = places(pool, pools);
  if (rate.values.size() == 1 && rate[0] > 0) {
    sent_ns.resize(tensors);
    for (int32_t t = 0; t < tensors; ++t) sent_ns[t] = divided_ns(t, 0);
  }
  if (allowed.empty()) return;
  only.assign(groups, -1);
  std::vector<int32_t> count(groups, 0);
  for (int32_t device = 0; device < devices; ++device) {
    const uint8_t* row = allowed.data() + static_cast<int64_t>(device) * groups;
    for (int32_t g = 0; g < groups; ++g) {
      if (row[g]) only[g] = ++count[g] == 1 ? device : -1;
    }
  }
}

int64_t Problem::divided_ns(int32_t tensor, int64_t at) const {
  const int64_t bytes_per_s = rate[at];
  const uint64_t size = static_cast<uint64_t>(nbytes[tensor]);
  if (size < kShort) {
    const uint64_t scaled = size * kNsPerS + static_cast<uint64_t>(bytes_per_s) - 1;
    return latency[at] + static_cast<int64_t>(scaled / static_cast<uint64_t>(bytes_per_s));
  }
  const int128_t scaled = static_cast<int128_t>(size) * kNsPerS;
  return latency[at] + static_cast<int64_t>((scaled + bytes_per_s - 1) / bytes_per_s);
}

Timeline::Timeline(const Problem& problem)
    : problem_(problem),
      device_(problem.ops, -1),
      group_device_(problem.groups, -1),
      device_free_(problem.devices, 0),
      send_free_(problem.devices, 0),
      receive_free_(problem.devices, 0),
      host_free_(problem.hosts, 0),
      used_(problem.devices, 0),
      persistent_(problem.pools, 0),
      held_back_(problem.pools, 0),
      profiles_(problem.pools) {
  // Untouched pages cost nothing, and growing costs a copy and fresh pages each time.
  const size_t copies = problem.consumers.values.size();
  presences_.reserve(problem.tensors + copies);
  transfers_->reserve(copies);
  spans_->reserve(problem.ops);
  for (int32_t t = 0; t < problem.tensors; ++t) {
    presences_.push_back({-1, -1, -1, static_cast<int32_t>(problem.consumers.size(t)), 0, 0});
  }
  // Groups with a single device reserve their memory at once, before others take it.
  for (int32_t g = 0; g < static_cast<int32_t>(problem.only.size()); ++g) {
    if (problem.only[g] >= 0) reserve(*problem.group_ops.first(g), problem.only[g]);
  }
}

int32_t Timeline::waits_for(int32_t op) const {
  for (int32_t tensor : Row(problem_.inputs, op)) {
    if (!committed(problem_.producer[tensor])) return tensor;
  }
  return -1;
}

int32_t Timeline::find(int32_t tensor, int32_t pool) const {
  int32_t at = tensor;
  while (at >= 0 && presences_[at].pool != pool) at = presences_[at].next;
  return at;
}

std::optional<int64_t> Timeline::arrival(int32_t op, int32_t device) const {
  if (op != asked_op_ || device != asked_device_) {
    answer_ = plan(op, device);
    asked_op_ = op;
    asked_device_ = device;
  }
  return answer_;
}

std::optional<int64_t> Timeline::plan(int32_t op, int32_t device) const {
  planned_.clear();
  present_.clear();
  overhead_ns_ = 0;
  const int32_t pool = problem_.pool[device];
  int64_t ready = 0;
  for (int32_t tensor : Row(problem_.inputs, op)) {
    const int32_t at = find(tensor, pool);
    if (at >= 0) {
      const Presence& presence = presences_[at];
      int64_t available = presence.available;
      if (presence.holder != device) {
        if (!problem_.has_path(presence.holder, device)) return std::nullopt;
        available += problem_.latency_ns(presence.holder, device);
      }
      ready = std::max(ready, available);
      present_.emplace_back(tensor, at);
    } else {
      const Presence& made = presences_[tensor];
      if (!problem_.has_path(made.holder, device)) return std::nullopt;
      planned_.push_back({tensor, made.holder, made.available, 0});
    }
  }
  const auto sooner = [](const Planned& a, const Planned& b) {
    return a.start != b.start ? a.start < b.start : a.tensor < b.tensor;
  };
  if (planned_.size() == 2) {
    if (sooner(planned_[1], planned_[0])) std::swap(planned_[0], planned_[1]);
  } else if (planned_.size() > 2) {
    std::sort(planned_.begin(), planned_.end(), sooner);
  }
  // All these transfers end at `device`, so its receive port orders them, and no send port that
  // one of them takes can delay a later one more than the receive port does.
  int64_t receive_free = receive_free_[device];
  for (Planned& transfer : planned_) {
    if (problem_.ports != Ports::kNone) {
      transfer.start = std::max({transfer.start, send_free_[transfer.src], receive_free});
    }
    transfer.end = transfer.start + problem_.transfer_ns(transfer.tensor, transfer.src, device);
    receive_free = transfer.end;
    ready = std::max(ready, transfer.end);
    overhead_ns_ += problem_.overhead_ns(transfer.src, device);
  }
  return ready;
}

std::optional<int64_t> Timeline::earliest_start(int32_t op, int32_t device) const {
  const std::optional<int64_t> ready = arrival(op, device);
  if (!ready) return std::nullopt;
  return this->start(op, device, *ready);
}

std::optional<int64_t> Timeline::earliest_end(int32_t op, int32_t device) const {
  const std::optional<int64_t> start = earliest_start(op, device);
  if (!start) return std::nullopt;
  return *start + busy_ns(op, device);
}

int64_t Timeline::receiving_ns(int32_t op, int32_t device) const {
  arrival(op, device);
  int64_t sum = 0;
  for (const Planned& transfer : planned_) {
    sum += problem_.transfer_ns(transfer.tensor, transfer.src, device);
  }
  return sum;
}

bool Timeline::allows(int32_t op, int32_t device) const {
  const int64_t at = static_cast<int64_t>(device) * problem_.groups + problem_.group[op];
  if (!problem_.allowed.empty() && !problem_.allowed[at]) return false;
  return used_[device] || devices_used_ < problem_.max_devices;
}

Fit Timeline::fit(int32_t op, int32_t device) const {
  const int32_t group = problem_.group[op];
  if (group_device_[group] >= 0 && group_device_[group] != device) return Fit::kNever;
  if (!allows(op, device)) return Fit::kNever;
  const std::optional<int64_t> earliest = earliest_start(op, device);
  if (!earliest) return Fit::kNever;
  const int32_t pool = problem_.pool[device];
  const Profile& profile = profiles_[pool];
  int64_t room = problem_.memory[pool] - persistent_[pool];
  if (group_device_[group] < 0) {
    room -= problem_.group_persistent[group];
    if (problem_.group_ops.size(group) > 1) room -= held_back_[pool];
  }
  const int64_t start = *earliest, end = start + busy_ns(op, device);
  const int64_t workspace = end > start ? workspace_in(pool, op) : 0;
  int64_t missing = 0, staying = problem_.output_bytes[op];
  for (const Planned& transfer : planned_) {
    const int64_t nbytes = copy_bytes(transfer.tensor, pool);
    missing += nbytes;
    if (remaining(transfer.tensor) > 1) staying += nbytes;
  }
  const int64_t adds = missing + problem_.output_bytes[op] + workspace;
  // Reused memory is counted when the op ends.
  const int64_t most = adds - std::min<int64_t>(workspace, 0);
  if (profile.bound() + most <= room) return Fit::kFits;
  // On a device alone in its pool, all that stays is there before the op starts.
  if (end > start && problem_.pool_devices.size(pool) == 1 && profile.total() + adds > room) {
    return Fit::kFull;
  }
  if (profile.max_ever() + most <= room) return Fit::kFits;
  changes_.clear();
  for (const Planned& transfer : planned_) {
    const int64_t nbytes = copy_bytes(transfer.tensor, pool);
    changes_.emplace_back(transfer.start, nbytes);
    if (remaining(transfer.tensor) == 1) changes_.emplace_back(end, -nbytes);
  }
  for (int32_t tensor : Row(problem_.inputs, op)) {
    const int32_t at = remaining(tensor) == 1 ? find(tensor, pool) : -1;
    if (at < 0 || (problem_.kept[tensor] && at == tensor)) continue;
    const int64_t nbytes = at == tensor ? problem_.nbytes[tensor] : copy_bytes(tensor, pool);
    changes_.emplace_back(std::max(end, presences_[at].last_use), -nbytes);
    staying -= nbytes;
  }
  if (profile.total() + staying > room) return Fit::kFull;
  changes_.emplace_back(start, problem_.output_bytes[op] + workspace);
  changes_.emplace_back(end, -workspace);
  std::sort(changes_.begin(), changes_.end());
  if (profile.max_between(0, changes_.front().first) > room) return Fit::kCrowded;
  int64_t level = 0;
  for (size_t i = 0; i < changes_.size(); ++i) {
    level += changes_[i].second;
    const int64_t to = i + 1 < changes_.size() ? changes_[i + 1].first : kForever;
    if (to > changes_[i].first && profile.max_between(changes_[i].first, to) + level > room) {
      return Fit::kCrowded;
    }
  }
  return Fit::kFits;
}

void Timeline::reserve(int32_t op, int32_t device) {
  const int32_t group = problem_.group[op];
  if (group_device_[group] >= 0) return;
  group_device_[group] = device;
  if (!used_[device]) ++devices_used_;
  used_[device] = 1;
  persistent_[problem_.pool[device]] += problem_.group_persistent[group];
}

void Timeline::release(int32_t tensor) {
  // A kept tensor stays on its producer's device, and its copies are freed.
  const int32_t first = problem_.kept[tensor] ? presences_[tensor].next : tensor;
  for (int32_t at = first; at >= 0; at = presences_[at].next) {
    const Presence& presence = presences_[at];
    const bool made = at == tensor;
    const int64_t nbytes = made ? problem_.nbytes[tensor] : copy_bytes(tensor, presence.pool);
    profiles_[presence.pool].add(presence.last_use, -nbytes);
    released_.push_back(presence.pool);
  }
}

const Span& Timeline::commit(int32_t op, int32_t device) {
  place(op, device, *arrival(op, device));
  return spans_->back();
}

void Timeline::place(int32_t op, int32_t device, int64_t ready) {
  const int64_t start = this->start(op, device, ready);
  const int64_t end = start + busy_ns(op, device);
  const int32_t pool = problem_.pool[device];
  Profile& profile = profiles_[pool];
  asked_op_ = -1;
  released_.clear();
  reserve(op, device);
  device_[op] = device;
  const int64_t workspace = end > start ? workspace_in(pool, op) : 0;
  profile.add(start, problem_.output_bytes[op] + workspace);
  profile.add(end, -workspace);
  for (int32_t tensor : Row(problem_.outputs, op)) {
    Presence& made = presences_[tensor];
    made.pool = pool;
    made.holder = device;
    made.available = made.last_use = end;
  }
  for (const Planned& transfer : planned_) {
    const int32_t tensor = transfer.tensor, src = transfer.src;
    transfers_->push_back({tensor, src, device, transfer.start, transfer.end});
    if (problem_.ports != Ports::kNone) {
      send_free_[src] = receive_free_[device] = transfer.end;
      if (problem_.ports == Ports::kShared) receive_free_[src] = send_free_[device] = transfer.end;
    }
    profile.add(transfer.start, copy_bytes(tensor, pool));
    const int32_t copy = static_cast<int32_t>(presences_.size());
    Presence& made = presences_[tensor];
    made.last_use = std::max(made.last_use, transfer.end);
    const int32_t next = std::exchange(made.next, copy), left = --made.remaining;
    presences_.push_back({pool, device, next, 0, transfer.end, end});
    if (left == 0) release(tensor);
  }
  for (const auto& [tensor, at] : present_) {
    presences_[at].last_use = std::max(presences_[at].last_use, end);
    if (--presences_[tensor].remaining == 0) release(tensor);
  }
  device_free_[device] = end;
  problem_.launch_at(op, device, overhead_ns_, start, host_free_.data());
  makespan_ = std::max(makespan_, end);
  spans_->push_back({op, device, start, end});
}

std::vector<int64_t> Timeline::peaks() const {
  std::vector<int64_t> peaks(persistent_);
  for (int32_t pool = 0; pool < problem_.pools; ++pool) {
    peaks[pool] += profiles_[pool].peak(makespan_);
  }
  return peaks;
}

std::vector<int64_t> Timeline::least_peaks() {
  for (int32_t tensor = 0; tensor < problem_.tensors; ++tensor) {
    const Presence& made = presences_[tensor];
    if (made.holder < 0 || made.remaining == 0) continue;
    // Without a copy, later readers run here or receive it from here, not before these times.
    const bool sent = problem_.ports != Ports::kNone && made.next < 0;
    int64_t soonest = sent ? send_free_[made.holder] : made.available;
    for (int32_t device : Row(problem_.pool_devices, made.pool)) {
      soonest = std::min(soonest, device_free_[device]);
    }
    for (int32_t at = tensor; at >= 0; at = presences_[at].next) {
      const Presence& presence = presences_[at];
      if (at == tensor && problem_.kept[tensor]) continue;
      const int64_t until = at == tensor ? std::max(presence.last_use, soonest) : presence.last_use;
      const bool first = at == tensor;
      const int64_t nbytes = first ? problem_.nbytes[tensor] : copy_bytes(tensor, presence.pool);
      profiles_[presence.pool].add(until, -nbytes);
    }
  }
  return peaks();
}

std::vector<int64_t> Timeline::left() const {
  std::vector<int64_t> left(problem_.memory);
  for (int32_t pool = 0; pool < problem_.pools; ++pool) {
    left[pool] -= persistent_[pool] + profiles_[pool].total();
  }
  return left;
}

int64_t Timeline::need(int32_t op) const {
  const int32_t group = problem_.group[op];
  int64_t need = problem_.workspace[op] + problem_.output_bytes[op];
  if (group_device_[group] < 0) need += problem_.group_persistent[group];
  for (int32_t tensor : Row(problem_.inputs, op)) need += problem_.nbytes[tensor];
  return need;
}

}  // namespace baechi
