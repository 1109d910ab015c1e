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
  int64_t ns;
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
  int64_t ns = 0;        // how long it takes
  int64_t launched = 0;  // when, on the virtual clock
};

}  // namespace

struct Stream {
  int device;
  std::deque<Item> queue;
  std::shared_ptr<Capture> capture;
  std::set<int> frontier;
  int64_t ns = 0;  // when it has done what it did, on the virtual clock
};

namespace {

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

// The clocks. The virtual one has times of the host, to which every call of the runtime adds, and
// of every stream: a task begins when it has been launched and what it waits for is done. So times
// do not depend on the order in which the tasks really run. The real one is the host's, with what
// spins say to have taken.
struct Clocks {
  int64_t host = 0;  // virtual
  int64_t task = 0;  // when the task that runs ends, virtual
  int64_t spun = 0;
} clocks;

bool is_virtual() { return setting("CLOCK") != 0; }

double now_ms() {
  if (is_virtual()) return static_cast<double>(clocks.task) / 1e6;
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double, std::milli>(now).count() +
         static_cast<double>(clocks.spun) / 1e6;
}

// The host has waited until then.
void wait_until(int64_t ns) { clocks.host = std::max(clocks.host, ns); }

int64_t ns_of(const Moment& moment) { return static_cast<int64_t>(moment.ms * 1e6 + 0.5); }

// What a test has set, and calls by their names.
std::map<std::string, int64_t>& settings() {
  static std::map<std::string, int64_t> all;
  return all;
}

std::map<std::string, int64_t>& calls() {
  static std::map<std::string, int64_t> all;
  return all;
}

thread_local int depth_of_calls = 0;
cudaError_t stuck_error = cudaSuccess;

bool can_go_on(const Stream& stream) {
  if (stream.queue.empty()) return false;
  const Item& next = stream.queue.front();
  return !next.waits || next.moment->is_past;
}

void go_on(Stream& stream) {
  const Item item = std::move(stream.queue.front());
  stream.queue.pop_front();
  if (item.waits) {
    if (is_virtual()) stream.ns = std::max(stream.ns, ns_of(*item.moment));
    return;
  }
  clocks.task = stream.ns = std::max(stream.ns, item.launched) + item.ns;
  if (item.task) item.task();
  if (item.moment) *item.moment = {true, now_ms()};
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
  item.launched = clocks.host;
  stream.queue.push_back(std::move(item));
  const bool at_once = setting("EAGER") != 0;
  while (at_once && step()) {
  }
}

// Lets streams go on because somebody asks whether something is done: a little, or as far as they
// can where the virtual clock tells when it is.
template <typename Done>
void look(const Done& done) {
  while (!done() && step() && is_virtual()) {
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

// How long the nodes take, one after another where they depend on each other: their ends, from the
// beginning of the graph. A node comes after those that it depends on.
std::vector<int64_t> ends_of(const Graph& graph) {
  std::vector<int64_t> ends;
  for (const Node& node : graph) {
    int64_t begin = 0;
    for (const int earlier : node.before) begin = std::max(begin, ends[earlier]);
    ends.push_back(begin + node.ns);
  }
  return ends;
}

void replay(const Graph& graph, const std::vector<int64_t>& ends, int64_t ns) {
  const int64_t begin = clocks.task - ns;
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
    clocks.task = begin + ends[node];
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

int64_t setting(const std::string& name, int64_t otherwise) {
  static std::map<std::string, const char*> environment;  // whose look-up is slow
  const auto found = settings().find(name);
  if (found != settings().end()) return found->second;
  auto [text, is_new] = environment.try_emplace(name, nullptr);
  if (is_new) text->second = std::getenv(("EMULATED_CUDA_" + name).c_str());
  return text->second == nullptr ? otherwise : std::atoll(text->second);
}

Api::Api(const char* name) : lock_(everything()) {
  if (depth_of_calls++ != 0) return;
  ++calls()[name];
  ++calls()["device " + std::to_string(current_device())];
  if (is_virtual()) clocks.host += setting(name, setting("CALL_NS"));
}

Api::~Api() { --depth_of_calls; }

cudaError_t Api::error() const {
  return stuck_error == cudaSuccess ? stuck_error : failed(stuck_error);
}

int devices() {
  static const int number = static_cast<int>(setting("DEVICES", 1));
  return number;
}

int current_device() { return device_of_thread; }

std::mt19937_64& random_numbers() {
  static std::mt19937_64 numbers(setting("SEED"));
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

void push(Stream& stream, Task task, int64_t ns) {
  if (!stream.capture) return push(stream, Item{std::move(task), nullptr, false, ns});
  Graph& graph = *stream.capture->graph;
  graph.push_back({std::move(task), std::move(stream.frontier), ns});
  stream.frontier = {static_cast<int>(graph.size()) - 1};
}

cudaError_t launch(Stream& stream, const std::string& name, Task task, int64_t ns) {
  ENTER_AS("cudaLaunchKernel");
  if (stream.device != current_device()) return failed(cudaErrorInvalidResourceHandle);
  const auto left = settings().find("FAIL_AT");  // launches until the one that fails
  if (left != settings().end() && --left->second <= 0) {
    settings().erase(left);
    if (setting("FAIL_STICKS") == 0) return failed(cudaErrorLaunchOutOfResources);
    task = [] { stuck_error = cudaErrorIllegalAddress; };
  }
  push(stream, std::move(task), ns >= 0 ? ns : setting(name, setting("KERNEL_NS")));
  return cudaSuccess;
}

void finish(Stream& stream) {
  go_on_until([&] { return stream.queue.empty(); });
  wait_until(stream.ns);
}

void finish_all() {
  go_on_until([] {
    return std::all_of(streams().begin(), streams().end(),
                       [](const auto& stream) { return stream->queue.empty(); });
  });
  for (const auto& stream : streams()) wait_until(stream->ns);
}

cudaError_t spin(Stream& stream, int64_t ns) {
  return launch(stream, "spin", [ns] { clocks.spun += ns; }, ns);
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

// For tests. Sets a number; and forgets it.
void emulated_set(const char* name, int64_t value) {
  const Lock lock(everything());
  settings()[name] = value;
}

void emulated_unset(const char* name) {
  const Lock lock(everything());
  settings().erase(name);
}

// The virtual time of the host.
int64_t emulated_now_ns() {
  const Lock lock(everything());
  return clocks.host;
}

// The calls so far by their names, and by the current device: a line each.
const char* emulated_calls() {
  const Lock lock(everything());
  static std::string text;
  text.clear();
  for (const auto& [name, number] : calls()) text += name + "\t" + std::to_string(number) + "\n";
  return text.c_str();
}

cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= devices()) return failed(cudaErrorInvalidDevice);
  device_of_thread = device;
  return cudaSuccess;
}

cudaError_t cudaGetLastError() { return std::exchange(error_of_thread, cudaSuccess); }

cudaError_t cudaPeekAtLastError() { return error_of_thread; }

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* made, unsigned, int) {
  ENTER;
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
  ENTER;
  Stream& stream = stream_of(handle);
  if (is_captured(stream)) return spoil(stream);
  if (const cudaError_t error = unsafe_in_capture()) return error;
  finish(stream);
  return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t handle) {
  ENTER;
  Stream& stream = stream_of(handle);
  if (is_captured(stream)) return spoil(stream);
  if (const cudaError_t error = unsafe_in_capture()) return error;
  look([&] { return stream.queue.empty(); });
  const bool is_done = stream.queue.empty() && (!is_virtual() || stream.ns <= clocks.host);
  return is_done ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaDeviceSynchronize() {
  ENTER;
  if (const cudaError_t error = unsafe_in_capture()) return error;
  finish_all();
  return cudaSuccess;
}

cudaError_t cudaStreamAddCallback(cudaStream_t handle, cudaStreamCallback_t callback, void* data,
                                  unsigned) {
  ENTER;
  push(stream_of(handle), [=] { callback(handle, cudaSuccess, data); });
  return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void* data) {
  ENTER;
  push(stream_of(handle), [=] { function(data); });
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* made, unsigned) {
  ENTER;
  auto event = std::make_shared<Event>(Event{current_device(), {}, {}, {}});
  *made = reinterpret_cast<cudaEvent_t>(event.get());
  events()[*made] = std::move(event);
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* made) { return cudaEventCreateWithFlags(made, 0); }

cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  ENTER;
  events().erase(handle);
  return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t on, unsigned flags) {
  ENTER;
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
  ENTER;
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
  ENTER;
  if (const cudaError_t error = unsafe_in_capture()) return error;
  const Event& event = *events().at(handle);
  if (event.capture) return failed(cudaErrorCapturedEvent);
  if (!event.last) return cudaSuccess;
  const auto& last = *event.last;
  look([&] { return last.is_past; });
  const bool is_done = last.is_past && (!is_virtual() || ns_of(last) <= clocks.host);
  return is_done ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  ENTER;
  if (const cudaError_t error = unsafe_in_capture()) return error;
  const Event& event = *events().at(handle);
  if (event.capture) return failed(cudaErrorCapturedEvent);
  const auto last = event.last;
  go_on_until([&] { return !last || last->is_past; });
  if (last && is_virtual()) wait_until(ns_of(*last));
  return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t start, cudaEvent_t end) {
  ENTER;
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
  ENTER;
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
  ENTER;
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
  ENTER;
  static size_t number = 0;
  *made = reinterpret_cast<cudaGraphExec_t>(++number);
  executables()[*made] = graphs().at(graph);
  return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t handle, cudaStream_t on) {
  ENTER;
  const auto graph = executables().at(handle);
  const auto ends = ends_of(*graph);
  const int64_t ns = ends.empty() ? 0 : *std::max_element(ends.begin(), ends.end());
  push(stream_of(on), [=] { replay(*graph, ends, ns); }, ns);
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  ENTER;
  graphs().erase(graph);
  return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t handle) {
  ENTER;
  executables().erase(handle);
  return cudaSuccess;
}

cudaError_t cudaUserObjectCreate(cudaUserObject_t* made, void* data, cudaHostFn_t destroy,
                                 unsigned references, unsigned) {
  ENTER;
  *made = reinterpret_cast<cudaUserObject_t>(new UserObject{destroy, data, references});
  return cudaSuccess;
}

cudaError_t cudaUserObjectRelease(cudaUserObject_t handle, unsigned references) {
  ENTER;
  release(reinterpret_cast<UserObject*>(handle), references);
  return cudaSuccess;
}

cudaError_t cudaGraphRetainUserObject(cudaGraph_t graph, cudaUserObject_t handle,
                                      unsigned references, unsigned flags) {
  ENTER;
  auto* object = reinterpret_cast<UserObject*>(handle);
  if ((flags & cudaGraphUserObjectMove) == 0) object->references += references;
  auto& kept = reinterpret_cast<Graph*>(graph)->kept;
  kept.insert(kept.end(), references, object);
  return cudaSuccess;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* n) {
  ENTER;
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
