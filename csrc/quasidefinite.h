// Sparse symmetric systems whose pattern stays while their values change, as those of an interior
// point do.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "minimum_degree.h"

namespace baechi {

// L D L^T of a quasidefinite matrix: D has the signs that are told, in any order of elimination
// (Vanderbei 1995). The order is found once, by approximate minimum degree (Amestoy, Davis and Duff
// 1996), and where that leaves much to do also within the stages of a nested dissection; the better
// one counts. A factorization is multifrontal (Liu 1992): dense updates of small fronts, bottom up.
class Quasidefinite {
 public:
  using Entry = std::pair<int32_t, int32_t>;

  // `entries` are places off the diagonal, in any order, of either triangle; equal ones add up.
  // `position` tells where the middle is: unknowns of one entry should be close in it. Where
  // `work` is more than `most_work`, nothing but that may be asked.
  Quasidefinite(int32_t size, std::vector<Entry> entries, const std::vector<double>& position,
                double most_work);

  // Multiplications that a factorization takes; each one comes with an addition.
  double work() const { return work_; }

  // Of the matrix with these values. Pivots whose sign is not that of the diagonal's entry are
  // ignored: their unknown is 0 in solutions.
  void factor(const std::vector<double>& diagonal, const std::vector<double>& values);

  // Solves in place, with one step of refinement.
  void solve(std::vector<double>& right) const;

 private:
  // Columns first .. first + columns - 1 in the order of elimination, with equal rows below them.
  struct Front {
    int32_t first, columns, parent;
    std::vector<int32_t> below;   // rows, ascending
    std::vector<int32_t> places;  // of the rows below, in the parent's front
    std::vector<std::pair<std::size_t, int64_t>> entries;  // and their places in the front
    std::vector<double> factor;  // columns of L, D on the diagonal; (columns + below) rows each
  };

  std::vector<std::vector<int32_t>> neighbors() const;
  void amalgamate(const Elimination& order);
  void place_entries(const std::vector<int32_t>& front_of);
  static int32_t place_in(const Front& front, int32_t row);
  void substitute(std::vector<double>& x) const;

  int32_t size_;
  double work_ = 0;
  std::vector<Entry> entries_;
  std::vector<int32_t> place_;             // of every unknown, in the order of elimination
  std::vector<Front> fronts_;              // children before parents
  std::vector<double> diagonal_, values_;  // of the last factorization
};

}  // namespace baechi
