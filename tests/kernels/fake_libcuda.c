// As much of NVIDIA's driver as Triton's launcher calls. Nothing runs: each launch is a line in $FAKE_CUDA_LOG.
#include <cuda.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// Bytes of the next launch's parameters, which the driver knows from the kernel; 0 ends them.
int fake_sizes[64];

CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult error, const char **text) { *text = "an error"; return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *version) { *version = 13000; return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int number) { *device = number; return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { *context = (CUcontext)1; return CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext *context) { *context = (CUcontext)1; return CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice *device) { *device = 0; return CUDA_SUCCESS; }
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { *value = 0; return CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute what, CUdevice device) {
  *value = 227 << 10;  // of shared memory, which is all that is asked for
  return CUDA_SUCCESS;
}
CUresult cuModuleLoadData(CUmodule *module, const void *image) { *module = (CUmodule)1; return CUDA_SUCCESS; }
CUresult cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  *function = (CUfunction)strdup(name);
  return CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute what, CUfunction function) { *value = 1024; return CUDA_SUCCESS; }
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute what, int value) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }
CUresult cuOccupancyMaxActiveClusters(int *count, CUfunction function, const CUlaunchConfig *config) { *count = 1; return CUDA_SUCCESS; }
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) { *status = 0; return CUDA_SUCCESS; }
CUresult cuPointerGetAttribute(void *data, CUpointer_attribute what, CUdeviceptr pointer) {
  memcpy(data, &pointer, sizeof(pointer));
  return CUDA_SUCCESS;
}
CUresult cuPointerGetAttributes(unsigned count, CUpointer_attribute *what, void **data, CUdeviceptr pointer) {
  return CUDA_ERROR_NOT_SUPPORTED;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **params, void **extra) {
  FILE *log = fopen(getenv("FAKE_CUDA_LOG"), "a");
  int pdl = 0;
  for (unsigned i = 0; i < config->numAttrs; i++)
    pdl |= config->attrs[i].id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
  fprintf(log, "%s grid %u %u %u block %u shared %u stream %lu pdl %d :", (const char *)function, config->gridDimX,
          config->gridDimY, config->gridDimZ, config->blockDimX, config->sharedMemBytes,
          (unsigned long)config->hStream, pdl);
  for (int i = 0; fake_sizes[i] != 0; i++) {
    unsigned long value = 0;
    memcpy(&value, params[i], fake_sizes[i]);
    fprintf(log, " %lx", value);
  }
  fprintf(log, "\n");
  fclose(log);
  return CUDA_SUCCESS;
}
