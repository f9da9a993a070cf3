"""The device side: buckets, batch building, the compiled step, sampling, memory and the mesh."""
