"""Loop IR as text: C++ for processors, CUDA for GPUs."""
