#include "quasidefinite.h"

#include <algorithm>
#include <cmath>

#include "dissection.h"
#include "front.h"
#include "minimum_degree.h"

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
// Nor where it takes so many times what it may: dissection has saved up to four fifths.
constexpr double kHopeless = 16;

}  // namespace

Quasidefinite::Quasidefinite(int32_t size, std::vector<Entry> entries,
                             const std::vector<double>& position, double most_work)
    : size_(size), entries_(std::move(entries)) {
  const std::vector<std::vector<int32_t>> near = neighbors();
  Elimination best =
      least_degree_first(near, std::vector<int32_t>(near.size(), 0), kHopeless * most_work);
  if (best.work > kCheap && best.work <= kHopeless * most_work) {
    Elimination other = least_degree_first(near, dissect(near, position), best.work);
    if (other.work < best.work) best = std::move(other);
  }
  work_ = best.work;
  if (work_ <= most_work) amalgamate(best);
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

// Gives every unknown its place, and columns with nearly the same rows one front.
void Quasidefinite::amalgamate(const Elimination& order) {
  // Children right before parents, the highest last, so that it may be merged with its parent.
  const size_t n = static_cast<size_t>(size_);
  std::vector<std::vector<int32_t>> children(n);
  std::vector<int32_t> stack, at(n);
  for (int32_t i : order.sequence)
    (order.parent[i] < 0 ? stack : children[order.parent[i]]).push_back(i);
  for (auto& family : children)
    std::stable_sort(family.begin(), family.end(),
                     [&](int32_t a, int32_t b) { return order.height[a] < order.height[b]; });
  place_.assign(n, 0);
  for (int32_t place = size_; !stack.empty();) {
    const int32_t i = stack.back();
    stack.pop_back();
    place_[i] = --place, at[place] = i;
    stack.insert(stack.end(), children[i].begin(), children[i].end());
  }
  std::vector<int32_t> front_of(n);
  int64_t zeros = 0;
  work_ = 0;
  for (int32_t j = 0; j < size_; ++j) {
    bool merge = false;
    if (j > 0 && order.parent[at[j - 1]] == at[j]) {
      const int64_t columns = fronts_.back().columns, height = order.height[at[j]];
      const int64_t more = columns * (height + 1 - order.height[at[j - 1]]);
      const int64_t all = (columns + 1) * height + (columns + 1) * (columns + 2) / 2;
      merge = more == 0 || columns + height < kSmall ||
              static_cast<double>(zeros + more) <= kZeros * static_cast<double>(all);
      if (merge) zeros += more;
    }
    if (!merge) fronts_.push_back({j, 0, -1, {}, {}, {}, {}}), zeros = 0;
    ++fronts_.back().columns;
    front_of[j] = static_cast<int32_t>(fronts_.size()) - 1;
  }
  for (Front& front : fronts_) {
    const int32_t last = front.first + front.columns - 1;
    for (int32_t i : order.rows[order.leader[at[last]]])
      if (place_[i] > last) front.below.push_back(place_[i]);
    std::sort(front.below.begin(), front.below.end());
    if (order.parent[at[last]] >= 0) front.parent = front_of[place_[order.parent[at[last]]]];
    for (size_t height = front.below.size(), c = 0; c < static_cast<size_t>(front.columns); ++c)
      work_ += 0.5 * static_cast<double>((height + c) * (height + c));
  }
  for (Front& front : fronts_)
    for (int32_t row : front.below) front.places.push_back(place_in(fronts_[front.parent], row));
  place_entries(front_of);
}

// Of a row, in a front that has it.
int32_t Quasidefinite::place_in(const Front& front, int32_t row) {
  if (row < front.first + front.columns) return row - front.first;
  const auto found = std::lower_bound(front.below.begin(), front.below.end(), row);
  return front.columns + static_cast<int32_t>(found - front.below.begin());
}

// Where in its front every entry is: of its two unknowns, the first to go is the column.
void Quasidefinite::place_entries(const std::vector<int32_t>& front_of) {
  for (size_t k = 0; k < entries_.size(); ++k) {
    const auto [i, j] = entries_[k];
    const auto [column, row] = std::minmax(place_[i], place_[j]);
    Front& front = fronts_[front_of[column]];
    const int64_t height = front.columns + static_cast<int64_t>(front.below.size());
    front.entries.emplace_back(k, (column - front.first) * height + place_in(front, row));
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
