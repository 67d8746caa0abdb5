"""What `scanloom doctor` looks at: each check returns findings and never raises."""
