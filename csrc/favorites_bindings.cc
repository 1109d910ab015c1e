// m-SCT's linear program in Python: numbers of ops and edges come in as NumPy, results leave as
// lists.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <tuple>
#include <utility>

#include "bindings.h"
#include "favorites.h"
#include "minimum_degree.h"

using namespace nanobind::literals;

namespace baechi {
namespace {

std::pair<std::vector<double>, std::vector<double>> paths(Array<double> times, Array<int32_t> src,
                                                          Array<int32_t> dst,
                                                          Array<double> length) {
  return longest_paths(vector_of(times), vector_of(src), vector_of(dst), vector_of(length));
}

std::tuple<std::vector<double>, double, double, int32_t> shares(
    Array<double> times, Array<int32_t> src, Array<int32_t> dst, Array<double> cost,
    double tolerance, int32_t max_iterations) {
  const Transfers transfers{vector_of(times), vector_of(src), vector_of(dst), vector_of(cost)};
  nb::gil_scoped_release unlocked;
  Shares found = save_transfers(transfers, tolerance, max_iterations);
  return {std::move(found.y), found.objective, found.bound, found.iterations};
}

std::tuple<std::vector<double>, double, double, int32_t> most_shares(
    Array<double> times, Array<int32_t> src, Array<int32_t> dst, Array<double> cost,
    double tolerance, int32_t max_iterations, double most_work) {
  const Transfers transfers{vector_of(times), vector_of(src), vector_of(dst), vector_of(cost)};
  nb::gil_scoped_release unlocked;
  Shares found = save_most_transfers(transfers, tolerance, max_iterations, most_work);
  return {std::move(found.y), found.objective, found.bound, found.iterations};
}

// Unknowns in the order of their elimination, the parent of each, the rows below it, and the work;
// of a pattern with these places and their mirror images, each pair once.
std::tuple<std::vector<int32_t>, std::vector<int32_t>, std::vector<std::vector<int32_t>>, double>
elimination(Array<int32_t> first, Array<int32_t> second, Array<int32_t> stage) {
  std::vector<std::vector<int32_t>> near(stage.shape(0));
  for (size_t k = 0; k < first.shape(0); ++k) {
    near[first.data()[k]].push_back(second.data()[k]);
    near[second.data()[k]].push_back(first.data()[k]);
  }
  Elimination found = least_degree_first(near, vector_of(stage));
  std::vector<std::vector<int32_t>> below(near.size());
  for (int32_t i : found.sequence) {
    const std::vector<int32_t>& rows = found.rows[found.leader[i]];
    below[i].assign(rows.end() - found.height[i], rows.end());
  }
  return {std::move(found.sequence), std::move(found.parent), std::move(below), found.work};
}

}  // namespace

void bind_favorites(nb::module_& m) {
  m.def("least_degree_first", &elimination, "first"_a, "second"_a, "stage"_a);
  m.def("longest_paths", &paths, "times"_a, "src"_a, "dst"_a, "length"_a);
  m.def("save_most_transfers", &most_shares, "times"_a, "src"_a, "dst"_a, "cost"_a, "tolerance"_a,
        "max_iterations"_a, "most_work"_a);
  m.def("save_transfers", &shares, "times"_a, "src"_a, "dst"_a, "cost"_a, "tolerance"_a,
        "max_iterations"_a);
}

}  // namespace baechi
