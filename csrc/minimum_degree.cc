// Minimum degree on the quotient graph: an eliminated unknown is an element, the clique of the
// unknowns that it leaves behind; elements inside of another one are dropped. An unknown's degree
// is estimated from its own neighbors and the sizes of its elements beyond the newest one. One with
// nothing but the newest element has the same rows as that, and is eliminated with it: so a dense
// rest goes in one step. Degrees count all unknowns, but only those of the lowest stage are to be
// had, until none is left of it.
//
// Unknowns with very many neighbors would be in most cliques, with most elements, and each of these
// would be looked at again and again. They go last, and so which columns have them below is known
// from the tree of the others.
#include "minimum_degree.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <numeric>
#include <utility>

namespace baechi {

namespace {

using Neighbors = std::vector<std::vector<int32_t>>;

// More neighbors than so many times the root of the number of unknowns, and than so many at all,
// are very many; as in Amestoy, Davis and Duff's program.
constexpr double kMany = 10;
constexpr size_t kSome = 16;
constexpr int32_t kLast = std::numeric_limits<int32_t>::max();

// Unknowns by degree, the least first, then the one that came last.
class Buckets {
 public:
  explicit Buckets(size_t size) : first_(size, -1), next_(size, -1), before_(size, -1) {}
  void insert(int32_t i, int32_t degree) {
    next_[i] = first_[degree], before_[i] = -1 - degree - 1;
    if (next_[i] >= 0) before_[next_[i]] = i;
    first_[degree] = i, least_ = std::min(least_, degree);
  }
  void erase(int32_t i) {
    if (next_[i] >= 0) before_[next_[i]] = before_[i];
    (before_[i] >= 0 ? next_[before_[i]] : first_[-before_[i] - 2]) = next_[i];
  }
  int32_t least() {
    while (first_[least_] < 0) ++least_;
    return first_[least_];
  }

 private:
  std::vector<int32_t> first_, next_, before_;
  int32_t least_ = 0;
};

class Quotient {
 public:
  Quotient(Neighbors near, const std::vector<int32_t>& stage);
  Elimination run(double most_work);

 private:
  void open_stage();
  void eliminate(int32_t pivot);
  void join(int32_t pivot);
  bool prune(int32_t pivot, int32_t i);
  void lead(int32_t pivot, int32_t i);
  void plant();
  int32_t live(int32_t element) const {
    return static_cast<int32_t>(found_.rows[element].size()) - led_[element];
  }

