"""The cases of a run and their results: outcomes, tables, totals, verification, export."""
