"""Stage 3 of the path of a program; empty today: meshes and shardings arrive with the partitioner."""
