"""The hospital's side: studies that DICOM peers send are kept until they are segmented."""
