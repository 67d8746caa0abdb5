"""Rules and arithmetic of resampling: alignment of grids, splines, exact voxels, crops."""
