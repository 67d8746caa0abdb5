"""Runs networks on a device: resampling, sliding windows, and label maps on the scan's grid."""
