// Streams, events, captures and graphs.
//
// A capture is a graph under construction: its streams have a frontier, the nodes that what is
// launched next depends on. A replay runs the nodes in a random topological order.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "machine.h"

namespace emulated {

namespace {

struct Node {
  Task run;
  std::set<int> before;
};

// What a graph keeps alive, by references of it and of who made it.
struct UserObject {
  cudaHostFn_t destroy;
  void* data;
  unsigned references;
};

struct Graph : std::vector<Node> {
  std::vector<UserObject*> kept;  // one for each reference
  Graph() = default;
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  ~Graph();
};

struct Capture {
  unsigned long long id;
  cudaStreamCaptureMode mode;
  Stream* origin;
  size_t thread;
  std::shared_ptr<Graph> graph = std::make_shared<Graph>();
  std::set<Stream*> streams;
  bool is_spoiled = false;
};

// One recording of an event.
struct Moment {
  bool is_past = false;
  double ms = 0;
};

struct Event {
  int device;
  std::shared_ptr<Moment> last;
  std::shared_ptr<Capture> capture;  // in which it was recorded last, and after which nodes
  std::set<int> nodes;
};

// What a stream does next: a task, or noting that a moment has come, or waiting for one.
struct Item {
  Task task;
  std::shared_ptr<Moment> moment;
  bool waits = false;
};

}  // namespace

struct Stream {
  int device;
  std::deque<Item> queue;
  std::shared_ptr<Capture> capture;
  std::set<int> frontier;
};

namespace {

int number_from_environment(const char* name, int otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::atoi(text);
}

std::vector<std::unique_ptr<Stream>>& streams() {
  static std::vector<std::unique_ptr<Stream>> all;  // torch never gives one back
  return all;
}

Stream& new_stream(int device) {
  streams().push_back(std::make_unique<Stream>(Stream{device, {}, {}, {}}));
  return *streams().back();
}

std::map<cudaEvent_t, std::shared_ptr<Event>>& events() {
  static std::map<cudaEvent_t, std::shared_ptr<Event>> all;
  return all;
}

std::set<std::shared_ptr<Capture>>& captures() {
  static std::set<std::shared_ptr<Capture>> all;
  return all;
}

std::map<cudaGraph_t, std::shared_ptr<Graph>>& graphs() {
  static std::map<cudaGraph_t, std::shared_ptr<Graph>> all;
  return all;
}

std::map<cudaGraphExec_t, std::shared_ptr<Graph>>& executables() {
  static std::map<cudaGraphExec_t, std::shared_ptr<Graph>> all;
  return all;
}

void release(UserObject* object, unsigned references) {
  object->references -= references;
  if (object->references != 0) return;
  object->destroy(object->data);
  delete object;
}

Graph::~Graph() {
  for (UserObject* object : kept) release(object, 1);
}

thread_local int device_of_thread = 0;
thread_local cudaError_t error_of_thread = cudaSuccess;
thread_local cudaStreamCaptureMode mode_of_thread = cudaStreamCaptureModeGlobal;

size_t this_thread() {
  static size_t threads = 0;
  thread_local const size_t number = ++threads;
  return number;
}

double spun_ms = 0;

double now_ms() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double, std::milli>(now).count() + spun_ms;
}

bool can_go_on(const Stream& stream) {
  if (stream.queue.empty()) return false;
  const Item& next = stream.queue.front();
  return !next.waits || next.moment->is_past;
}

void go_on(Stream& stream) {
  const Item item = std::move(stream.queue.front());
  stream.queue.pop_front();
  if (item.task) item.task();
  if (item.moment && !item.waits) *item.moment = {true, now_ms()};
}

// Lets one stream go on; false if none can.
bool step() {
  std::vector<Stream*> ready;
  for (const auto& stream : streams()) {
    if (can_go_on(*stream)) ready.push_back(stream.get());
  }
  if (ready.empty()) return false;
  Stream& stream = *ready[random_numbers()() % ready.size()];
  for (auto left = 1 + random_numbers()() % 8; left > 0 && can_go_on(stream); --left) go_on(stream);
  return true;
}

template <typename Done>
void go_on_until(const Done& done) {
  while (!done()) {
    if (step()) continue;
    std::fputs("emulated CUDA: every stream waits for another\n", stderr);
    std::abort();
  }
}

void push(Stream& stream, Item item) {
  stream.queue.push_back(std::move(item));
  static const bool at_once = number_from_environment("EMULATED_CUDA_EAGER", 0) != 0;
  while (at_once && step()) {
  }
}

cudaStreamCaptureStatus status(const Stream& stream) {
  if (!stream.capture) return cudaStreamCaptureStatusNone;
  return stream.capture->is_spoiled ? cudaStreamCaptureStatusInvalidated
                                    : cudaStreamCaptureStatusActive;
}

// Whether every node that a stream of the capture did leads to the end of its origin.
bool is_joined(const Capture& capture) {
  std::set<int> reached;
  std::vector<int> left(capture.origin->frontier.begin(), capture.origin->frontier.end());
  while (!left.empty()) {
    const int node = left.back();
    left.pop_back();
    if (!reached.insert(node).second) continue;
    const std::set<int>& before = (*capture.graph)[node].before;
    left.insert(left.end(), before.begin(), before.end());
  }
  for (const Stream* stream : capture.streams) {
    for (const int node : stream->frontier) {
      if (reached.count(node) == 0) return false;
    }
  }
  return true;
}

void replay(const Graph& graph) {
  std::vector<size_t> missing(graph.size());
  std::vector<std::vector<int>> after(graph.size());
  std::vector<int> ready;
  for (int node = 0; node < static_cast<int>(graph.size()); ++node) {
    missing[node] = graph[node].before.size();
    for (const int earlier : graph[node].before) after[earlier].push_back(node);
    if (missing[node] == 0) ready.push_back(node);
  }
  while (!ready.empty()) {
    std::swap(ready[random_numbers()() % ready.size()], ready.back());
    const int node = ready.back();
    ready.pop_back();
    graph[node].run();
    for (const int later : after[node]) {
      if (--missing[later] == 0) ready.push_back(later);
    }
  }
}

}  // namespace

