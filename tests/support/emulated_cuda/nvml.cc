// As much of NVIDIA's management library, `libnvidia-ml.so.1`, as torch's allocator asks of it when
// a segment grows: it has GPUs, and none with memory that other hosts could read.
#include "cannot.h"

extern "C" {
int nvmlInit_v2() { return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char*, void** device) {
  *device = device;  // any but null
  return 0;
}
CANNOT(nvmlDeviceGetNvLinkRemoteDeviceType)
CANNOT(nvmlDeviceGetNvLinkRemotePciInfo_v2)
CANNOT(nvmlDeviceGetComputeRunningProcesses)
CANNOT(nvmlSystemGetCudaDriverVersion_v2)
}
