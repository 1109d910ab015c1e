// The memory of a trial: the peaks of `timeline.cc`, of a whole step at once.
//
// Each holding becomes two changes of its pool's level, and the highest level is found from the
// changes in order of time. A pool that could hold all of them at once is skipped.
#include <algorithm>

#include "search/trial.h"

namespace baechi {

namespace {

// More events in a bucket are not sorted one past the other.
constexpr size_t kCrowd = 32;

}  // namespace

int64_t Trial::least_overflow() const {
  int64_t overflow = 0;
  for (int32_t pool = 0; pool < problem_.pools; ++pool) {
    overflow += std::max<int64_t>(0, held_bytes_[pool] - problem_.memory[pool]);
  }
  return overflow;
}

Overflow Trial::overflow() {
  const int32_t pools = problem_.pools;
  std::vector<int64_t> room(problem_.memory);
  for (int32_t pool = 0; pool < pools; ++pool) room[pool] -= held_bytes_[pool];
  // A bound that needs no order: all that is ever made or received there, as if it stayed.
  std::vector<int64_t> most(pools, 0), workspace(pools, 0);
  for (int32_t op = 0; op < problem_.ops; ++op) {
    const int32_t pool = problem_.pool[device_[op]];
    most[pool] += problem_.output_bytes[op];
    workspace[pool] = std::max(workspace[pool], problem_.workspace[op]);
  }
  for (int32_t i = 0; i < sent_before(); ++i) {
    most[sent_[i] % pools] += problem_.nbytes[sent_[i] / pools];
  }
  for (int64_t at : sending_) most[at % pools] += problem_.nbytes[at / pools];
  bool ample = true;
  for (int32_t pool = 0; pool < pools; ++pool) {
    // Each device runs one op at a time. The product may pass 64 bits.
    const int64_t left = room[pool] - most[pool];
    ample = ample && left >= 0 && workspace[pool] <= left / problem_.pool_devices.size(pool);
  }
  evaluations_ += problem_.ops / 4;
  if (ample) return {};
  evaluations_ +=
      problem_.ops + static_cast<int64_t>(sent_before()) + static_cast<int64_t>(sending_.size());
  for (auto& events : events_) events.clear();
  ++seen_;
  const auto add = [this](int32_t pool, int64_t time, int64_t delta) {
    if (time < makespan_) events_[pool].push_back({time, delta});
  };
  for (int32_t op = 0; op < problem_.ops; ++op) {
    const int32_t pool = problem_.pool[device_[op]];
    const int64_t from = start(op);
    const int64_t running = problem_.workspace_in(pool, op, [&](int32_t other) {
      return position_[other] < position_[op] ? problem_.pool[device_[other]] : -1;
    });
    if (running != 0 && end_[op] > from) {
      add(pool, from, problem_.output_bytes[op] + running);
      add(pool, end_[op], -running);
    } else if (problem_.output_bytes[op] > 0) {
      add(pool, from, problem_.output_bytes[op]);
    }
  }
  for (int32_t tensor = 0; tensor < problem_.tensors; ++tensor) {
    const int64_t nbytes = problem_.nbytes[tensor];
    if (nbytes == 0 || problem_.consumers.size(tensor) == 0) continue;
    const int32_t producer = problem_.producer[tensor], home = problem_.pool[device_[producer]];
    int64_t last = end_[producer];
    for (int32_t consumer : Row(problem_.consumers, tensor)) {
      const int32_t pool = problem_.pool[device_[consumer]];
      if (pool == home) {
        last = std::max(last, end_[consumer]);
      } else {
        // Consumers come in index order, not in launch order.
        Copy& there = copy(tensor, pool);
        if (there.seen != seen_) {
          there.seen = seen_;
          there.last_use = there.available;
          last = std::max(last, there.available);
          held_.push_back(static_cast<int64_t>(tensor) * pools + pool);
        }
        there.last_use = std::max(there.last_use, end_[consumer]);
      }
    }
    const bool parted = !held_.empty() && problem_.has_parts(tensor);
    if (parted) {
      problem_.copied(tensor, [&](int32_t op) { return problem_.pool[device_[op]]; }, copied_);
    }
    for (int64_t at : held_) {
      const auto pool = static_cast<int32_t>(at % pools);
      const int64_t there = parted ? copied_[static_cast<size_t>(pool)] : nbytes;
      add(pool, copies_[at].begin, there);
      add(pool, copies_[at].last_use, -there);
    }
    held_.clear();
    if (!problem_.kept[tensor]) add(home, last, -nbytes);
  }
  Overflow overflow;
  int64_t worst = 0;
  for (int32_t pool = 0; pool < pools; ++pool) {
    const Overflow here = passed(events_[pool], room[pool]);
    overflow.bytes += here.bytes;
    overflow.mean_bytes += here.mean_bytes;
    if (here.bytes <= worst) continue;
    worst = here.bytes;
    overflow.pool = pool;
    overflow.time = here.time;
  }
  return overflow;
}

std::vector<int32_t> Trial::crowd(int32_t pool, int64_t time) const {
  std::vector<int32_t> ops;
  for (int32_t tensor = 0; tensor < problem_.tensors; ++tensor) {
    const int32_t producer = problem_.producer[tensor];
    const bool home = problem_.pool[device_[producer]] == pool;
    const Copy& there = copy(tensor, pool);
    if (home ? start(producer) > time : there.by < 0 || there.begin > time) continue;
    const size_t before = ops.size();
    for (int32_t consumer : Row(problem_.consumers, tensor)) {
      const bool here = home || problem_.pool[device_[consumer]] == pool;
      if (here && end_[consumer] > time) ops.push_back(consumer);
    }
    if (ops.size() > before) ops.push_back(producer);
  }
  return ops;
}

// By time: into as many buckets as events, and then past the few that a bucket has put in disorder;
// a crowded bucket, as there is where one op takes nearly all of the step, is sorted by itself.
void Trial::sort(std::vector<Event>& events) {
  int bits = 0, shift = 0;
  while (bits < 16 && (size_t{1} << bits) < events.size()) ++bits;
  while ((makespan_ >> shift) >= (int64_t{1} << bits)) ++shift;
  buckets_.assign((size_t{1} << bits) + 1, 0);
  for (const Event& event : events) ++buckets_[static_cast<size_t>(event.time >> shift) + 1];
  for (size_t i = 1; i < buckets_.size(); ++i) buckets_[i] += buckets_[i - 1];
  sorted_.resize(events.size());
  for (const Event& event : events) {
    sorted_[buckets_[static_cast<size_t>(event.time >> shift)]++] = event;
  }
  events.swap(sorted_);
  size_t begin = 0;
  for (size_t bucket = 0; bucket + 1 < buckets_.size(); ++bucket) {
    const size_t end = buckets_[bucket];  // its begin, before they were laid there
    if (end - begin > kCrowd) {
      std::sort(events.begin() + static_cast<std::ptrdiff_t>(begin),
                events.begin() + static_cast<std::ptrdiff_t>(end),
                [](const Event& a, const Event& b) { return a.time < b.time; });
    }
    begin = end;
  }
  for (size_t i = 1; i < events.size(); ++i) {
    const Event event = events[i];
    size_t j = i;
    for (; j > 0 && events[j - 1].time > event.time; --j) events[j] = events[j - 1];
    events[j] = event;
  }
}

// What the events before the end of the step need beyond `room`; the pool is not set.
Overflow Trial::passed(std::vector<Event>& events, int64_t room) {
  int64_t all = 0;
  for (const Event& event : events) all += std::max<int64_t>(0, event.delta);
  if (all <= room) return {};
  sort(events);
  Overflow overflow;
  int64_t level = 0, since = 0;
  // Nothing is in use before the first event.
  for (size_t i = 0; true;) {
    const int64_t until = i < events.size() ? events[i].time : makespan_;
    if (level > room && level - room > overflow.bytes) {
      overflow.bytes = level - room;
      overflow.time = since;
    }
    if (level > room) {
      overflow.mean_bytes += static_cast<double>(level - room) * static_cast<double>(until - since);
    }
    if (i == events.size()) break;
    for (; i < events.size() && events[i].time == until; ++i) level += events[i].delta;
    since = until;
  }
  overflow.mean_bytes /= static_cast<double>(std::max<int64_t>(1, makespan_));
  return overflow;
}

}  // namespace baechi
