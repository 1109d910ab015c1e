// The driver's functions for virtual memory, of which torch's allocator makes segments that grow
// (`expandable_segments:True`). An address is reserved without access; what is mapped there is the
// host's memory, a block of its device like any other.
#include <cuda.h>
#include <sys/mman.h>

#include <cstring>
#include <map>

#include "machine.h"

namespace emulated {

namespace {

struct Physical {
  size_t bytes;
  int device;
};

std::map<CUmemGenericAllocationHandle, Physical>& physical() {
  static std::map<CUmemGenericAllocationHandle, Physical> handles;
  return handles;
}

CUresult reserve(CUdeviceptr* made, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
  void* start = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  *made = reinterpret_cast<CUdeviceptr>(start);
  return start == MAP_FAILED ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

CUresult unreserve(CUdeviceptr start, size_t bytes) {
  munmap(reinterpret_cast<void*>(start), bytes);
  return CUDA_SUCCESS;
}

CUresult create(CUmemGenericAllocationHandle* made, size_t bytes, const CUmemAllocationProp* prop,
                unsigned long long) {
  const Lock lock(everything());
  static CUmemGenericAllocationHandle last = 0;
  if (!fits(bytes, prop->location.id)) return CUDA_ERROR_OUT_OF_MEMORY;
  *made = ++last;
  physical()[*made] = {bytes, prop->location.id};
  return CUDA_SUCCESS;
}

// What is mapped stays until it is unmapped.
CUresult release(CUmemGenericAllocationHandle handle) {
  const Lock lock(everything());
  return physical().erase(handle) == 1 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult map(CUdeviceptr start, size_t bytes, size_t, CUmemGenericAllocationHandle handle,
             unsigned long long) {
  const Lock lock(everything());
  const auto found = physical().find(handle);
  if (found == physical().end() || found->second.bytes != bytes) return CUDA_ERROR_INVALID_VALUE;
  add_block(reinterpret_cast<char*>(start), bytes, found->second.device);
  return CUDA_SUCCESS;
}

CUresult grant(CUdeviceptr start, size_t bytes, const CUmemAccessDesc*, size_t) {
  const int error = mprotect(reinterpret_cast<void*>(start), bytes, PROT_READ | PROT_WRITE);
  return error == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

// Who is still to read it faults, as on a GPU.
CUresult unmap(CUdeviceptr start, size_t bytes) {
  const Lock lock(everything());
  drop_blocks(reinterpret_cast<char*>(start), bytes);
  void* again = mmap(reinterpret_cast<void*>(start), bytes, PROT_NONE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  return again == MAP_FAILED ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult granularity(size_t* bytes, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  *bytes = size_t{2} << 20;
  return CUDA_SUCCESS;
}

CUresult device(CUdevice* handle, int ordinal) {
  *handle = ordinal;
  return CUDA_SUCCESS;
}

CUresult attribute(int* value, CUdevice_attribute, CUdevice) {
  *value = 0;
  return CUDA_SUCCESS;
}

CUresult error_string(CUresult, const char** text) {
  *text = "emulated";
  return CUDA_SUCCESS;
}

CUresult cannot() { return CUDA_ERROR_NOT_SUPPORTED; }

}  // namespace

// A function of the driver that torch's allocator needs, or null.
void* driver_function(const char* name) {
  const auto pointer = [](auto* function) { return reinterpret_cast<void*>(function); };
  static const std::map<std::string, void*> functions{
      {"cuDeviceGet", pointer(device)},
      {"cuDeviceGetAttribute", pointer(attribute)},
      {"cuGetErrorString", pointer(error_string)},
      {"cuMemAddressFree", pointer(unreserve)},
      {"cuMemAddressReserve", pointer(reserve)},
      {"cuMemCreate", pointer(create)},
      {"cuMemExportToShareableHandle", pointer(cannot)},
      {"cuMemGetAddressRange", pointer(cannot)},
      {"cuMemGetAllocationGranularity", pointer(granularity)},
      {"cuMemGetAllocationPropertiesFromHandle", pointer(cannot)},
      {"cuMemImportFromShareableHandle", pointer(cannot)},
      {"cuMemMap", pointer(map)},
      {"cuMemRelease", pointer(release)},
      {"cuMemRetainAllocationHandle", pointer(cannot)},
      {"cuMemSetAccess", pointer(grant)},
      {"cuMemUnmap", pointer(unmap)},
      {"cuMemsetD32Async", pointer(cannot)},
      {"cuStreamWriteValue32", pointer(cannot)},
  };
  const auto found = functions.find(name);
  return found == functions.end() ? nullptr : found->second;
}

}  // namespace emulated
