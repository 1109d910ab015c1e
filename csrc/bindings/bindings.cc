// The core as a Python module. Arguments are NumPy arrays, results are lists.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "bounds/bounds.h"
#include "bounds/surely_held.h"
#include "clock/core.h"
#include "coarsening/coarse.h"
#include "favorites/first_order.h"
#include "search/local_search.h"

using namespace nanobind::literals;

namespace baechi {
namespace {

namespace nb = nanobind;

// The result of a function that runs without Python's lock.
template <typename F>
auto unlocked(F function) {
  nb::gil_scoped_release released;
  return function();
}

template <typename T>
using Array = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <typename T>
std::vector<T> vector_of(const Array<T>& array) {
  return std::vector<T>(array.data(), array.data() + array.shape(0));
}

template <typename T>
using OutArray = nb::ndarray<nb::numpy, T, nb::ndim<1>>;

// The vector as a NumPy array that owns it.
template <typename T>
OutArray<T> array_of(std::vector<T>&& values) {
  auto* kept = new std::vector<T>(std::move(values));
  nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return {kept->data(), {kept->size()}, owner};
}

int32_t size_of(size_t size) { return static_cast<int32_t>(size); }

// One member of every row, as an array that shares the rows.
template <typename T, typename R>
OutArray<T> column(const std::shared_ptr<LargeVector<R>>& rows, T R::* member) {
  static_assert(sizeof(R) % sizeof(T) == 0);
  using Kept = std::shared_ptr<LargeVector<R>>;
  nb::capsule owner(new Kept(rows), [](void* p) noexcept { delete static_cast<Kept*>(p); });
  const int64_t stride = sizeof(R) / sizeof(T);
  T* first = rows->empty() ? nullptr : &(rows->front().*member);
  return {first, {rows->size()}, owner, {stride}};
}

void init_graph(Graph* graph, Array<int64_t> workspace, Array<int64_t> beside_begin,
                Array<int32_t> beside, Array<int64_t> beside_bytes, Array<int32_t> group,
                Array<int64_t> group_persistent, Array<int32_t> producer, Array<int64_t> nbytes,
                Array<uint8_t> kept, Array<int64_t> consumer_begin, Array<int32_t> consumers,
                Array<int64_t> part_begin, Array<int64_t> part_bytes, Array<int64_t> reader_begin,
                Array<int32_t> readers) {
  new (graph) Graph();
  graph->ops = size_of(workspace.shape(0));
  graph->tensors = size_of(producer.shape(0));
  graph->groups = size_of(group_persistent.shape(0));
  graph->workspace = vector_of(workspace);
  graph->beside = {vector_of(beside_begin), vector_of(beside)};
  graph->beside_bytes = vector_of(beside_bytes);
  graph->group = vector_of(group);
  graph->group_persistent = vector_of(group_persistent);
  graph->producer = vector_of(producer);
  graph->nbytes = vector_of(nbytes);
  graph->kept = vector_of(kept);
  graph->consumers = {vector_of(consumer_begin), vector_of(consumers)};
  graph->part_begin = vector_of(part_begin);
  graph->part_bytes = vector_of(part_bytes);
  graph->readers = {vector_of(reader_begin), vector_of(readers)};
  graph->derive();
}

void init_problem(Problem* problem, const Graph& graph, Array<int32_t> device_class,
                  Array<int64_t> durations, Array<int32_t> pool, Array<int64_t> memory,
                  Array<int64_t> latency, Array<int64_t> rate, Array<int64_t> overhead, int ports,
                  Array<int64_t> launch, Array<int32_t> host, Array<uint8_t> ahead,
                  Array<uint8_t> allowed, int32_t max_devices) {
  new (problem) Problem();
  static_cast<Graph&>(*problem) = graph;
  problem->devices = size_of(device_class.shape(0));
  problem->pools = size_of(memory.shape(0));
  problem->device_class = vector_of(device_class);
  problem->durations = vector_of(durations);
  problem->pool = vector_of(pool);
  problem->memory = vector_of(memory);
  problem->latency = {vector_of(latency)};
  problem->rate = {vector_of(rate)};
  problem->overhead = {vector_of(overhead)};
  problem->ports = static_cast<Ports>(ports);
  problem->launch = vector_of(launch);
  problem->host = vector_of(host);
  problem->ahead = vector_of(ahead);
  for (int32_t index : problem->host) problem->hosts = std::max(problem->hosts, index + 1);
  problem->allowed = vector_of(allowed);
  problem->max_devices = max_devices;
  problem->finish();
}

// Commits `order` as `devices` says; the op that could not be committed, or -1.
int32_t fold(Timeline& timeline, Array<int32_t> devices, Array<int32_t> order) {
  return unlocked(
      [&] { return timeline.fold(devices.data(), order.data(), size_of(order.shape(0))); });
}

// A tuple of non-negative integers, clamped to int32.
OutArray<int32_t> indices(nb::tuple values) {
  const size_t count = values.size();
  std::vector<int32_t> row(count);
  for (size_t i = 0; i < count; ++i) {
    const int64_t value = PyLong_AsLongLong(PyTuple_GET_ITEM(values.ptr(), i));
    if (value == -1 && PyErr_Occurred()) throw nb::python_error();
    row[i] = static_cast<int32_t>(std::min<int64_t>(value, INT32_MAX));
  }
  return array_of(std::move(row));
}

std::vector<std::vector<int32_t>> vectors_of(const std::vector<Array<int32_t>>& arrays) {
  std::vector<std::vector<int32_t>> rows;
  for (const Array<int32_t>& array : arrays) rows.push_back(vector_of(array));
  return rows;
}

// Devices and order, with makespan, overflow and evaluations.
std::tuple<OutArray<int32_t>, OutArray<int32_t>, int64_t, int64_t, int64_t> search(
    const Problem& problem, Array<int32_t> devices, Array<int32_t> order,
    const std::vector<Array<int32_t>>& clusters, int64_t budget, int64_t target, uint64_t seed,
    const Halt* halt) {
  Found found = unlocked([&] {
    return local_search(problem, vector_of(devices), vector_of(order), vectors_of(clusters), budget,
                        target, seed, 0, halt);
  });
  return {array_of(std::move(found.devices)), array_of(std::move(found.order)), found.makespan,
          found.overflow, found.evaluations};
}

std::vector<OutArray<int32_t>> clusters_of(const Problem& problem, Array<int32_t> color) {
  auto levels = unlocked([&] { return group_clusters(problem, vector_of(color)); });
  std::vector<OutArray<int32_t>> arrays;
  for (std::vector<int32_t>& level : levels) arrays.push_back(array_of(std::move(level)));
  return arrays;
}

// The part of every op, and the first part of every part's group.
std::pair<OutArray<int32_t>, OutArray<int32_t>> parts_of(const Problem& problem,
                                                         Array<uint8_t> idle, Array<int32_t> color,
                                                         int64_t limit) {
  CoarseGraph coarse =
      unlocked([&] { return coarsen(problem, vector_of(idle), vector_of(color), limit); });
  return {array_of(std::move(coarse.part_of)), array_of(std::move(coarse.group))};
}

// The workspace of every part; the tensors that leave their part; and the parts that consume them,
// as flat rows.
std::tuple<OutArray<int64_t>, OutArray<int32_t>, OutArray<int64_t>, OutArray<int32_t>>
coarse_arrays(const Problem& problem, Array<int32_t> part_of, int32_t parts) {
  const std::vector<int32_t> part = vector_of(part_of);
  auto tensors = unlocked([&] { return coarse_tensors(problem, part, parts); });
  auto workspace =
      unlocked([&] { return coarse_workspace(problem, part, parts, tensors.tensors); });
  return {array_of(std::move(workspace)), array_of(std::move(tensors.tensors)),
          array_of(std::move(tensors.consumers.begin)),
          array_of(std::move(tensors.consumers.values))};
}

std::vector<std::vector<int32_t>> split_line(const Problem& problem, int32_t blocks,
                                             Array<int32_t> block, Array<int64_t> loads,
                                             Array<int64_t> costs, Array<int32_t> devices,
                                             Array<int64_t> caps, Array<uint8_t> allowed,
                                             bool bottleneck) {
  const Line line{
      blocks,          vector_of(block),  vector_of(loads), vector_of(costs), vector_of(devices),
      vector_of(caps), vector_of(allowed)};
  return unlocked([&] { return contiguous_splits(problem, line, bottleneck); });
}

std::tuple<int64_t, int64_t, int64_t> bounds_of(const Problem& problem, Array<int64_t> durations,
                                                Array<uint8_t> allowed, Array<int64_t> memory,
                                                Array<int64_t> latency, Array<int64_t> rate,
                                                Array<int64_t> weights, Array<int64_t> weight_sums,
                                                int32_t window, int32_t thresholds,
                                                int32_t guesses) {
  const Sites sites{size_of(memory.shape(0)), vector_of(durations),  vector_of(allowed),
                    vector_of(memory),        vector_of(latency),    vector_of(rate),
                    vector_of(weights),       vector_of(weight_sums)};
  const Bounds bounds =
      unlocked([&] { return lower_bounds(problem, sites, {window, thresholds, guesses}); });
  return {bounds.path, bounds.work, bounds.guess};
}

// m-SCT's linear program: shares, objective, bound and iterations.
std::tuple<std::vector<double>, double, double, int32_t> shares(
    Array<double> times, Array<int32_t> src, Array<int32_t> dst, Array<double> cost,
    double tolerance, int32_t max_iterations) {
  const Transfers transfers{vector_of(times), vector_of(src), vector_of(dst), vector_of(cost)};
  Shares found = unlocked([&] { return save_transfers(transfers, tolerance, max_iterations); });
  return {std::move(found.y), found.objective, found.bound, found.iterations};
}

// Whether Python objects hold what they held, by identity: a look at each, and no comparison.
bool same_items(PyObject* dict, PyObject* row) {
  if (PyDict_GET_SIZE(dict) * 2 != PyTuple_GET_SIZE(row)) return false;
  PyObject **next = PySequence_Fast_ITEMS(row), *key, *value;
  for (Py_ssize_t position = 0; PyDict_Next(dict, &position, &key, &value);) {
    if (*next++ != key || *next++ != value) return false;
  }
  return true;
}

bool same_elements(PyObject* list, PyObject* row) {
  PyObject** first = PySequence_Fast_ITEMS(row);
  return PyList_GET_SIZE(list) == PyTuple_GET_SIZE(row) &&
         std::equal(first, first + PyTuple_GET_SIZE(row), PySequence_Fast_ITEMS(list));
}

bool same_classes(PyObject* objects, PyObject* row) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(objects); ++i) {
    PyTypeObject* kind = Py_TYPE(PyTuple_GET_ITEM(objects, i));
    if (reinterpret_cast<PyObject*>(kind) != PyTuple_GET_ITEM(row, i)) return false;
  }
  return true;
}

