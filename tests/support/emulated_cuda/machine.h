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
#include <functional>
#include <memory>
#include <mutex>
#include <random>

namespace emulated {

using Task = std::function<void()>;

// One lock for all: tasks run under it, and may call the runtime again.
std::recursive_mutex& everything();
using Lock = std::lock_guard<std::recursive_mutex>;

struct Stream;

// Streams by their handles; of the current device's default stream, too.
Stream& stream_of(cudaStream_t handle);

// Queues a task, or notes it as a node of the graph that the stream is captured for.
void push(Stream& stream, Task task);

// Queues a kernel that does nothing for a while; the clock says that it did.
void spin(Stream& stream, double ms);

// Lets streams go on until this one, or all of them, have nothing left.
void finish(Stream& stream);
void finish_all();

// Whether the stream is captured; `spoil` makes its capture fail at its end.
bool is_captured(const Stream& stream);
cudaError_t spoil(Stream& stream);

// What may not be called while a stream is captured: success, or the error that it is.
cudaError_t unsafe_in_capture();

int devices();
int current_device();
std::mt19937_64& random_numbers();

// Notes an error for `cudaGetLastError`, and returns it.
cudaError_t failed(cudaError_t error);

}  // namespace emulated
