"""Before a run: what each rank would own, read, hold and take, on the real geometry and on measured speeds."""
