// Bindings of m-SCT's linear program: arguments are NumPy arrays, results are lists.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <tuple>
#include <utility>

#include "bindings/bindings.h"
#include "favorites/first_order.h"

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

}  // namespace

void bind_favorites(nb::module_& m) {
  m.def("longest_paths", &paths, "times"_a, "src"_a, "dst"_a, "length"_a);
  m.def("save_transfers", &shares, "times"_a, "src"_a, "dst"_a, "cost"_a, "tolerance"_a,
        "max_iterations"_a);
}

}  // namespace baechi
