// Bytes that groups surely hold at some moments.
//
// When an op of some time starts, it needs its outputs and workspace, its ancestors have ended, and
// neither it nor its descendants have. A tensor of an ancestor that a group has made or read
// before, and will read again, is then where that group is: it was there, and stays until its last
// reader there has ended. Tensors that are never freed stay on their producer's device. At the end
// of the step all of these are held, less what the last ops still reuse. A tensor counts for one
// group, since a pool has it once.
#include "bounds/surely_held.h"

#include <algorithm>
#include <numeric>

namespace baechi {

namespace {

// Number of op starts tried at once, and limit on ops visited for all of them.
constexpr int32_t kTried = 16;
constexpr int64_t kWalked = 1 << 20;
// Moments of the ops that need the most; none where there are very many ops.
constexpr int32_t kLargest = 6, kMost = 1 << 16;

}  // namespace

Moments::Moments(const Problem& problem) : problem_(problem), lasts_(problem.ops, 1) {
  const size_t ops = static_cast<size_t>(problem.ops);
  for (size_t i = 0; i < problem.durations.size(); ++i) {
    if (problem.durations[i] == 0) lasts_[i % ops] = 0;
  }
  std::vector<int32_t> starts = {-1};
  // Only groups of several ops hold something between two of them.
  if (problem.groups < problem.ops) {
    if (const int32_t op = fullest(); op >= 0) starts.push_back(op);
  }
  for (int32_t i = 0; i < kLargest && problem.ops <= kMost; ++i) {
    int32_t most = -1;
    for (int32_t op = 0; op < problem.ops; ++op) {
      if (!lasts_[op] || std::find(starts.begin(), starts.end(), op) != starts.end()) continue;
      if (most < 0 || needs(op) > needs(most)) most = op;
    }
    if (most >= 0) starts.push_back(most);
  }
  for (int32_t op : starts) chosen_.push_back(at(op));
}

// First across the whole step, then between the neighbors of the best; -1 where none is tried.
int32_t Moments::fullest() const {
  const std::vector<int32_t> of = problem_.group.copy();
  std::vector<int64_t> bytes(problem_.groups);
  int32_t low = 0, high = problem_.ops, best = -1;
  int64_t most = -1;
  const int32_t tried = static_cast<int32_t>(
      std::clamp<int64_t>(kWalked / (3 * std::max(1, problem_.ops)), 1, kTried));
  for (int32_t step = problem_.ops; step > 1;) {
    step = std::max(1, (high - low) / tried);
    for (int32_t next = low + step / 2; next < high; next += step) {
      int32_t op = next;
      while (op < high && !lasts_[op]) ++op;
      if (op == high) break;
      std::fill(bytes.begin(), bytes.end(), 0);
      add(at(op), of, bytes.data(), 1);
      const int64_t sum = std::accumulate(bytes.begin(), bytes.end(), int64_t{0});
      if (sum > most) {
        most = sum;
        best = op;
      }
    }
    if (best < 0 || tried < kTried) break;
    low = std::max(0, best - step);
    high = std::min(problem_.ops, best + step);
  }
  return best;
}

Moments::Moment Moments::at(int32_t op) const {
  const size_t ops = static_cast<size_t>(problem_.ops);
  if (op < 0) return {op, lasts_, std::vector<uint8_t>(ops, 0)};
  Moment moment{op, std::vector<uint8_t>(ops, 0), std::vector<uint8_t>(ops, 0)};
  moment.after[op] = 1;
  for (int32_t i = op + 1; i < problem_.ops; ++i) {
    for (int32_t tensor : Row(problem_.inputs, i)) {
      moment.after[i] |= moment.after[problem_.producer[tensor]];
    }
  }
  for (int32_t i = op; i >= 0; --i) {
    if (i != op && !moment.before[i]) continue;
    for (int32_t tensor : Row(problem_.inputs, i)) moment.before[problem_.producer[tensor]] = 1;
  }
  return moment;
}

void Moments::add(const Moment& moment, const std::vector<int32_t>& of, int64_t* held,
                  int32_t stride) const {
  std::vector<int32_t> seen(problem_.ops, -1);  // per group, the last tensor that it had
  const auto bytes = [&](int32_t op) -> int64_t& {
    return held[static_cast<int64_t>(of[op]) * stride];
  };
  for (int32_t op = 0; op < problem_.ops; ++op) {
    if (!moment.before[op]) continue;
    int64_t stays = 0;
    for (int32_t tensor : Row(problem_.outputs, op)) {
      if (problem_.kept[tensor] || problem_.consumers.size(tensor) == 0) {
        stays += problem_.nbytes[tensor];
        continue;
      }
      seen[of[op]] = tensor;
      for (int32_t consumer : Row(problem_.consumers, tensor)) {
        if (moment.before[consumer]) seen[of[consumer]] = tensor;
      }
      for (int32_t consumer : Row(problem_.consumers, tensor)) {
        if (moment.after[consumer] && seen[of[consumer]] == tensor) {
          bytes(consumer) += problem_.least_copies[tensor];
          break;
        }
      }
    }
    if (moment.op < 0) stays += std::min<int64_t>(0, problem_.least_workspace[op]);
    bytes(op) += std::max<int64_t>(0, stays);
  }
  if (moment.op >= 0) bytes(moment.op) += needs(moment.op);
}

std::vector<int64_t> Moments::held(const std::vector<int32_t>& of, int32_t groups) const {
  const int32_t n = count();
  std::vector<int64_t> bytes(static_cast<size_t>(groups) * n, 0);
  for (int32_t group = 0; group < problem_.groups; ++group) {
    const int64_t to = static_cast<int64_t>(of[*problem_.group_ops.first(group)]) * n;
    for (int32_t i = 0; i < n; ++i) bytes[to + i] += problem_.group_persistent[group];
  }
  for (int32_t i = 0; i < n; ++i) add(chosen_[i], of, bytes.data() + i, n);
  return bytes;
}

int64_t most_held(const Problem& problem) {
  if (problem.ops == 0) return 0;
  const std::vector<int64_t> held =
      Moments(problem).held(std::vector<int32_t>(static_cast<size_t>(problem.ops), 0), 1);
  return *std::max_element(held.begin(), held.end());
}

}  // namespace baechi
