"""The proof that two runs are the same: recordings, replays of them, and comparisons of run folders."""
