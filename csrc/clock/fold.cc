// A whole placement at once: `commit`, op by op, with memory fetched ahead.
#include "clock/core.h"

namespace baechi {

namespace {

// Number of ops by which `fold` prefetches.
constexpr int32_t kAhead = 16;

}  // namespace

int32_t Timeline::fold(const int32_t* devices, const int32_t* order, int32_t count) {
  const int32_t outside = expect(devices, order, count);
  if (outside >= 0) return outside;
  if (!problem_.part_bytes.empty() && copied_.empty() && spans_->empty()) {
    copied_.resize(static_cast<size_t>(problem_.tensors));
    for (int32_t tensor = 0; tensor < problem_.tensors; ++tensor) {
      if (!problem_.has_parts(tensor)) continue;
      copied_[tensor].resize(static_cast<size_t>(problem_.pools));
      problem_.copied(
          tensor, [&](int32_t op) { return problem_.pool[devices[op]]; }, copied_[tensor]);
    }
  }
  for (int32_t i = 0; i < count; ++i) {
    if (i + 2 * kAhead < count) fetch_op(order[i + 2 * kAhead], devices[order[i + 2 * kAhead]]);
    if (i + kAhead < count) fetch_tensors(order[i + kAhead]);
    const int32_t op = order[i], device = devices[op];
    fetch_ends(device);
    const int32_t home = group_device_[problem_.group[op]];
    if (committed(op) || (home >= 0 && home != device)) return op;
    for (int32_t tensor : Row(problem_.inputs, op)) {
      if (presences_[tensor].holder < 0) return op;
    }
    const std::optional<int64_t> ready = plan(op, device);
    if (!ready) return op;
    place(op, device, *ready);
  }
  return -1;
}

void Timeline::fetch_ends(int32_t device) const {
  fetch_after(*spans_);
  fetch_after(*transfers_);
  fetch_after(presences_);
  profiles_[problem_.pool[device]].fetch_end();
}

// A launch order jumps among the ops, which the processor cannot predict, but we can.
void Timeline::fetch_op(int32_t op, int32_t device) const {
  __builtin_prefetch(&problem_.inputs.begin[op]);
  __builtin_prefetch(&problem_.outputs.begin[op]);
  __builtin_prefetch(&problem_.workspace[op]);
  __builtin_prefetch(&problem_.output_bytes[op]);
  __builtin_prefetch(&problem_.group[op]);
  __builtin_prefetch(&device_[op], 1);
  __builtin_prefetch(
      &problem_.durations[static_cast<int64_t>(problem_.device_class[device]) * problem_.ops + op]);
}

void Timeline::fetch_tensors(int32_t op) const {
  const int32_t group = problem_.group[op];
  __builtin_prefetch(&group_device_[group], 1);
  __builtin_prefetch(&problem_.group_persistent[group]);
  for (int32_t tensor : Row(problem_.inputs, op)) {
    __builtin_prefetch(&presences_[tensor], 1);
    __builtin_prefetch(&problem_.nbytes[tensor]);
    if (!problem_.sent_ns.empty()) __builtin_prefetch(&problem_.sent_ns[tensor]);
    __builtin_prefetch(&problem_.kept[tensor]);
  }
  for (int32_t tensor : Row(problem_.outputs, op)) __builtin_prefetch(&presences_[tensor], 1);
}

int32_t Timeline::expect(const int32_t* devices, const int32_t* order, int32_t count) {
  for (int32_t i = 0; i < count; ++i) {
    if (order[i] < 0 || order[i] >= problem_.ops) return order[i];
  }
  std::vector<size_t> changes(problem_.pools, 0);
  for (int32_t op = 0; op < problem_.ops; ++op) {
    const int32_t device = devices[op];
    if (device < 0 || device >= problem_.devices) return op;
    const size_t tensors = 2 * problem_.inputs.size(op) + problem_.outputs.size(op);
    changes[problem_.pool[device]] += 2 + tensors;
  }
  for (int32_t pool = 0; pool < problem_.pools; ++pool) profiles_[pool].expect(changes[pool]);
  return -1;
}

}  // namespace baechi