bool same_attributes(PyObject* object, PyObject* row) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(row); i += 2) {
    PyObject* value = PyObject_GetAttr(object, PyTuple_GET_ITEM(row, i));
    if (value == nullptr) PyErr_Clear();
    Py_XDECREF(value);  // the row holds the one that it is compared with
    if (value != PyTuple_GET_ITEM(row, i + 1)) return false;
  }
  return true;
}

// Each row is what a holder held: keys and values of a dict, elements of a list, an equal frozenset
// of a set, the classes of what is in a tuple, or names and values of another object's attributes.
bool same_contents(const nb::list& holders, const nb::list& rows) {
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(holders.ptr()); ++i) {
    PyObject* holder = PyList_GET_ITEM(holders.ptr(), i);
    PyObject* row = PyList_GET_ITEM(rows.ptr(), i);
    const bool same = PyDict_Check(holder)     ? same_items(holder, row)
                      : PyList_Check(holder)   ? same_elements(holder, row)
                      : PyTuple_Check(holder)  ? same_classes(holder, row)
                      : PyAnySet_Check(holder) ? nb::handle(holder).equal(nb::handle(row))
                                               : same_attributes(holder, row);
    if (!same) return false;
  }
  return true;
}

}  // namespace

NB_MODULE(_core, m) {
  // A graph keeps its rows as long as it lives, possibly to the end of the process: no leak to warn
  // of.
  nb::set_leak_warnings(false);

  nb::class_<Graph>(m, "Graph")
      .def("__init__", &init_graph, nb::kw_only(), "workspace"_a, "beside_begin"_a, "beside"_a,
           "beside_bytes"_a, "group"_a, "group_persistent"_a, "producer"_a, "nbytes"_a, "kept"_a,
           "consumer_begin"_a, "consumers"_a, "part_begin"_a, "part_bytes"_a, "reader_begin"_a,
           "readers"_a);

  nb::class_<Problem>(m, "Problem")
      .def("__init__", &init_problem, nb::kw_only(), "graph"_a, "device_class"_a, "durations"_a,
           "pool"_a, "memory"_a, "latency"_a, "rate"_a, "overhead"_a, "ports"_a, "launch"_a,
           "host"_a, "ahead"_a, "allowed"_a, "max_devices"_a);

  nb::class_<Halt>(m, "Halt")
      .def(nb::init<>())
      .def("close", [](Halt& halt) { halt.asked = true; })
      .def_prop_ro("closed", [](const Halt& halt) { return halt.asked.load(); });

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
      .def("allows", &Timeline::allows, "op"_a, "device"_a)
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
      .def(
          "list_schedule",
          [](Timeline& timeline, Array<int32_t> favorites) {
            return unlocked([&] { return list_schedule(timeline, vector_of(favorites)); });
          },
          "favorites"_a)
      .def(
          "ranked_schedule",
          [](Timeline& timeline, Array<int64_t> ranks, Array<int64_t> future, bool overfull) {
            return unlocked([&] {
              return ranked_schedule(timeline, vector_of(ranks), vector_of(future), overfull);
            });
          },
          "ranks"_a, "future"_a, "overfull"_a = false)
      .def(
          "insertion_schedule",
          [](Timeline& timeline, Array<int64_t> ranks, Array<int64_t> future,
             Array<int64_t> loads) {
            return unlocked([&] {
              return insertion_schedule(timeline, vector_of(ranks), vector_of(future),
                                        vector_of(loads));
            });
          },
          "ranks"_a, "future"_a, "loads"_a)
      .def("span_columns",
           [](const Timeline& timeline) {
             const auto& rows = timeline.kept_spans();
             return std::make_tuple(column(rows, &Span::op), column(rows, &Span::device),
                                    column(rows, &Span::start), column(rows, &Span::end));
           })
      .def("transfer_columns",
           [](const Timeline& timeline) {
             const auto& rows = timeline.kept_transfers();
             return std::make_tuple(column(rows, &Transfer::tensor), column(rows, &Transfer::src),
                                    column(rows, &Transfer::dst), column(rows, &Transfer::start),
                                    column(rows, &Transfer::end));
           })
      .def("makespan", &Timeline::makespan)
      .def("peaks", &Timeline::peaks)
      .def("left", &Timeline::left)
      .def("need", &Timeline::need, "op"_a);

  m.def("indices", &indices, "values"_a);
  m.def(
      "partition_search",
      [](const Problem& problem, Array<int32_t> devices,
         const std::vector<Array<int32_t>>& clusters, Array<int64_t> loads, double cut_weight,
         int32_t windows, int64_t moves, uint64_t seed, const Halt* halt) {
        return array_of(unlocked([&] {
          return partition_search(problem, vector_of(devices), vectors_of(clusters),
                                  vector_of(loads), cut_weight, windows, moves, seed, halt);
        }));
      },
      "problem"_a, "devices"_a, "clusters"_a, "loads"_a, "cut_weight"_a, "windows"_a, "moves"_a,
      "seed"_a, "halt"_a.none() = nb::none());
  m.def(
      "list_order",
      [](const Problem& problem, Array<int32_t> devices) {
        const std::vector<int32_t> row = vector_of(devices);
        return array_of(unlocked([&] { return list_order(problem, row, ranks(problem, row)); }));
      },
      "problem"_a, "devices"_a);
  m.def("most_held", &most_held, "problem"_a, nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "level_order",
      [](const Problem& problem) {
        return array_of(unlocked([&] { return level_order(problem); }));
      },
      "problem"_a);
  m.def(
      "backtrack",
      [](const Problem& problem, Array<int32_t> order, int64_t budget, uint64_t seed) {
        Backtracked found =
            unlocked([&] { return backtrack(problem, vector_of(order), budget, seed); });
        return std::make_pair(array_of(std::move(found.devices)), found.proven);
      },
      "problem"_a, "order"_a, "budget"_a, "seed"_a);
  m.def(
      "grown",
      [](const Problem& problem, const std::vector<Array<int32_t>>& clusters, int32_t stretch,
         int64_t budget, uint64_t seed, const Halt* halt) {
        Found found = unlocked(
            [&] { return grown(problem, vectors_of(clusters), stretch, budget, seed, halt); });
        return std::tuple(array_of(std::move(found.devices)), array_of(std::move(found.order)),
                          found.evaluations);
      },
      "problem"_a, "clusters"_a, "stretch"_a, "budget"_a, "seed"_a, "halt"_a.none() = nb::none());
  m.def("local_search", &search, "problem"_a, "devices"_a, "order"_a, "clusters"_a, "budget"_a,
        "target"_a, "seed"_a, "halt"_a.none() = nb::none());

  m.def("coarsen", &parts_of, "problem"_a, "idle"_a, "color"_a, "limit"_a);
  m.def("coarse_arrays", &coarse_arrays, "problem"_a, "part_of"_a, "parts"_a);
  m.def(
      "regrouped",
      [](const Problem& problem, Array<int32_t> cluster) {
        return unlocked([&] { return regrouped(problem, vector_of(cluster)); });
      },
      "problem"_a, "cluster"_a);
  m.def("group_clusters", &clusters_of, "problem"_a, "color"_a);
  const auto released = nb::call_guard<nb::gil_scoped_release>();
  m.def("mean_transfers", &mean_transfers, "problem"_a, released);
  m.def("upward_ranks", &upward_ranks, "problem"_a, released);
  m.def("contiguous_splits", &split_line, "problem"_a, nb::kw_only(), "blocks"_a, "block"_a,
        "loads"_a, "costs"_a, "devices"_a, "caps"_a, "allowed"_a, "bottleneck"_a);
  m.def("optimistic_costs", &optimistic_costs, "problem"_a, released);
  m.def("lower_bounds", &bounds_of, "problem"_a, nb::kw_only(), "durations"_a, "allowed"_a,
        "memory"_a, "latency"_a, "rate"_a, "weights"_a, "weight_sums"_a, "window"_a, "thresholds"_a,
        "guesses"_a);
  m.def(
      "longest_paths",
      [](Array<double> times, Array<int32_t> src, Array<int32_t> dst, Array<double> length) {
        return longest_paths(vector_of(times), vector_of(src), vector_of(dst), vector_of(length));
      },
      "times"_a, "src"_a, "dst"_a, "length"_a);
  m.def("save_transfers", &shares, "times"_a, "src"_a, "dst"_a, "cost"_a, "tolerance"_a,
        "max_iterations"_a);
  m.def("same_contents", &same_contents, "holders"_a, "rows"_a);
}

}  // namespace baechi
