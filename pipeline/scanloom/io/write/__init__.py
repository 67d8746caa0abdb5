"""Write results: NIfTI label maps, DICOM SEG."""
