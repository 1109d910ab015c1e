// The best split of a row of blocks of groups into segments, one per device
// (`placers/contiguous.py`).
//
// Cost of a segment: what its device receives, `in(a, b)`, the sum of the costs of the tensors that
// are made outside of blocks a .. b - 1 and read inside. With value[b][k] for the first b blocks on
// the first k devices,
//
//   value[b][k] = min(value[b][k - 1], min over a of join(value[a][k - 1], cost(a, b)))
//
// where join adds, or takes the maximum. For a fixed b the segment grows towards the front, and a
// new block a changes in(a, b) by its own tensors alone: so a run takes O(blocks * (tensors read +
// blocks * (devices + moments))).
#include <algorithm>

#include "clock/core.h"

namespace baechi {

namespace {

// A tensor where a block reads it, and where a block makes it.
struct Read {
  int32_t producer, next;  // blocks; `next` is the reader behind this one
  int64_t cost;
};
struct Made {
  int32_t first;  // the first reader behind the producer
  int64_t cost;
};

struct Traffic {
  std::vector<std::vector<Read>> reads;  // per block
  std::vector<std::vector<Made>> made;   // per block

  Traffic(const Problem& problem, const Line& line) : reads(line.blocks), made(line.blocks) {
    std::vector<int32_t> readers;
    for (int32_t tensor = 0; tensor < problem.tensors; ++tensor) {
      const int64_t cost = line.costs[tensor];
      if (cost == 0) continue;
      const int32_t home = line.block[problem.group[problem.producer[tensor]]];
      readers.clear();
      for (int32_t op : Row(problem.consumers, tensor)) {
        const int32_t block = line.block[problem.group[op]];
        if (block != home) readers.push_back(block);
      }
      std::sort(readers.begin(), readers.end());
      readers.erase(std::unique(readers.begin(), readers.end()), readers.end());
      for (size_t i = 0; i < readers.size(); ++i) {
        const int32_t next = i + 1 < readers.size() ? readers[i + 1] : INT32_MAX;
        reads[readers[i]].push_back({home, next, cost});
      }
      const auto behind = std::upper_bound(readers.begin(), readers.end(), home);
      if (behind != readers.end()) made[home].push_back({*behind, cost});
    }
  }

  // The difference in(a, b) - in(a + 1, b).
  int64_t change(int32_t a, int32_t b) const {
    int64_t change = 0;
    for (const Read& read : reads[a]) {
      const bool read_already = read.next < b;
      const bool made_inside = a < read.producer && read.producer < b;
      if (!read_already && !made_inside) change += read.cost;
    }
    for (const Made& tensor : made[a]) {
      if (tensor.first < b) change -= tensor.cost;
    }
    return change;
  }
};

// Time of a device for the first blocks, and the first block from which it may take a segment.
struct Stage {
  int64_t cap;
  std::vector<int64_t> times;  // times[b]: of blocks 0 .. b - 1
  std::vector<int32_t> low;    // low[b]: the first a such that blocks a .. b - 1 may be there
};

std::vector<Stage> stages_of(const Problem& problem, const Line& line) {
  std::vector<Stage> stages;
  for (size_t i = 0; i < line.devices.size(); ++i) {
    const int32_t device = line.devices[i];
    Stage stage{line.caps[i], std::vector<int64_t>(line.blocks + 1, 0),
                std::vector<int32_t>(line.blocks + 1, 0)};
    for (int32_t op = 0; op < problem.ops; ++op) {
      stage.times[line.block[problem.group[op]] + 1] += problem.duration(op, device);
    }
    for (int32_t group = 0; group < problem.groups && !line.allowed.empty(); ++group) {
      const int32_t block = line.block[group];
      if (!line.allowed[static_cast<int64_t>(device) * problem.groups + group]) {
        stage.low[block + 1] = block + 1;
      }
    }
    for (int32_t b = 0; b < line.blocks; ++b) {
      stage.times[b + 1] += stage.times[b];
      stage.low[b + 1] = std::max(stage.low[b + 1], stage.low[b]);
    }
    stages.push_back(std::move(stage));
  }
  return stages;
}

// Devices per block for every number of stages that is better than all smaller ones.
std::vector<std::vector<int32_t>> read_back(const Line& line, const std::vector<int64_t>& value,
                                            const std::vector<int32_t>& from, size_t width) {
  std::vector<std::vector<int32_t>> splits;
  int64_t best = kForever;
  for (size_t k = 1; k < width; ++k) {
    if (value[line.blocks * width + k] >= best) continue;
    best = value[line.blocks * width + k];
    std::vector<int32_t> split(line.blocks);
    int32_t b = line.blocks;
    for (size_t stage = k; b > 0; --stage) {
      const int32_t a = from[b * width + stage];
      if (a < 0) continue;
      std::fill(split.begin() + a, split.begin() + b, line.devices[stage - 1]);
      b = a;
    }
    splits.push_back(std::move(split));
  }
  return splits;
}

}  // namespace

std::vector<std::vector<int32_t>> contiguous_splits(const Problem& problem, const Line& line,
                                                    bool bottleneck) {
  const Traffic traffic(problem, line);
  const std::vector<Stage> stages = stages_of(problem, line);
  const size_t moments = problem.groups ? line.loads.size() / problem.groups : 0;
  std::vector<int64_t> loads(line.blocks * moments, 0);  // loads[block * moments + moment]
  for (size_t i = 0; i < line.loads.size(); ++i) {
    loads[line.block[i % problem.groups] * moments + i / problem.groups] += line.loads[i];
  }
  std::vector<int64_t> held(moments);  // by the segment, per moment
  const int64_t largest = *std::max_element(line.caps.begin(), line.caps.end());
  const size_t width = stages.size() + 1;
  std::vector<int64_t> value((line.blocks + 1) * width, kForever);
  std::vector<int32_t> from(value.size(), -1);  // -1 leaves the device out
  std::fill(value.begin(), value.begin() + static_cast<int64_t>(width), 0);
  for (int32_t b = 1; b <= line.blocks; ++b) {
    int64_t* row = &value[b * width];
    std::fill(held.begin(), held.end(), 0);
    int64_t received = 0;
    for (int32_t a = b - 1; a >= 0; --a) {
      int64_t load = 0;
      for (size_t moment = 0; moment < moments; ++moment) {
        held[moment] += loads[a * moments + moment];
        load = std::max(load, held[moment]);
      }
      if (load > largest) break;
      received += traffic.change(a, b);
      const int64_t* before = &value[a * width];
      for (size_t k = 1; k < width; ++k) {
        const Stage& stage = stages[k - 1];
        if (before[k - 1] == kForever || load > stage.cap || a < stage.low[b]) continue;
        const int64_t joined =
            bottleneck ? std::max(before[k - 1], stage.times[b] - stage.times[a] + received)
                       : before[k - 1] + received;
        if (joined < row[k]) {
          row[k] = joined;
          from[b * width + k] = a;
        }
      }
    }
    for (size_t k = 1; k < width; ++k) {
      if (row[k - 1] <= row[k]) {
        row[k] = row[k - 1];
        from[b * width + k] = -1;
      }
    }
  }
  return read_back(line, value, from, width);
}

}  // namespace baechi
