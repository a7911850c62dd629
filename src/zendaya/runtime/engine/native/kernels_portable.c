/* The kernels in plain C, for any processor. */

#define KERNELS zd_kernels_portable
#define NAME "portable"
#include "kernels.inc"
