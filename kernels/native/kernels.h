/* All kernels, and the version of their arguments. Each instruction set is one file that includes this: setuptools would
 * give a source of two modules one object file, which both compilers would write at the same time. */
#include "../gated/cpu.c"
#include "../gated_delta/cpu.c"
#include "../packed_weight/cpu.c"
#include "../packed_weight/dots.c"
#include "../paged_attention/cpu.c"
#include "../rms_norm/cpu.c"
#include "../rotary/cpu.c"
#include "../sampling/cpu.c"
#include "../segment_lora/cpu.c"
#include "../token_mask/cpu.c"
#include "../token_penalties/cpu.c"

#include "../decoder_layers/cpu.c" /* calls those above */

/* Which arguments the functions of this library take; see __init__.py. */
int lorabatch_kernels_version(void) { return 24; }
