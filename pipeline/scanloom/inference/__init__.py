"""The device: networks, resampling, windows, the way back."""