std::recursive_mutex& everything() {
  static std::recursive_mutex mutex;
  return mutex;
}

int devices() {
  static const int number = number_from_environment("EMULATED_CUDA_DEVICES", 1);
  return number;
}

int current_device() { return device_of_thread; }

std::mt19937_64& random_numbers() {
  static std::mt19937_64 numbers(number_from_environment("EMULATED_CUDA_SEED", 0));
  return numbers;
}

cudaError_t failed(cudaError_t error) { return error_of_thread = error; }

Stream& stream_of(cudaStream_t handle) {
  if (handle != nullptr && handle != cudaStreamLegacy && handle != cudaStreamPerThread) {
    return *reinterpret_cast<Stream*>(handle);
  }
  static std::map<int, Stream*> defaults;
  Stream*& stream = defaults[current_device()];
  if (stream == nullptr) stream = &new_stream(current_device());
  return *stream;
}

void push(Stream& stream, Task task) {
  if (!stream.capture) return push(stream, Item{std::move(task), nullptr});
  Graph& graph = *stream.capture->graph;
  graph.push_back({std::move(task), std::move(stream.frontier)});
  stream.frontier = {static_cast<int>(graph.size()) - 1};
}

void finish(Stream& stream) {
  go_on_until([&] { return stream.queue.empty(); });
}

void finish_all() {
  go_on_until([] {
    return std::all_of(streams().begin(), streams().end(),
                       [](const auto& stream) { return stream->queue.empty(); });
  });
}

void spin(Stream& stream, double ms) {
  push(stream, [ms] { spun_ms += ms; });
}

bool is_captured(const Stream& stream) { return stream.capture != nullptr; }

cudaError_t spoil(Stream& stream) {
  stream.capture->is_spoiled = true;
  return failed(cudaErrorStreamCaptureUnsupported);
}

// https://docs.nvidia.com/cuda/cuda-runtime-api, cudaThreadExchangeStreamCaptureMode
cudaError_t unsafe_in_capture() {
  const bool relaxed = mode_of_thread == cudaStreamCaptureModeRelaxed;
  const bool global = mode_of_thread == cudaStreamCaptureModeGlobal;
  for (const auto& capture : captures()) {
    if (relaxed || capture->mode == cudaStreamCaptureModeRelaxed) continue;
    if (capture->thread == this_thread() ||
        (global && capture->mode == cudaStreamCaptureModeGlobal)) {
      capture->is_spoiled = true;
      return failed(cudaErrorStreamCaptureUnsupported);
    }
  }
  return cudaSuccess;
}

}  // namespace emulated

using namespace emulated;

extern "C" {

cudaError_t cudaGetDevice(int* device) {
  *device = current_device();
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= devices()) return failed(cudaErrorInvalidDevice);
  device_of_thread = device;
  return cudaSuccess;
}

cudaError_t cudaGetLastError() { return std::exchange(error_of_thread, cudaSuccess); }

cudaError_t cudaPeekAtLastError() { return error_of_thread; }

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* made, unsigned, int) {
  const Lock lock(everything());
  *made = reinterpret_cast<cudaStream_t>(&new_stream(current_device()));
  return cudaSuccess;
}

