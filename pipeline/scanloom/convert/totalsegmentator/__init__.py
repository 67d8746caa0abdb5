"""Read weights of TotalSegmentator as model cards: its table of tasks is data."""
