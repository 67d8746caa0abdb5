"""Volume formats: NIfTI, Analyze, NRRD, MetaImage, MGH."""
