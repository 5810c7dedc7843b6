// The library itself: its CUDA and the driver's, whether a kernel of it starts at all, and what an error means.
#include "portable.h"

namespace {

struct Trial {
  int nothing;
};

KERNEL trial_kernel(Trial) {}

}  // namespace

// What the driver can run and what this library was compiled with, as 1000 * major + 10 * minor.
extern "C" int hf_comera_cuda_versions(int* driver, int* compiled) {
  if (const int status = driver_version(driver)) return status;
  return compiled_version(compiled);
}

// An empty kernel, so that what keeps kernels from starting shows before anything depends on them.
extern "C" int hf_comera_trial_launch(void* stream) { return launch(trial_kernel, dim3(1), 32, stream, Trial{0}); }

// What a positive error means, in CUDA's words.
extern "C" const char* hf_comera_error_message(int status) {
#ifdef HF_COMERA_EMULATED
  return status ? "emulated" : "no error";
#else
  return cudaGetErrorString(static_cast<cudaError_t>(status));
#endif
}
