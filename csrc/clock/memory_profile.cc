// Levels of memory over time: a treap of changes by time, and a pass in buckets for the peak alone.
#include <algorithm>

#include "clock/core.h"

namespace baechi {

namespace {

// Mean number of changes in a bucket of `peak`.
constexpr size_t kPerBucket = 4;

// A fixed hash of the time is the treap's priority, so that equal input gives equal trees.
uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

}  // namespace

void Profile::drain() const {
  if (waiting_.empty()) return;
  for (const Change& change : waiting_) root_ = insert(root_, change.time, change.delta);
  waiting_.clear();
  bound_ = std::max<int64_t>(0, nodes_[root_].max_prefix);
}

int32_t Profile::insert(int32_t node, int64_t time, int64_t delta) const {
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

void Profile::update(int32_t node) const {
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
  drain();
  return bound_;
}

int64_t Profile::max_between(int64_t from, int64_t to) const {
  if (from >= to) return INT64_MIN;
  drain();
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

// The levels at the ends of time buckets are cheap. Only buckets whose rises could lift the level
// above the highest of these are examined.
int64_t Profile::peak(int64_t to) const {
  if (to <= 0) return 0;
  if (root_ >= 0) return std::max<int64_t>(0, max_between(0, to));
  struct Bucket {
    int64_t sum, rise;
  };
  int shift = 0;
  while (static_cast<uint64_t>(to - 1) >> shift > waiting_.size() / kPerBucket) ++shift;
  std::vector<Bucket> buckets(static_cast<size_t>((to - 1) >> shift) + 1, {0, 0});
  for (const Change& change : waiting_) {
    if (change.time >= to) continue;
    Bucket& bucket = buckets[change.time >> shift];
    bucket.sum += change.delta;
    bucket.rise += std::max<int64_t>(0, change.delta);
  }
  int64_t highest = 0, level = 0;
  for (const Bucket& bucket : buckets) highest = std::max(highest, level += bucket.sum);
  level = 0;
  for (Bucket& bucket : buckets) {
    const int64_t before = level;
    level += bucket.sum;
    bucket = {before, before + bucket.rise};
  }
  std::vector<Change> close;
  for (const Change& change : waiting_) {
    if (change.time < to && buckets[change.time >> shift].rise > highest) close.push_back(change);
  }
  std::sort(close.begin(), close.end(),
            [](const Change& a, const Change& b) { return a.time < b.time; });
  for (size_t i = 0; i < close.size(); ++i) {
    if (i == 0 || close[i].time >> shift != close[i - 1].time >> shift) {
      level = buckets[close[i].time >> shift].sum;
    }
    level += close[i].delta;
    if (i + 1 == close.size() || close[i].time != close[i + 1].time) {
      highest = std::max(highest, level);
    }
  }
  return highest;
}

}  // namespace baechi
