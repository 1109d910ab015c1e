// The core as a Python module. Arrays come in as NumPy, results leave as lists.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>

#include "core.h"
#include "favorites.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace baechi {
namespace {

template <typename T>
using Array = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <typename T>
std::vector<T> vector_of(const Array<T>& array) {
  return std::vector<T>(array.data(), array.data() + array.shape(0));
}

int32_t size_of(size_t size) { return static_cast<int32_t>(size); }

std::vector<std::tuple<int32_t, int32_t, int64_t, int64_t>> rows_of(
    const std::vector<Span>& spans) {
  std::vector<std::tuple<int32_t, int32_t, int64_t, int64_t>> rows;
  rows.reserve(spans.size());
  for (const Span& s : spans) rows.emplace_back(s.op, s.device, s.start, s.end);
  return rows;
}

std::vector<std::tuple<int32_t, int32_t, int32_t, int64_t, int64_t>> rows_of(
    const std::vector<Transfer>& transfers) {
  std::vector<std::tuple<int32_t, int32_t, int32_t, int64_t, int64_t>> rows;
  rows.reserve(transfers.size());
  for (const Transfer& t : transfers) rows.emplace_back(t.tensor, t.src, t.dst, t.start, t.end);
  return rows;
}

void init_problem(Problem* problem, Array<int64_t> workspace, Array<int32_t> group,
                  Array<int64_t> group_persistent, Array<int32_t> producer, Array<int64_t> nbytes,
                  Array<uint8_t> kept, Array<int64_t> consumer_begin, Array<int32_t> consumers,
                  Array<int32_t> device_class, Array<int64_t> durations, Array<int32_t> pool,
                  Array<int64_t> memory, Array<int64_t> latency, Array<int64_t> rate, int ports) {
  new (problem) Problem();
  problem->ops = size_of(workspace.shape(0));
  problem->tensors = size_of(producer.shape(0));
  problem->devices = size_of(device_class.shape(0));
  problem->pools = size_of(memory.shape(0));
  problem->groups = size_of(group_persistent.shape(0));
  problem->workspace = vector_of(workspace);
  problem->group = vector_of(group);
  problem->group_persistent = vector_of(group_persistent);
  problem->producer = vector_of(producer);
  problem->nbytes = vector_of(nbytes);
  problem->kept = vector_of(kept);
  problem->consumers = {vector_of(consumer_begin), vector_of(consumers)};
  problem->device_class = vector_of(device_class);
  problem->durations = vector_of(durations);
  problem->pool = vector_of(pool);
  problem->memory = vector_of(memory);
  problem->latency = vector_of(latency);
  problem->rate = vector_of(rate);
  problem->ports = static_cast<Ports>(ports);
  problem->finish();
}

// Commits `order` as `devices` says; the op that has no path, or -1.
int32_t fold(Timeline& timeline, Array<int32_t> devices, Array<int32_t> order) {
  nb::gil_scoped_release unlocked;
  for (size_t i = 0; i < order.shape(0); ++i) {
    const int32_t op = order.data()[i], device = devices.data()[op];
    if (!timeline.arrival(op, device)) return op;
    timeline.commit(op, device);
  }
  return -1;
}

bool schedule(Timeline& timeline, Array<int32_t> favorites) {
  const std::vector<int32_t> children = vector_of(favorites);
  nb::gil_scoped_release unlocked;
  return list_schedule(timeline, children);
}

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

NB_MODULE(_core, m) {
  nb::class_<Problem>(m, "Problem")
      .def("__init__", &init_problem, nb::kw_only(), "workspace"_a, "group"_a, "group_persistent"_a,
           "producer"_a, "nbytes"_a, "kept"_a, "consumer_begin"_a, "consumers"_a, "device_class"_a,
           "durations"_a, "pool"_a, "memory"_a, "latency"_a, "rate"_a, "ports"_a);

  nb::class_<Timeline>(m, "Timeline")
      .def(nb::init<const Problem&>(), "problem"_a, nb::keep_alive<1, 2>())
      .def("committed", &Timeline::committed, "op"_a)
      .def("waits_for", &Timeline::waits_for, "op"_a)
      .def("group_device", &Timeline::group_device, "op"_a)
      .def("earliest_start", &Timeline::earliest_start, "op"_a, "device"_a)
      .def(
          "fits",
          [](const Timeline& timeline, int32_t op, int32_t device) {
            return timeline.fit(op, device) == Fit::kFits;
          },
          "op"_a, "device"_a)
      .def("reserve", &Timeline::reserve, "op"_a, "device"_a)
      .def("hold_back", &Timeline::hold_back, "pool"_a, "nbytes"_a)
      .def(
          "commit",
          [](Timeline& timeline, int32_t op, int32_t device) {
            const Span& span = timeline.commit(op, device);
            return std::make_pair(span.start, span.end);
          },
          "op"_a, "device"_a)
      .def("fold", &fold, "devices"_a, "order"_a)
      .def("list_schedule", &schedule, "favorites"_a)
      .def("spans", [](const Timeline& timeline) { return rows_of(timeline.spans()); })
      .def("transfers", [](const Timeline& timeline) { return rows_of(timeline.transfers()); })
      .def("makespan", &Timeline::makespan)
      .def("peaks", &Timeline::peaks)
      .def("left", &Timeline::left)
      .def("need", &Timeline::need, "op"_a);

  m.def(
      "heads_and_tails",
      [](const Problem& problem, Array<int64_t> best) {
        return heads_and_tails(problem, vector_of(best));
      },
      "problem"_a, "best"_a);

  m.def("longest_paths", &paths, "times"_a, "src"_a, "dst"_a, "length"_a);
  m.def("save_transfers", &shares, "times"_a, "src"_a, "dst"_a, "cost"_a, "tolerance"_a,
        "max_iterations"_a);
}

}  // namespace baechi
