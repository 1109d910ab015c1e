// The machine that the emulated runtime runs on: devices, streams, and what is queued there.
//
//   launch, copy, record, wait  ->  queue of a stream  ->  done when some thread waits for
//   something
//
// Nothing runs when it is launched. Who synchronizes lets streams go on, in random order and by a
// random number of steps, until what he waits for is done: so a step that lacks a wait finds its
// operands unwritten, or written again, sooner or later. `EMULATED_CUDA_SEED` is the seed.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>

namespace emulated {

using Task = std::function<void()>;

// More memory than this is not filled with what is no number: its pages cost time.
constexpr size_t kPoisoned = size_t{32} << 20;

// One lock for all: tasks run under it, and may call the runtime again.
std::recursive_mutex& everything();
using Lock = std::lock_guard<std::recursive_mutex>;

// A number by its name: what a test has set, else `EMULATED_CUDA_` and the name in the
// environment, else the last argument.
int64_t setting(const std::string& name, int64_t otherwise = 0);

// A call of the runtime by the host: it has the lock, is counted, and takes the host time. Not
// those that only look, nor those of the runtime itself.
class Api {
 public:
  explicit Api(const char* name);
  ~Api();
  Api(const Api&) = delete;
  Api& operator=(const Api&) = delete;

  // The error that has stuck: then every call returns it.
  cudaError_t error() const;

 private:
  const Lock lock_;
};

#define ENTER_AS(name)           \
  const emulated::Api api(name); \
  if (const cudaError_t stuck = api.error()) return stuck
#define ENTER ENTER_AS(__func__)

struct Stream;

// Streams by their handles; of the current device's default stream, too.
Stream& stream_of(cudaStream_t handle);

// Queues a task that takes so long, or notes it as a node of the graph that the stream is captured
// for.
void push(Stream& stream, Task task, int64_t ns = 0);

// Queues a kernel that takes `ns`, by default as the settings say: of its name, or `KERNEL_NS`. The
// stream must be of the current device, and the launch may be the one that a test lets fail.
cudaError_t launch(Stream& stream, const std::string& name, Task task, int64_t ns = -1);

// Queues a kernel that does nothing for a while; the clock says that it did.
cudaError_t spin(Stream& stream, int64_t ns);

// Lets streams go on until this one, or all of them, have nothing left; the host has waited.
void finish(Stream& stream);
void finish_all();

// Whether the stream is captured; `spoil` makes its capture fail at its end.
bool is_captured(const Stream& stream);
cudaError_t spoil(Stream& stream);

// What may not be called while a stream is captured: success, or the error that it is.
cudaError_t unsafe_in_capture();

// A device's memory: whether it has so many bytes left, and blocks at addresses.
bool fits(size_t bytes, int device);
void add_block(const char* start, size_t bytes, int device);
void drop_blocks(const char* start, size_t bytes);

// A function of the driver that torch's allocator needs, or null.
void* driver_function(const char* name);

int devices();
int current_device();
std::mt19937_64& random_numbers();

// Notes an error for `cudaGetLastError`, and returns it.
cudaError_t failed(cudaError_t error);

}  // namespace emulated