  Neighbors near_, elements_;  // of unknowns that are left
  const std::vector<int32_t>& stage_;
  std::vector<int32_t> by_stage_;
  size_t open_ = 0;  // so many by_stage_ are to be had, or gone
  int32_t now_ = 0;
  Buckets buckets_;
  std::vector<int32_t> degree_, led_;
  std::vector<int32_t> in_, beyond_, seen_;  // the pivot of a clique; of elements, what is outside
  std::vector<char> dead_, absorbed_;
  Elimination found_;
};

Quotient::Quotient(Neighbors near, const std::vector<int32_t>& stage)
    : near_(std::move(near)),
      elements_(near_.size()),
      stage_(stage),
      by_stage_(near_.size()),
      buckets_(near_.size()),
      led_(near_.size(), 0),
      in_(near_.size(), -1),
      beyond_(near_.size(), 0),
      seen_(near_.size(), -1),
      dead_(near_.size(), 0),
      absorbed_(near_.size(), 0) {
  for (const auto& row : near_) degree_.push_back(static_cast<int32_t>(row.size()));
  std::iota(by_stage_.begin(), by_stage_.end(), 0);
  std::stable_sort(by_stage_.begin(), by_stage_.end(),
                   [&](int32_t a, int32_t b) { return stage[a] < stage[b]; });
  found_.height.assign(near_.size(), 0), found_.parent.assign(near_.size(), -1);
  found_.leader.assign(near_.size(), -1), found_.rows.resize(near_.size());
}

Elimination Quotient::run(double most_work) {
  while (found_.sequence.size() < near_.size()) {
    if (found_.sequence.size() == open_) open_stage();
    eliminate(buckets_.least());
    if (found_.work > most_work) break;
  }
  if (found_.work <= most_work) plant();
  return std::move(found_);
}

void Quotient::open_stage() {
  for (now_ = stage_[by_stage_[open_]];
       open_ < by_stage_.size() && stage_[by_stage_[open_]] == now_; ++open_)
    buckets_.insert(by_stage_[open_], degree_[by_stage_[open_]]);
}

void Quotient::eliminate(int32_t pivot) {
  lead(pivot, pivot);
  join(pivot);
  std::vector<int32_t>& clique = found_.rows[pivot];
  for (int32_t i : clique)
    for (int32_t e : elements_[i]) {
      if (absorbed_[e]) continue;
      if (seen_[e] != pivot) seen_[e] = pivot, beyond_[e] = live(e);
      --beyond_[e];
    }
  const auto rest = std::stable_partition(clique.begin(), clique.end(),
                                          [&](int32_t i) { return prune(pivot, i); });
  led_[pivot] = static_cast<int32_t>(rest - clique.begin());
  for (auto member = clique.begin(); member != rest; ++member) lead(pivot, *member);
  for (int32_t gone = 0; gone <= led_[pivot]; ++gone) {
    const auto height = static_cast<double>(clique.size()) - gone;
    found_.work += height * height / 2;
  }
  const int32_t others = live(pivot) - 1;
  const auto left = static_cast<int32_t>(near_.size() - found_.sequence.size());
  for (auto member = rest; member != clique.end(); ++member) {
    const int32_t i = *member;
    int32_t sum = others + static_cast<int32_t>(near_[i].size());
    for (int32_t e : elements_[i]) sum += beyond_[e];
    elements_[i].push_back(pivot);
    if (stage_[i] == now_) buckets_.erase(i);
    degree_[i] = std::min({sum, degree_[i] + others, left - 1});
    if (stage_[i] == now_) buckets_.insert(i, degree_[i]);
  }
}

// The pivot's clique: its neighbors, and what is left of its elements, which it absorbs.
void Quotient::join(int32_t pivot) {
  std::vector<int32_t>& clique = found_.rows[pivot];
  const auto add = [&](const std::vector<int32_t>& more) {
    for (int32_t i : more)
      if (!dead_[i] && in_[i] != pivot) in_[i] = pivot, clique.push_back(i);
  };
  add(near_[pivot]);
  for (int32_t e : elements_[pivot]) {
    if (absorbed_[e]) continue;
    add(found_.rows[e]);
    absorbed_[e] = 1;
  }
}

// Leaves to a member of the pivot's clique what that does not say; true if it may go with the
// pivot.
bool Quotient::prune(int32_t pivot, int32_t i) {
  auto& own = elements_[i];
  own.erase(std::remove_if(own.begin(), own.end(),
                           [&](int32_t e) { return absorbed_[e] || beyond_[e] == 0; }),
            own.end());
  auto& beside = near_[i];
  beside.erase(
      std::remove_if(beside.begin(), beside.end(), [&](int32_t j) { return in_[j] == pivot; }),
      beside.end());
  return own.empty() && beside.empty() && stage_[i] == now_;
}

// The unknown is next, with what is below the pivot.
void Quotient::lead(int32_t pivot, int32_t i) {
  buckets_.erase(i);
  dead_[i] = 1;
  found_.leader[i] = pivot;
  found_.sequence.push_back(i);
}

void Quotient::plant() {
  std::vector<int32_t> turn(near_.size());
  for (size_t t = 0; t < turn.size(); ++t) turn[found_.sequence[t]] = static_cast<int32_t>(t);
  for (size_t t = 0, lead = 0; t < turn.size(); ++t) {
    const int32_t i = found_.sequence[t], leader = found_.leader[i];
    if (i == leader) lead = t;
    const auto& rows = found_.rows[leader];
    const auto gone = t - lead;
    found_.height[i] = static_cast<int32_t>(rows.size() - gone);
    const auto below = rows.begin() + static_cast<std::ptrdiff_t>(gone);
    if (below == rows.end()) continue;
    found_.parent[i] =
        gone < static_cast<size_t>(led_[leader])
            ? *below
            : *std::min_element(
                  below, rows.end(), [&](int32_t a, int32_t b) { return turn[a] < turn[b]; });
  }
}

// Those with very many neighbors, which their neighbors no longer have.
std::vector<int32_t> take_hubs(Neighbors& near) {
  const double many = kMany * std::sqrt(static_cast<double>(near.size()));
  const size_t most = std::max(kSome, static_cast<size_t>(many));
  std::vector<int32_t> hubs;
  std::vector<char> is_hub(near.size(), 0);
  for (size_t i = 0; i < near.size(); ++i)
    if (near[i].size() > most) hubs.push_back(static_cast<int32_t>(i)), is_hub[i] = 1;
  if (hubs.empty()) return hubs;
  for (auto& row : near)
    row.erase(std::remove_if(row.begin(), row.end(), [&](int32_t j) { return is_hub[j] != 0; }),
              row.end());
  return hubs;
}

// Puts a hub below the columns that reach it. Those that were led together stay together.
void add_hub(Elimination& order, int32_t hub, const std::vector<int32_t>& near) {
  std::vector<char> reaches(order.leader.size(), 0);
  for (int32_t i : near) reaches[i] = 1;
  for (int32_t i : order.sequence) {
    if (!reaches[i]) continue;
    reaches[order.leader[i]] = 1;
    if (order.parent[i] >= 0) reaches[order.parent[i]] = 1;
  }
  for (int32_t i : order.sequence) {
    if (i == hub || !reaches[order.leader[i]]) continue;
    if (i == order.leader[i]) order.rows[i].push_back(hub);
    if (order.parent[i] < 0) order.parent[i] = hub;
    order.work += order.height[i] + 0.5;
    ++order.height[i];
  }
}

}  // namespace

Elimination least_degree_first(const Neighbors& near, std::vector<int32_t> stage,
                               double most_work) {
  Neighbors others = near;
  const std::vector<int32_t> hubs = take_hubs(others);
  for (int32_t hub : hubs) stage[hub] = kLast, others[hub].clear();
  Elimination order = Quotient(std::move(others), stage).run(most_work);
  if (order.work > most_work) return order;
  // Every hub reaches the later ones; they were eliminated last, without neighbors.
  const auto first = order.sequence.end() - static_cast<std::ptrdiff_t>(hubs.size());
  const std::vector<int32_t> last(first, order.sequence.end());
  for (size_t k = 0; k < last.size(); ++k) {
    std::vector<int32_t> reach(last.begin(), last.begin() + static_cast<std::ptrdiff_t>(k));
    for (int32_t i : near[last[k]])
      if (stage[i] != kLast) reach.push_back(i);
    add_hub(order, last[k], reach);
  }
  return order;
}

}  // namespace baechi
