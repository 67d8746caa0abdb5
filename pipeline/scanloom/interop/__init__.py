"""What users of notebooks and other libraries expect of the data types: images, tensors, HTML."""
