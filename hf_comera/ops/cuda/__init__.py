"""CUDA kernels: finding the compiler, building, loading, the switch, dispatch, and one file a kernel."""
