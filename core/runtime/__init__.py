"""Running a model over ranks: local graphs, derivatives, outputs, processes."""
