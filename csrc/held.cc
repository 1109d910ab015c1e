// Bytes that groups surely hold at a moment.
//
// When an op of some time starts, its ancestors have ended, and neither it nor its descendants
// have. A tensor of an ancestor that a group has made or read before, and will read again, is then
// where that group is: it was there, and stays until its last reader there has ended. Tensors that
// are never freed are where they were made. At the end of the step all of these are there, less
// what the last ops still reuse. A tensor counts for one group, since there is one copy in a pool.
#include "held.h"

#include <algorithm>

namespace baechi {

namespace {

// Moments that are tried, and ops that may be walked over for them.
constexpr int32_t kTried = 16;
constexpr int64_t kWalked = 1 << 22;

}  // namespace

Moment::Moment(const Problem& problem) : problem_(problem), lasts_(problem.ops, 1) {
  const size_t ops = static_cast<size_t>(problem.ops);
  for (size_t i = 0; i < problem.durations.size(); ++i) {
    if (problem.durations[i] == 0) lasts_[i % ops] = 0;
  }
  choose(-1);
  int64_t most = total();
  int32_t best = -1;
  // First all over the step, then between the neighbors of the best.
  int32_t low = 0, high = problem.ops;
  for (int round = 0; round < 3 && problem.groups < problem.ops; ++round) {
    const int32_t tried = static_cast<int32_t>(
        std::clamp<int64_t>(kWalked / (3 * std::max(1, problem.ops)), 1, kTried));
    const int32_t step = std::max(1, (high - low) / tried);
    int32_t middle = -1;
    int64_t here = -1;
    for (int32_t at = low + step / 2; at < high; at += step) {
      int32_t op = at;
      while (op < high && !lasts_[op]) ++op;
      if (op == high) break;
      choose(op);
      const int64_t bytes = total();
      if (bytes > here) {
        here = bytes;
        middle = op;
      }
    }
    if (here > most) {
      most = here;
      best = middle;
    }
    if (middle < 0 || step == 1) break;
    low = std::max(0, middle - step);
    high = std::min(problem.ops, middle + step);
  }
  choose(best);
}

void Moment::choose(int32_t op) {
  ends_ = op < 0;
  if (ends_) {
    before_ = lasts_;
    after_.assign(problem_.ops, 0);
    return;
  }
  before_.assign(problem_.ops, 0);
  after_.assign(problem_.ops, 0);
  after_[op] = 1;
  for (int32_t i = op; i < problem_.ops; ++i) {
    for (int32_t tensor : Row(problem_.inputs, i)) {
      after_[i] |= after_[problem_.producer[tensor]];
    }
  }
  for (int32_t i = op; i >= 0; --i) {
    if (i != op && !before_[i]) continue;
    for (int32_t tensor : Row(problem_.inputs, i)) before_[problem_.producer[tensor]] = 1;
  }
}

std::vector<int64_t> Moment::held(const std::vector<int32_t>& of, int32_t count) const {
  std::vector<int64_t> bytes(count, 0);
  std::vector<int32_t> seen(count, -1);
  for (int32_t group = 0; group < problem_.groups; ++group) {
    bytes[of[*problem_.group_ops.first(group)]] += problem_.group_persistent[group];
  }
  for (int32_t op = 0; op < problem_.ops; ++op) {
    if (!before_[op]) continue;
    int64_t stays = 0;
    for (int32_t tensor : Row(problem_.outputs, op)) {
      if (problem_.kept[tensor] || problem_.consumers.size(tensor) == 0) {
        stays += problem_.nbytes[tensor];
        continue;
      }
      seen[of[op]] = tensor;
      for (int32_t consumer : Row(problem_.consumers, tensor)) {
        if (before_[consumer]) seen[of[consumer]] = tensor;
      }
      for (int32_t consumer : Row(problem_.consumers, tensor)) {
        if (after_[consumer] && seen[of[consumer]] == tensor) {
          bytes[of[consumer]] += problem_.nbytes[tensor];
          break;
        }
      }
    }
    // An op that ends the step may still reuse its inputs.
    if (ends_) stays += std::min<int64_t>(0, problem_.workspace[op]);
    bytes[of[op]] += std::max<int64_t>(0, stays);
  }
  return bytes;
}

int64_t Moment::total() const {
  int64_t sum = 0;
  const std::vector<int32_t> of = problem_.group.copy();
  for (int64_t bytes : held(of, problem_.groups)) sum += bytes;
  return sum;
}

}  // namespace baechi
