/* Which arguments the functions of this library take; see __init__.py. */
int lorabatch_kernels_version(void) { return 7; }
