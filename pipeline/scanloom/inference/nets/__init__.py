"""Networks of our own, and MONAI's in other forms: state dicts have the names of other programs."""
