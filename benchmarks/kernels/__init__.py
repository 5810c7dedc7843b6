"""The CUDA kernels against plain torch, dense layers and what a device could do at best."""
