// Functions of CUDA that torch asks for and the emulation does not have; whoever calls one hears
// it.
#pragma once

#define CANNOT(name) \
  int name() { return 801; /* CUDA_ERROR_NOT_SUPPORTED, cudaErrorNotSupported */ }
