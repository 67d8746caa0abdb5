"""What a trained model needs and gives, read as data."""
