"""Model cards: trained models described as data."""
