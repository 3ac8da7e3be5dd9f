"""What is learned of answers that have come: how far predictions are off, how slow workers are."""
