"""What made an answer, and the proof of it."""