cudaError_t cudaStreamCreate(cudaStream_t* made) {
  return cudaStreamCreateWithPriority(made, 0, 0);
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* made, unsigned) {
  return cudaStreamCreateWithPriority(made, 0, 0);
}

cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }

cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
  *priority = 0;
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  const Lock lock(everything());
  Stream& stream = stream_of(handle);
  if (is_captured(stream)) return spoil(stream);
  if (const cudaError_t error = unsafe_in_capture()) return error;
  finish(stream);
  return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t handle) {
  const Lock lock(everything());
  Stream& stream = stream_of(handle);
  if (is_captured(stream)) return spoil(stream);
  if (const cudaError_t error = unsafe_in_capture()) return error;
  if (stream.queue.empty()) return cudaSuccess;
  step();
  return cudaErrorNotReady;
}

cudaError_t cudaDeviceSynchronize() {
  const Lock lock(everything());
  if (const cudaError_t error = unsafe_in_capture()) return error;
  finish_all();
  return cudaSuccess;
}

cudaError_t cudaStreamAddCallback(cudaStream_t handle, cudaStreamCallback_t callback, void* data,
                                  unsigned) {
  const Lock lock(everything());
  push(stream_of(handle), [=] { callback(handle, cudaSuccess, data); });
  return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void* data) {
  const Lock lock(everything());
  push(stream_of(handle), [=] { function(data); });
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* made, unsigned) {
  const Lock lock(everything());
  auto event = std::make_shared<Event>(Event{current_device(), {}, {}, {}});
  *made = reinterpret_cast<cudaEvent_t>(event.get());
  events()[*made] = std::move(event);
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* made) { return cudaEventCreateWithFlags(made, 0); }

cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  const Lock lock(everything());
  events().erase(handle);
  return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t on, unsigned flags) {
  const Lock lock(everything());
  Event& event = *events().at(handle);
  Stream& stream = stream_of(on);
  if (event.device != stream.device) return failed(cudaErrorInvalidResourceHandle);
  const bool external = (flags & cudaEventRecordExternal) != 0;
  if (is_captured(stream) && !external) {
    event.capture = stream.capture;
    event.nodes = stream.frontier;
    return cudaSuccess;
  }
  event.capture.reset();
  const auto moment = event.last = std::make_shared<Moment>();
  if (is_captured(stream)) {
    push(stream, [moment] { *moment = {true, now_ms()}; });
  } else {
    push(stream, Item{nullptr, moment});
  }
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t on) {
  return cudaEventRecordWithFlags(handle, on, 0);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t awaited, unsigned flags) {
  const Lock lock(everything());
  const Event& event = *events().at(awaited);
  Stream& stream = stream_of(handle);
  if (event.capture && captures().count(event.capture) != 0) {
    if (is_captured(stream) && stream.capture != event.capture) {
      stream.capture->is_spoiled = event.capture->is_spoiled = true;
      return failed(cudaErrorStreamCaptureMerge);
    }
    if (handle == nullptr) {  // the default stream cannot
      event.capture->is_spoiled = true;
      return failed(cudaErrorStreamCaptureImplicit);
    }
    if (!is_captured(stream)) {  // it joins
      stream.capture = event.capture;
      stream.frontier.clear();
      event.capture->streams.insert(&stream);
    }
    stream.frontier.insert(event.nodes.begin(), event.nodes.end());
    return cudaSuccess;
  }
  if (event.capture) return failed(cudaErrorCapturedEvent);
  if (!event.last) return cudaSuccess;
  if (is_captured(stream)) {
    if ((flags & cudaEventWaitExternal) != 0) return cudaSuccess;
    spoil(stream);
    return failed(cudaErrorStreamCaptureIsolation);
  }
  push(stream, Item{nullptr, event.last, true});
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t handle) {
  const Lock lock(everything());
  if (const cudaError_t error = unsafe_in_capture()) return error;
  const Event& event = *events().at(handle);
  if (event.capture) return failed(cudaErrorCapturedEvent);
  if (event.last && !event.last->is_past) step();
  return event.last && !event.last->is_past ? cudaErrorNotReady : cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  const Lock lock(everything());
  if (const cudaError_t error = unsafe_in_capture()) return error;
  const Event& event = *events().at(handle);
  if (event.capture) return failed(cudaErrorCapturedEvent);
  const auto last = event.last;
  go_on_until([&] { return !last || last->is_past; });
  return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t start, cudaEvent_t end) {
  const Lock lock(everything());
  const auto first = events().at(start)->last, last = events().at(end)->last;
  if (!first || !last) return failed(cudaErrorInvalidResourceHandle);
  if (!first->is_past || !last->is_past) return failed(cudaErrorNotReady);
  *ms = static_cast<float>(last->ms - first->ms);
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, mode_of_thread);
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  const Lock lock(everything());
  static unsigned long long id = 0;
  if (handle == nullptr) return failed(cudaErrorStreamCaptureUnsupported);
  Stream& stream = stream_of(handle);
  if (is_captured(stream)) return failed(cudaErrorIllegalState);
  stream.capture = std::make_shared<Capture>();
  Capture& capture = *stream.capture;
  capture.id = ++id;
  capture.mode = mode;
  capture.origin = &stream;
  capture.thread = this_thread();
  capture.streams.insert(&stream);
  stream.frontier.clear();
  captures().insert(stream.capture);
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* is) {
  const Lock lock(everything());
  *is = status(stream_of(handle));
  return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus* is,
                                     unsigned long long* id, cudaGraph_t* graph,
                                     const cudaGraphNode_t** before,
                                     const cudaGraphEdgeData** edges, size_t* n) {
  const Lock lock(everything());
  const Stream& stream = stream_of(handle);
  *is = status(stream);
  if (!is_captured(stream)) return cudaSuccess;
  if (id != nullptr) *id = stream.capture->id;
  if (graph != nullptr) *graph = reinterpret_cast<cudaGraph_t>(stream.capture->graph.get());
  if (before != nullptr) *before = nullptr;
  if (edges != nullptr) *edges = nullptr;
  if (n != nullptr) *n = 0;
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* made) {
  const Lock lock(everything());
  Stream& stream = stream_of(handle);
  *made = nullptr;
  if (!is_captured(stream)) return failed(cudaErrorIllegalState);
  const auto capture = stream.capture;
  if (capture->origin != &stream) return failed(cudaErrorStreamCaptureUnmatched);
  if (capture->mode != cudaStreamCaptureModeRelaxed && capture->thread != this_thread()) {
    return failed(cudaErrorStreamCaptureWrongThread);
  }
  const bool joined = is_joined(*capture);
  for (Stream* member : capture->streams) {
    member->capture.reset();
    member->frontier.clear();
  }
  captures().erase(capture);
  if (capture->is_spoiled) return failed(cudaErrorStreamCaptureInvalidated);
  if (!joined) return failed(cudaErrorStreamCaptureUnjoined);
  *made = reinterpret_cast<cudaGraph_t>(capture->graph.get());
  graphs()[*made] = capture->graph;
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* made, cudaGraph_t graph,
                                          unsigned long long) {
  const Lock lock(everything());
  static size_t number = 0;
  *made = reinterpret_cast<cudaGraphExec_t>(++number);
  executables()[*made] = graphs().at(graph);
  return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t handle, cudaStream_t on) {
  const Lock lock(everything());
  push(stream_of(on), [graph = executables().at(handle)] { replay(*graph); });
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  const Lock lock(everything());
  graphs().erase(graph);
  return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t handle) {
  const Lock lock(everything());
  executables().erase(handle);
  return cudaSuccess;
}

cudaError_t cudaUserObjectCreate(cudaUserObject_t* made, void* data, cudaHostFn_t destroy,
                                 unsigned references, unsigned) {
  const Lock lock(everything());
  *made = reinterpret_cast<cudaUserObject_t>(new UserObject{destroy, data, references});
  return cudaSuccess;
}

cudaError_t cudaUserObjectRelease(cudaUserObject_t handle, unsigned references) {
  const Lock lock(everything());
  release(reinterpret_cast<UserObject*>(handle), references);
  return cudaSuccess;
}

cudaError_t cudaGraphRetainUserObject(cudaGraph_t graph, cudaUserObject_t handle,
                                      unsigned references, unsigned flags) {
  const Lock lock(everything());
  auto* object = reinterpret_cast<UserObject*>(handle);
  if ((flags & cudaGraphUserObjectMove) == 0) object->references += references;
  auto& kept = reinterpret_cast<Graph*>(graph)->kept;
  kept.insert(kept.end(), references, object);
  return cudaSuccess;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* n) {
  const Lock lock(everything());
  const auto found = graphs().find(graph);
  *n = found == graphs().end() ? 0 : found->second->size();
  return cudaSuccess;
}

cudaError_t cudaGraphDebugDotPrint(cudaGraph_t, const char*, unsigned) { return cudaSuccess; }

cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t, cudaGraphNode_t*, cudaGraphEdgeData*,
                                         size_t* n) {
  *n = 0;
  return cudaSuccess;
}

}  // extern "C"
