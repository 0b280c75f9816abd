"""Kernels compute attention over a view, one contract with exchangeable bodies; they never allocate, decide or know what a turn is."""
