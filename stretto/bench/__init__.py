"""What a speed-up is worth: a plan written before the runs, and the arithmetic that judges them."""
