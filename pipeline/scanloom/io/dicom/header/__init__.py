"""Parse DICOM headers."""
