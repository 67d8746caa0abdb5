"""Tables, totals and verification of a run's results."""
