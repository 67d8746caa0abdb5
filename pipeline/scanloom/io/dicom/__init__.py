"""DICOM series in."""
