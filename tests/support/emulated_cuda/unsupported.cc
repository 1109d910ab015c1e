// What the runtime does not have: its declarations do not matter to who links it.
#include "cannot.h"

extern "C" {
CANNOT(__cudaInitModule)
CANNOT(cudaDeviceGetGraphMemAttribute)
CANNOT(cudaDeviceSetGraphMemAttribute)
CANNOT(cudaGetSymbolAddress)
CANNOT(cudaGraphAddNode)
CANNOT(cudaGraphConditionalHandleCreate)
CANNOT(cudaIpcCloseMemHandle)
CANNOT(cudaIpcGetEventHandle)
CANNOT(cudaIpcGetMemHandle)
CANNOT(cudaIpcOpenEventHandle)
CANNOT(cudaIpcOpenMemHandle)
CANNOT(cudaKernelSetAttributeForDevice)
CANNOT(cudaLaunchCooperativeKernel)
CANNOT(cudaLibraryGetKernel)
CANNOT(cudaLibraryLoadData)
CANNOT(cudaLibraryUnload)
CANNOT(cudaMemcpy2DAsync)
CANNOT(cudaOccupancyMaxActiveBlocksPerMultiprocessor)
CANNOT(cudaStreamBeginCaptureToGraph)
CANNOT(cudaStreamUpdateCaptureDependencies)
}
