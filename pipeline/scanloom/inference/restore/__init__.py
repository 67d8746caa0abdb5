"""Map network scores back to the source grid."""
