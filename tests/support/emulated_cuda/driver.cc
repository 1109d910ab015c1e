// As much of the driver, `libcuda.so.1`, as the libraries that torch loads ask for: it says that
// there is a context, and can do nothing.

#include "cannot.h"

extern "C" {
int cuCtxGetCurrent(void** context) {
  *context = &context;  // any but null
  return 0;
}
int cuCtxSetCurrent() { return 0; }
int cuDeviceGet() { return 0; }
int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return 0;
}
CANNOT(cuDeviceGetAttribute)
CANNOT(cuDevicePrimaryCtxRetain)
CANNOT(cuFuncGetAttribute)
CANNOT(cuFuncSetAttribute)
CANNOT(cuFuncSetCacheConfig)
CANNOT(cuGetErrorString)
CANNOT(cuLaunchCooperativeKernel)
CANNOT(cuLaunchKernel)
CANNOT(cuLinkAddData_v2)
CANNOT(cuLinkComplete)
CANNOT(cuLinkCreate_v2)
CANNOT(cuModuleGetFunction)
CANNOT(cuModuleLoad)
CANNOT(cuModuleLoadData)
CANNOT(cuModuleLoadDataEx)
CANNOT(cuModuleUnload)
CANNOT(cuOccupancyMaxActiveBlocksPerMultiprocessor)
CANNOT(cuPointerGetAttribute)
CANNOT(cuTensorMapEncodeTiled)
}
