"""DICOM over the network. pynetdicom is imported here only: the extra `hospital`."""
