// What a device says of itself, and what it cannot do.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>

#include "machine.h"

using namespace emulated;

namespace {

// torch's own kernels by the address of their stubs. None can run here but the spin kernel of
// `torch.cuda._sleep`; `kernels.cc` takes the place of those that operators launch.
std::map<const void*, std::string>& kernels() {
  static std::map<const void*, std::string> names;
  return names;
}

thread_local cudaStream_t stream_of_launch = nullptr;

cudaError_t launched(const void* function, void** arguments, cudaStream_t on) {
  const Lock lock(everything());
  const std::string& name = kernels()[function];
  if (name.find("spin_kernel") != std::string::npos) {
    return spin(stream_of(on), *static_cast<int64_t*>(arguments[0]));  // a cycle is a nanosecond
  }
  std::fprintf(stderr, "emulated CUDA has no kernel %s\n", name.c_str());
  return failed(cudaErrorLaunchFailure);
}

}  // namespace

extern "C" {

void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, void*,
                            void*, void*, void*, int*) {
  kernels()[function] = name;
}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, void* stream) {
  stream_of_launch = static_cast<cudaStream_t>(stream);
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* bytes, void* stream) {
  *grid = *block = dim3(1, 1, 1);
  *bytes = 0;
  *static_cast<cudaStream_t*>(stream) = stream_of_launch;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = static_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void** arguments, size_t,
                               cudaStream_t on) {
  return launched(kernel, arguments, on);
}
cudaError_t cudaLaunchKernel(const void* function, dim3, dim3, void** arguments, size_t,
                             cudaStream_t on) {
  return launched(function, arguments, on);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function,
                                void** arguments) {
  return launched(function, arguments, config->stream);
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  *attributes = {};
  attributes->binaryVersion = attributes->ptxVersion = 90;
  attributes->maxThreadsPerBlock = 1024;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int,
                                                                   size_t, unsigned) {
  *blocks = 8;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int* number) {
  *number = devices();
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  *properties = {};
  std::snprintf(properties->name, sizeof properties->name, "Emulated GPU");
  properties->totalGlobalMem = setting("MEMORY", int64_t{16} << 30);
  properties->major = 9;
  properties->multiProcessorCount = 132;
  properties->warpSize = 32;
  properties->maxThreadsPerBlock = 1024;
  properties->maxThreadsPerMultiProcessor = 2048;
  properties->l2CacheSize = 1 << 20;
  properties->regsPerBlock = 65536;
  properties->sharedMemPerBlock = 49152;
  properties->maxGridSize[0] = INT32_MAX;
  properties->maxGridSize[1] = properties->maxGridSize[2] = UINT16_MAX;
  properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = 1024;
  properties->maxThreadsDim[2] = 64;
  properties->pciBusID = device;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  const std::map<cudaDeviceAttr, int> known = {{cudaDevAttrComputeCapabilityMajor, 9},
                                               {cudaDevAttrMultiProcessorCount, 132},
                                               {cudaDevAttrClockRate, 1000000},
                                               {cudaDevAttrMaxThreadsPerBlock, 1024}};
  const auto found = known.find(attribute);
  *value = found == known.end() ? 0 : found->second;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int device) {
  std::snprintf(text, length, "0000:%02x:00.0", device);
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least != nullptr) *least = 0;
  if (greatest != nullptr) *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  *can = device != peer && std::getenv("EMULATED_CUDA_NO_PEER") == nullptr;
  return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) { return cudaDriverGetVersion(version); }
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  *function = emulated::driver_function(name);
  if (result != nullptr) {
    *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  }
  return cudaSuccess;
}
cudaError_t cudaProfilerStart() { return cudaSuccess; }
cudaError_t cudaProfilerStop() { return cudaSuccess; }

const char* cudaGetErrorName(cudaError_t) { return "cudaErrorEmulated"; }
const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaErrorStreamCaptureUnsupported:
      return "operation not permitted when stream is capturing";
    case cudaErrorStreamCaptureInvalidated:
      return "operation failed due to a previous error during capture";
    case cudaErrorStreamCaptureUnjoined:
      return "capturing stream has unjoined work";
    case cudaErrorStreamCaptureIsolation:
      return "dependency created on uncaptured work in another stream";
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorInvalidResourceHandle:
      return "invalid resource handle";
    case cudaErrorLaunchOutOfResources:
      return "too many resources requested for launch";
    case cudaErrorIllegalAddress:
      return "an illegal memory access was encountered";
    default:
      thread_local char text[64];
      std::snprintf(text, sizeof text, "error %d of the emulated runtime", error);
      return text;
  }
}

cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) {
  return cudaSuccess;
}

}  // extern "C"
