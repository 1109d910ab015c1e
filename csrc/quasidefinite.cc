#include "quasidefinite.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "dissection.h"
#include "front.h"

namespace baechi {

namespace {

// Fronts are merged where at most this part of the merged one are zeros, or where it is this small.
constexpr double kZeros = 0.3;
constexpr int32_t kSmall = 16;
// Added to every entry of the diagonal, in parts of it: pivots keep their sign where all digits of
// the entry cancel, and refinement takes back what that does.
constexpr double kFirm = 1e-13;
// Refinement goes on while more than this part of the right side is left, so many times at most.
constexpr double kResidual = 1e-10;
constexpr int kRefinements = 2;
// Where a factorization takes less, another order is not worth the search for it.
constexpr double kCheap = 3e7;

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

}  // namespace

Quasidefinite::Quasidefinite(int32_t size, std::vector<Entry> entries,
                             const std::vector<double>& position)
    : size_(size), entries_(std::move(entries)) {
  const std::vector<std::vector<int32_t>> near = neighbors();
  const std::vector<int32_t> at_once(near.size(), 0);
  order(near, at_once);
  if (const double before = work_; before > kCheap) {
    order(near, dissect(near, position));
    if (work_ > before) order(near, at_once);
  }
  place_entries();
}

std::vector<std::vector<int32_t>> Quasidefinite::neighbors() const {
  std::vector<std::vector<int32_t>> near(static_cast<size_t>(size_));
  for (const auto& [i, j] : entries_) near[i].push_back(j), near[j].push_back(i);
  for (auto& row : near) {
    std::sort(row.begin(), row.end());
    row.erase(std::unique(row.begin(), row.end()), row.end());
  }
  return near;
}

// Minimum degree on the quotient graph: an eliminated unknown is an element, the clique of the
// unknowns that it leaves behind; elements inside of another one are dropped. An unknown's degree
// is estimated from its own neighbors and the sizes of its elements beyond the newest one. Degrees
// count all unknowns, but only those of the lowest stage are to be had, until none is left of it.
void Quasidefinite::order(std::vector<std::vector<int32_t>> near,
                          const std::vector<int32_t>& stage) {
  const size_t n = static_cast<size_t>(size_);
  std::vector<std::vector<int32_t>> elements(n);
  rows_.assign(n, {});
  Buckets buckets(n);
  std::vector<int32_t> degree(n), beyond(n, 0), seen(n, -1), in(n, -1), sequence, by_stage(n);
  for (size_t i = 0; i < n; ++i) degree[i] = static_cast<int32_t>(near[i].size());
  std::iota(by_stage.begin(), by_stage.end(), 0);
  std::stable_sort(by_stage.begin(), by_stage.end(),
                   [&](int32_t a, int32_t b) { return stage[a] < stage[b]; });
  std::vector<char> dead(n, 0), absorbed(n, 0);
  int32_t now = 0, open = 0;
  for (int32_t step = 0; step < size_; ++step) {
    if (step == open)
      for (now = stage[by_stage[open]]; open < size_ && stage[by_stage[open]] == now; ++open)
        buckets.insert(by_stage[open], degree[by_stage[open]]);
    const int32_t pivot = buckets.least();
    buckets.erase(pivot);
    dead[pivot] = 1, in[pivot] = step;
    sequence.push_back(pivot);
    std::vector<int32_t>& clique = rows_[pivot];
    const auto join = [&](const std::vector<int32_t>& more) {
      for (int32_t i : more)
        if (!dead[i] && in[i] != step) in[i] = step, clique.push_back(i);
    };
    join(near[pivot]);
    for (int32_t e : elements[pivot]) {
      if (absorbed[e]) continue;
      join(rows_[e]);
      absorbed[e] = 1;
    }
    for (int32_t i : clique)
      for (int32_t e : elements[i]) {
        if (absorbed[e]) continue;
        if (seen[e] != step) seen[e] = step, beyond[e] = static_cast<int32_t>(rows_[e].size());
        --beyond[e];
      }
    const int32_t others = static_cast<int32_t>(clique.size()) - 1;
    for (int32_t i : clique) {
      auto& own = elements[i];
      own.erase(std::remove_if(own.begin(), own.end(),
                               [&](int32_t e) { return absorbed[e] || beyond[e] == 0; }),
                own.end());
      auto& beside = near[i];
      beside.erase(
          std::remove_if(beside.begin(), beside.end(), [&](int32_t j) { return in[j] == step; }),
          beside.end());
      int32_t sum = others + static_cast<int32_t>(beside.size());
      for (int32_t e : own) sum += beyond[e];
      own.push_back(pivot);
      if (stage[i] == now) buckets.erase(i);
      degree[i] = std::min({sum, degree[i] + others, size_ - step - 2});
      if (stage[i] == now) buckets.insert(i, degree[i]);
    }
  }
  // The tree: a column's parent is the first unknown below it. Children right before parents, the
  // largest last, so that it may be merged with its parent.
  std::vector<int32_t> turn(n), parent(n, -1), stack;
  for (int32_t t = 0; t < size_; ++t) turn[sequence[t]] = t;
  std::vector<std::vector<int32_t>> children(n);
  for (int32_t p : sequence) {
    for (int32_t i : rows_[p])
      if (parent[p] < 0 || turn[i] < turn[parent[p]]) parent[p] = i;
    if (parent[p] >= 0)
      children[parent[p]].push_back(p);
    else
      stack.push_back(p);
  }
  for (auto& family : children)
    std::stable_sort(family.begin(), family.end(),
                     [&](int32_t a, int32_t b) { return rows_[a].size() < rows_[b].size(); });
  place_.assign(n, 0);
  for (int32_t at = size_; !stack.empty();) {
    const int32_t p = stack.back();
    stack.pop_back();
    place_[p] = --at;
    stack.insert(stack.end(), children[p].begin(), children[p].end());
  }
  std::vector<std::vector<int32_t>> by_place(n);
  std::vector<int32_t> parent_place(n, -1);
  for (int32_t p = 0; p < size_; ++p) {
    auto& rows = by_place[place_[p]] = std::move(rows_[p]);
    for (int32_t& row : rows) row = place_[row];
    std::sort(rows.begin(), rows.end());
    if (parent[p] >= 0) parent_place[place_[p]] = place_[parent[p]];
  }
  rows_ = std::move(by_place);
  amalgamate(parent_place);
}

void Quasidefinite::amalgamate(const std::vector<int32_t>& parent) {
  front_of_.assign(parent.size(), 0), fronts_.clear(), work_ = 0;
  int64_t zeros = 0;
  for (int32_t j = 0; j < size_; ++j) {
    bool merge = false;
    if (j > 0 && parent[j - 1] == j) {
      const Front& last = fronts_.back();
      const int64_t columns = last.columns, height = static_cast<int64_t>(rows_[j].size());
      const int64_t more = columns * (height + 1 - static_cast<int64_t>(rows_[j - 1].size()));
      const int64_t all = (columns + 1) * height + (columns + 1) * (columns + 2) / 2;
      merge = more == 0 || columns + height < kSmall ||
              static_cast<double>(zeros + more) <= kZeros * static_cast<double>(all);
      if (merge) zeros += more;
    }
    if (!merge) fronts_.push_back({j, 0, -1, {}, {}, {}, {}}), zeros = 0;
    ++fronts_.back().columns;
    front_of_[j] = static_cast<int32_t>(fronts_.size()) - 1;
  }
  for (Front& front : fronts_) {
    const int32_t last = front.first + front.columns - 1;
    front.below = rows_[last];
    if (parent[last] >= 0) {
      front.parent = front_of_[parent[last]];
      const Front& above = fronts_[front.parent];
      const int32_t shift = above.columns;
      for (int32_t row : front.below) {
        if (row < above.first + shift) {
          front.places.push_back(row - above.first);
        } else {
          const auto& rest = rows_[above.first + shift - 1];
          const auto found = std::lower_bound(rest.begin(), rest.end(), row);
          front.places.push_back(shift + static_cast<int32_t>(found - rest.begin()));
        }
      }
    }
    for (size_t height = front.below.size(), c = 0; c < static_cast<size_t>(front.columns); ++c)
      work_ += 0.5 * static_cast<double>((height + c) * (height + c));
  }
  rows_.clear();
}

// Where in its front every entry is: of its two unknowns, the first to go is the column.
void Quasidefinite::place_entries() {
  for (size_t k = 0; k < entries_.size(); ++k) {
    const auto [i, j] = entries_[k];
    const auto [column, row] = std::minmax(place_[i], place_[j]);
    Front& front = fronts_[front_of_[column]];
    const int64_t height = front.columns + static_cast<int64_t>(front.below.size());
    int64_t at = row - front.first;
    if (at >= front.columns)
      at = front.columns +
           (std::lower_bound(front.below.begin(), front.below.end(), row) - front.below.begin());
    front.entries.emplace_back(k, (column - front.first) * height + at);
  }
}

void Quasidefinite::factor(const std::vector<double>& diagonal, const std::vector<double>& values) {
  diagonal_ = diagonal, values_ = values;
  std::vector<double> pivots(diagonal.size());
  for (size_t i = 0; i < diagonal.size(); ++i) pivots[place_[i]] = diagonal[i] * (1 + kFirm);
  // A front lives in full from when its first child adds to it until it is eliminated.
  const auto open = [&](Front& front) {
    const size_t height = static_cast<size_t>(front.columns) + front.below.size();
    front.factor.assign(height * height, 0.0);
    for (size_t c = 0; c < static_cast<size_t>(front.columns); ++c)
      front.factor[c * height + c] = pivots[static_cast<size_t>(front.first) + c];
    for (const auto& [k, at] : front.entries) front.factor[at] += values[k];
  };
  for (Front& front : fronts_) front.factor.clear();
  for (Front& front : fronts_) {
    const auto height = static_cast<size_t>(front.columns) + front.below.size();
    if (front.factor.empty()) open(front);
    eliminate(front.factor.data(), static_cast<int64_t>(height), front.columns,
              &pivots[front.first]);
    if (front.parent >= 0) {
      Front& above = fronts_[front.parent];
      if (above.factor.empty()) open(above);
      const auto above_height = static_cast<size_t>(above.columns) + above.below.size();
      const size_t columns = static_cast<size_t>(front.columns);
      for (size_t c = columns; c < height; ++c) {
        double* to = &above.factor[static_cast<size_t>(front.places[c - columns]) * above_height];
        const double* from = &front.factor[c * height];
        for (size_t r = c; r < height; ++r) to[front.places[r - columns]] += from[r];
      }
    }
    front.factor.resize(height * static_cast<size_t>(front.columns));
  }
}

void Quasidefinite::substitute(std::vector<double>& x) const {
  std::vector<double> y(x.size()), below;
  for (size_t i = 0; i < x.size(); ++i) y[place_[i]] = x[i];
  for (const Front& front : fronts_) {
    const size_t columns = static_cast<size_t>(front.columns), rows = front.below.size();
    double* own = &y[front.first];
    below.assign(rows, 0.0);
    for (size_t c = 0; c < columns; ++c) {
      const double* column = &front.factor[c * (columns + rows)];
      for (size_t r = c + 1; r < columns; ++r) own[r] -= column[r] * own[c];
      for (size_t r = 0; r < rows; ++r) below[r] += column[columns + r] * own[c];
    }
    for (size_t r = 0; r < rows; ++r) y[front.below[r]] -= below[r];
  }
  for (size_t f = fronts_.size(); f-- > 0;) {
    const Front& front = fronts_[f];
    const size_t columns = static_cast<size_t>(front.columns), rows = front.below.size();
    double* own = &y[front.first];
    below.resize(rows);
    for (size_t r = 0; r < rows; ++r) below[r] = y[front.below[r]];
    for (size_t c = columns; c-- > 0;) {
      const double* column = &front.factor[c * (columns + rows)];
      double sum[4] = {own[c] / column[c], 0, 0, 0};
      for (size_t r = c + 1; r < columns; ++r) sum[0] -= column[r] * own[r];
      const double* rest = column + columns;
      size_t r = 0;
      for (; r + 4 <= rows; r += 4)
        for (size_t i = 0; i < 4; ++i) sum[i] -= rest[r + i] * below[r + i];
      for (; r < rows; ++r) sum[0] -= rest[r] * below[r];
      own[c] = sum[0] + sum[1] + sum[2] + sum[3];
    }
  }
  for (size_t i = 0; i < x.size(); ++i) x[i] = y[place_[i]];
}

void Quasidefinite::solve(std::vector<double>& right) const {
  const auto largest = [](const std::vector<double>& v) {
    double largest = 0;
    for (double x : v) largest = std::max(largest, std::abs(x));
    return largest;
  };
  const double enough = kResidual * largest(right);
  std::vector<double> x(right.size(), 0.0), more = right;
  for (int refined = 0;; ++refined) {
    substitute(more);
    for (size_t i = 0; i < x.size(); ++i) x[i] += more[i];
    if (refined == kRefinements) break;
    for (size_t i = 0; i < x.size(); ++i) more[i] = right[i] - diagonal_[i] * x[i];
    for (size_t k = 0; k < entries_.size(); ++k) {
      const auto [i, j] = entries_[k];
      more[i] -= values_[k] * x[j], more[j] -= values_[k] * x[i];
    }
    if (largest(more) <= enough) break;
  }
  right = std::move(x);
}

}  // namespace baechi
