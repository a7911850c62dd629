/* The kernels in plain C, for any processor. */

#define KERNELS portable_kernels
#define NAME "portable"
#include "kernels.inc"
