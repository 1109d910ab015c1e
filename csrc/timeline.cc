#include <algorithm>

#include "core.h"

namespace baechi {

namespace {

__extension__ typedef __int128 int128_t;

// A fixed hash of the time is the treap's priority, so that equal input gives equal trees.
uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// The transpose of `rows`, whose values are below `count`; each row of it is ascending.
Rows transpose(const Rows& rows, int32_t count) {
  Rows result;
  result.begin.assign(static_cast<size_t>(count) + 1, 0);
  for (int32_t value : rows.values) ++result.begin[value + 1];
  for (int32_t i = 0; i < count; ++i) result.begin[i + 1] += result.begin[i];
  result.values.resize(rows.values.size());
  std::vector<int64_t> next(result.begin.begin(), result.begin.end() - 1);
  for (int32_t row = 0; row + 1 < static_cast<int32_t>(rows.begin.size()); ++row) {
    for (int32_t value : Row(rows, row)) result.values[next[value]++] = row;
  }
  return result;
}

Rows singletons(const std::vector<int32_t>& values) {
  Rows rows;
  rows.values = values;
  rows.begin.resize(values.size() + 1);
  for (size_t i = 0; i <= values.size(); ++i) rows.begin[i] = static_cast<int64_t>(i);
  return rows;
}

}  // namespace

void Problem::finish() {
  group_ops = transpose(singletons(group), groups);
  inputs = transpose(consumers, ops);
  outputs = transpose(singletons(producer), ops);
  pool_devices = transpose(singletons(pool), pools);
  output_bytes.assign(ops, 0);
  for (int32_t t = 0; t < tensors; ++t) output_bytes[producer[t]] += nbytes[t];
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

int64_t Problem::transfer_ns(int32_t tensor, int32_t src, int32_t dst) const {
  const int64_t at = link(src, dst);
  const int128_t scaled = static_cast<int128_t>(nbytes[tensor]) * 1'000'000'000;
  return latency[at] + static_cast<int64_t>((scaled + rate[at] - 1) / rate[at]);
}

void Profile::add(int64_t time, int64_t delta) {
  if (delta != 0) root_ = insert(root_, time, delta);
}

int32_t Profile::insert(int32_t node, int64_t time, int64_t delta) {
  if (node < 0) {
    nodes_.push_back({time, delta, delta, delta, mix(static_cast<uint64_t>(time)), -1, -1});
    return static_cast<int32_t>(nodes_.size()) - 1;
  }
  if (time == nodes_[node].time) {
    nodes_[node].delta += delta;
  } else if (time < nodes_[node].time) {
    const int32_t child = insert(nodes_[node].left, time, delta);
    nodes_[node].left = child;
    if (nodes_[child].priority > nodes_[node].priority) {
      nodes_[node].left = nodes_[child].right;
      nodes_[child].right = node;
      update(node);
      node = child;
    }
  } else {
    const int32_t child = insert(nodes_[node].right, time, delta);
    nodes_[node].right = child;
    if (nodes_[child].priority > nodes_[node].priority) {
      nodes_[node].right = nodes_[child].left;
      nodes_[child].left = node;
      update(node);
      node = child;
    }
  }
  update(node);
  return node;
}

void Profile::update(int32_t node) {
  Node& n = nodes_[node];
  const int64_t left = n.left < 0 ? 0 : nodes_[n.left].sum;
  n.sum = left + n.delta;
  n.max_prefix = n.sum;
  if (n.left >= 0) n.max_prefix = std::max(n.max_prefix, nodes_[n.left].max_prefix);
  if (n.right >= 0) {
    n.max_prefix = std::max(n.max_prefix, n.sum + nodes_[n.right].max_prefix);
    n.sum += nodes_[n.right].sum;
  }
}

int64_t Profile::max_ever() const {
  return root_ < 0 ? 0 : std::max<int64_t>(0, nodes_[root_].max_prefix);
}

int64_t Profile::max_between(int64_t from, int64_t to) const {
  if (from >= to) return INT64_MIN;
  int64_t level = 0;
  for (int32_t node = root_; node >= 0;) {
    const Node& n = nodes_[node];
    if (from < n.time) {
      node = n.left;
    } else {
      level += n.delta + (n.left < 0 ? 0 : nodes_[n.left].sum);
      node = n.right;
    }
  }
  return std::max(level, max_in(root_, from, to, 0));
}

// The highest level at the changes of a subtree that lie in (after, before), where `level` is what
// came before the subtree. A bound that the subtree cannot reach is INT64_MIN or kForever.
int64_t Profile::max_in(int32_t node, int64_t after, int64_t before, int64_t level) const {
  if (node < 0) return INT64_MIN;
  const Node& n = nodes_[node];
  if (after == INT64_MIN && before == kForever) return level + n.max_prefix;
  if (n.time >= before) return max_in(n.left, after, before, level);
  const int64_t here = level + n.delta + (n.left < 0 ? 0 : nodes_[n.left].sum);
  if (n.time <= after) return max_in(n.right, after, before, here);
  return std::max(
      {here, max_in(n.left, after, kForever, level), max_in(n.right, INT64_MIN, before, here)});
}

Timeline::Timeline(const Problem& problem)
    : problem_(problem),
      device_(problem.ops, -1),
      end_(problem.ops, 0),
      group_device_(problem.groups, -1),
      remaining_(problem.tensors),
      presence_of_(problem.tensors, -1),
      device_free_(problem.devices, 0),
      send_free_(problem.devices, 0),
      receive_free_(problem.devices, 0),
      used_(problem.devices, 0),
      persistent_(problem.pools, 0),
      held_back_(problem.pools, 0),
      profiles_(problem.pools) {
  for (int32_t t = 0; t < problem.tensors; ++t) remaining_[t] = problem.consumers.size(t);
  spans_.reserve(problem.ops);
  // What has but one place takes it at once, so that nobody else takes its room.
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
  int32_t at = presence_of_[tensor];
  while (at >= 0 && presences_[at].pool != pool) at = presences_[at].next;
  return at;
}

std::optional<int64_t> Timeline::arrival(int32_t op, int32_t device) const {
  planned_.clear();
  int64_t ready = 0;
  for (int32_t tensor : Row(problem_.inputs, op)) {
    const int32_t at = find(tensor, problem_.pool[device]);
    if (at >= 0) {
      const Presence& presence = presences_[at];
      int64_t available = presence.available;
      if (presence.holder != device) {
        if (!problem_.has_path(presence.holder, device)) return std::nullopt;
        available += problem_.latency_ns(presence.holder, device);
      }
      ready = std::max(ready, available);
    } else {
      const int32_t producer = problem_.producer[tensor];
      if (!problem_.has_path(device_[producer], device)) return std::nullopt;
      planned_.push_back({tensor, end_[producer], 0});
    }
  }
  if (planned_.size() > 1) {
    std::sort(planned_.begin(), planned_.end(), [](const Planned& a, const Planned& b) {
      return a.start != b.start ? a.start < b.start : a.tensor < b.tensor;
    });
  }
  // All these transfers end at `device`, so its receive port orders them, and no send port that
  // one of them takes can delay a later one more than the receive port does.
  int64_t receive_free = receive_free_[device];
  for (Planned& transfer : planned_) {
    const int32_t src = device_[problem_.producer[transfer.tensor]];
    if (problem_.ports != Ports::kNone) {
      transfer.start = std::max({transfer.start, send_free_[src], receive_free});
    }
    transfer.end = transfer.start + problem_.transfer_ns(transfer.tensor, src, device);
    receive_free = transfer.end;
    ready = std::max(ready, transfer.end);
  }
  return ready;
}

std::optional<int64_t> Timeline::earliest_start(int32_t op, int32_t device) const {
  const std::optional<int64_t> ready = arrival(op, device);
  if (!ready) return std::nullopt;
  return std::max(*ready, device_free_[device]);
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
  const int64_t start = *earliest, end = start + problem_.duration(op, device);
  const int64_t workspace = end > start ? problem_.workspace[op] : 0;
  int64_t missing = 0, staying = problem_.output_bytes[op];
  for (const Planned& transfer : planned_) {
    const int64_t nbytes = problem_.nbytes[transfer.tensor];
    missing += nbytes;
    if (remaining_[transfer.tensor] > 1) staying += nbytes;
  }
  if (profile.max_ever() + missing + problem_.output_bytes[op] + workspace <= room) {
    return Fit::kFits;
  }
  // On a device alone in its pool, all that stays is there before the op starts.
  if (end > start && problem_.pool_devices.size(pool) == 1 &&
      profile.total() + missing + problem_.output_bytes[op] + workspace > room) {
    return Fit::kFull;
  }
  changes_.clear();
  for (const Planned& transfer : planned_) {
    const int64_t nbytes = problem_.nbytes[transfer.tensor];
    changes_.emplace_back(transfer.start, nbytes);
    if (remaining_[transfer.tensor] == 1) changes_.emplace_back(end, -nbytes);
  }
  for (int32_t tensor : Row(problem_.inputs, op)) {
    const int32_t at = remaining_[tensor] == 1 ? find(tensor, pool) : -1;
    if (at < 0) continue;
    if (problem_.kept[tensor] && problem_.pool[device_[problem_.producer[tensor]]] == pool)
      continue;
    changes_.emplace_back(std::max(end, presences_[at].last_use), -problem_.nbytes[tensor]);
    staying -= problem_.nbytes[tensor];
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

void Timeline::hold(int32_t tensor, int32_t device, int64_t available) {
  presences_.push_back({problem_.pool[device], device, available, available, presence_of_[tensor]});
  presence_of_[tensor] = static_cast<int32_t>(presences_.size()) - 1;
}

void Timeline::release(int32_t tensor) {
  const int32_t home = problem_.pool[device_[problem_.producer[tensor]]];
  for (int32_t at = presence_of_[tensor]; at >= 0; at = presences_[at].next) {
    const Presence& presence = presences_[at];
    if (problem_.kept[tensor] && presence.pool == home) continue;
    profiles_[presence.pool].add(presence.last_use, -problem_.nbytes[tensor]);
    released_.push_back(presence.pool);
  }
}

const Span& Timeline::commit(int32_t op, int32_t device) {
  const int64_t start = *earliest_start(op, device);
  const int64_t end = start + problem_.duration(op, device);
  const int32_t pool = problem_.pool[device];
  released_.clear();
  reserve(op, device);
  for (const Planned& transfer : planned_) {
    const int32_t src = device_[problem_.producer[transfer.tensor]];
    transfers_.push_back({transfer.tensor, src, device, transfer.start, transfer.end});
    if (problem_.ports != Ports::kNone) {
      send_free_[src] = receive_free_[device] = transfer.end;
      if (problem_.ports == Ports::kShared) receive_free_[src] = send_free_[device] = transfer.end;
    }
    Presence& home = presences_[find(transfer.tensor, problem_.pool[src])];
    home.last_use = std::max(home.last_use, transfer.end);
    hold(transfer.tensor, device, transfer.end);
    profiles_[pool].add(transfer.start, problem_.nbytes[transfer.tensor]);
  }
  device_[op] = device;
  end_[op] = end;
  if (end > start) {
    profiles_[pool].add(start, problem_.workspace[op]);
    profiles_[pool].add(end, -problem_.workspace[op]);
  }
  for (int32_t tensor : Row(problem_.outputs, op)) hold(tensor, device, end);
  profiles_[pool].add(start, problem_.output_bytes[op]);
  for (int32_t tensor : Row(problem_.inputs, op)) {
    Presence& presence = presences_[find(tensor, pool)];
    presence.last_use = std::max(presence.last_use, end);
    if (--remaining_[tensor] == 0) release(tensor);
  }
  device_free_[device] = end;
  makespan_ = std::max(makespan_, end);
  spans_.push_back({op, device, start, end});
  return spans_.back();
}

std::vector<int64_t> Timeline::peaks() const {
  std::vector<int64_t> peaks(persistent_);
  for (int32_t pool = 0; pool < problem_.pools; ++pool) {
    peaks[pool] += std::max<int64_t>(0, profiles_[pool].max_between(0, makespan_));
  }
  return peaks;
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
